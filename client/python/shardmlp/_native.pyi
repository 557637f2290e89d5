import enum
from collections.abc import Callable

class DType(enum.Enum):
    f32 = ...
    bf16 = ...
    f16 = ...
    f64 = ...

class Matrix:
    def __init__(
        self, data: int = 0, rows: int = 0, cols: int = 0, row_stride: int = 0, dtype: DType = DType.f32
    ) -> None: ...

class Position:
    step: int
    attempt: int
    weights_version: int

class Layer:
    layer: int
    module: str
    hidden_size: int
    intermediate_size: int
    output_size: int
    activation: str
    gated: bool

class Tensor:
    name: str
    layer: int
    shape: list[int]
    dtype: DType

class MemoryPlan:
    weights_bytes: int
    gradients_bytes: int
    master_weights_bytes: int
    optimizer_bytes: int
    workspace_bytes: int
    staging_bytes: int
    ledger_bytes: int
    stash_bytes: int

class Replica:
    rank: int
    replica_count: int
    member_count: int
    generation: int
    member_ranks: list[int]

class ServedModel:
    model_type: str
    compute_dtype: DType
    frozen: bool
    layers: list[Layer]
    tensors: list[Tensor]
    position: Position
    memory: MemoryPlan
    replica: Replica

class Checkpoint:
    name: str
    step: int
    byte_count: int

class AdamW:
    def __init__(
        self, *, learning_rate: float, beta1: float, beta2: float, epsilon: float, weight_decay: float
    ) -> None: ...

class Sgd:
    def __init__(
        self, *, learning_rate: float, momentum: float, dampening: float, weight_decay: float, nesterov: bool
    ) -> None: ...

class KeepFrozen: ...

class ParameterGroup:
    def __init__(self, tensors: list[str], hyperparameters: AdamW | Sgd | KeepFrozen) -> None: ...

class SealedStep:
    tensor_sums_of_squares: list[float]
    finite: bool
    non_finite_origin: str

class KeepInput(enum.Enum):
    if_room = ...
    pinned = ...

class Session:
    position: Position
    run_under_way: bool
    pending_row_count: int
    def forward(
        self,
        layer: int,
        x: Matrix,
        y: Matrix,
        keep_input: KeepInput | None,
        await_inputs: Callable[[int], None] | None,
        output_arrived: Callable[[int], None] | None,
    ) -> tuple[int, int]: ...
    def backward(
        self,
        layer: int,
        weights_version: int,
        x: Matrix,
        dy: Matrix,
        dx: Matrix,
        weight_gradient: bool,
        ticket: int,
        await_inputs: Callable[[int], None] | None,
        output_arrived: Callable[[int], None] | None,
    ) -> None: ...
    def release(self, ticket: int) -> None: ...
    def seal_step(self) -> SealedStep: ...
    def commit_step(self, groups: list[ParameterGroup], gradient_scale: float, fresh_optimizer: bool) -> Position: ...
    def discard_step(self, reason: str, within_seconds: float) -> Position: ...
    def resync(self) -> Position: ...
    def take_up(self, lost: Position) -> None: ...
    def close(self) -> None: ...

class Credentials:
    def __init__(
        self, *, ca_file: str, cert_file: str, key_file: str, server_name: str, token_file: str
    ) -> None: ...

class Client:
    model: ServedModel
    @staticmethod
    def connect(
        target: str,
        *,
        connections: int,
        connect_timeout_seconds: float,
        stall_timeout_seconds: float,
        seal_timeout_seconds: float,
        retry_budget_seconds: float,
        credentials: Credentials,
        abandoned: Callable[[], bool] | None,
    ) -> Client: ...
    def open_session(self, *, run_id: str, train: bool, trainer_count: int, trainer_rank: int) -> Session: ...
    def read_tensor(self, name: str, data: int, byte_count: int) -> int: ...
    def checksums(self) -> dict[str, int]: ...
    def save_checkpoint(self, name: str) -> Checkpoint: ...
    def restore_checkpoint(self, name: str) -> Position: ...
    def delete_checkpoint(self, name: str) -> Checkpoint: ...
    def list_checkpoints(self) -> list[Checkpoint]: ...

def xxh3_64(data: int, byte_count: int) -> int: ...
