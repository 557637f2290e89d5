"""The servers of one model, each with layers of its own, as a trainer's step sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, fields

from . import _native
from .connection import Connection, is_lost
from .errors import Error


_TRANSIENT = ("UNAVAILABLE", "DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED", "CANCELLED")


@dataclass(frozen=True)
class MemoryPlan:
    """What the servers hold, in bytes by use."""

    weights_bytes: int
    gradients_bytes: int
    master_weights_bytes: int
    optimizer_bytes: int
    workspace_bytes: int
    staging_bytes: int
    ledger_bytes: int
    stash_bytes: int


@dataclass(frozen=True)
class Sealed:
    """A sealed step. ``squares``: by the server's tensor name, the sum of squares of its gradient, unscaled, summed
    over trainers. Where it is not ``finite``, ``non_finite_origin`` is the first gradient, or input of one, that is
    not."""

    squares: dict[str, float]
    finite: bool
    non_finite_origin: str


def choose_replicas(connections: list[Connection], trainer_rank: int) -> list[Connection]:
    """Of servers that are replicas of each other (--replicas), the one that trainer ``trainer_rank`` trains on: that of
    rank ``trainer_rank`` modulo their number, which knows the others. Other servers as they are. Raises ValueError where servers of one layer
    are not replicas of each other."""
    sets: dict[tuple[int, ...], list[Connection]] = {}
    for connection in connections:
        sets.setdefault(tuple(layer.layer for layer in connection.model.layers), []).append(connection)
    chosen = []
    for replicas in sets.values():
        ranks = {connection.model.replica.rank: connection for connection in replicas}
        counts = {connection.model.replica.replica_count for connection in replicas}
        if len(replicas) > 1 and (len(ranks) < len(replicas) or len(counts) > 1 or counts == {1}):
            raise ValueError(
                "they serve the same layers and are not replicas of each other: "
                + ", ".join(
                    f"{c.target} (replica {c.model.replica.rank} of {c.model.replica.replica_count})" for c in replicas
                )
                + "; start them with --layers that do not overlap, or as --replicas of one run"
            )
        own = ranks[sorted(ranks)[trainer_rank % len(ranks)]]
        own.others = [connection.target for connection in replicas if connection is not own]
        chosen.append(own)
    return chosen


@dataclass
class _Decision:
    """What a step is committed with, on one server after another. It stands until the trainer's own half is done."""

    step: int
    gradient_scale: float
    fresh_optimizer: bool
    groups: dict[Connection, list[_native.ParameterGroup]]
    repeatable: bool = field(default=True, compare=False)  # the trainer and all servers still have the step


class Servers:
    """A step is one on all servers where this trainer trains: all are sealed before any is committed. What fails on one
    is raised, as :class:`shardmlp.Error`; a commit that failed may be repeated, and is done where it was not. From the
    first server's commit on until settle(), the step can be done and not dropped."""

    def __init__(self, connections: list[Connection]) -> None:
        """Raises ValueError where two serve one layer."""
        # All trainers ask the servers in one order, so that the first one's decision is everyone's.
        self.connections = sorted(connections, key=lambda c: min(layer.layer for layer in c.model.layers))
        self._decision: _Decision | None = None
        self._owners: dict[int, Connection] = {}  # by index of the layer
        for connection in connections:
            for layer in connection.model.layers:
                owner = self._owners.setdefault(layer.layer, connection)
                if owner is not connection:
                    raise ValueError(
                        f"{owner.target} and {connection.target} both serve {layer.module}: start them with --layers "
                        "that do not overlap"
                    )

    def owner(self, layer: _native.Layer) -> Connection:
        """To the server that has ``layer``."""
        return self._owners[layer.layer]

    def move(self, error: Error, layer: _native.Layer | None) -> str:
        """Where the server that ``error`` came from, that of ``layer`` or the one it names, is lost to this trainer, and
        another of its replicas has it now: which. Otherwise empty."""
        if not is_lost(error):
            return ""
        of_layer = self.owner(layer).target if layer is not None else error.metadata.get("target")
        for connection in self.connections:
            if connection.target == of_layer and connection.move():
                return connection.target
        return ""

    @property
    def training(self) -> list[Connection]:
        """Those that this trainer trains on."""
        return [connection for connection in self.connections if connection.run.train]

    @property
    def trainer_count(self) -> int:
        return self.connections[0].run.trainer_count

    @property
    def tensors(self) -> list[str]:
        return [tensor.name for connection in self.connections for tensor in connection.model.tensors]

    @property
    def memory(self) -> MemoryPlan:
        plans = [connection.model.memory for connection in self.connections]
        return MemoryPlan(*(sum(getattr(plan, field.name) for plan in plans) for field in fields(MemoryPlan)))

    @property
    def step(self) -> int:
        """Where the servers stand. Raises where they stand apart."""
        steps = {c.target: c.session.position.step for c in self.training or self.connections}
        if len(set(steps.values())) > 1:
            raise Error(
                "the servers are at different steps ("
                + ", ".join(f"{target} at {step}" for target, step in steps.items())
                + "): take them to a checkpoint that all of them have, with offload(..., resume=True) and then "
                "remote.restore(), and the trainer to its own of that step",
                "FAILED_PRECONDITION",
                "STALE_ATTEMPT",
            )
        return next(iter(steps.values()))

    @property
    def pending_row_count(self) -> int:
        return sum(connection.session.pending_row_count for connection in self.training)

    @property
    def half_done(self) -> bool:
        """Whether a server may have committed a step that the trainer has not done yet."""
        return self._decision is not None

    def check_whole(self) -> None:
        """Raises Error where a step is half done, or the servers are at different steps."""
        if self._committed:
            raise self._half_done("no other step can be begun")
        _ = self.step  # which must be one

    def seal(self) -> Sealed:
        """Seals all at once, as each waits for the other trainers."""
        self.check_whole()
        parts = self._on_all(Connection.seal)
        squares = {
            tensor.name: square
            for connection, part in zip(self.training, parts)
            for tensor, square in zip(connection.model.tensors, part.tensor_sums_of_squares, strict=True)
        }
        origins = [part.non_finite_origin for part in parts if not part.finite]
        return Sealed(squares, not origins, next(iter(origins), ""))

    def commit(
        self,
        groups_of: Callable[[list[str]], list[_native.ParameterGroup]],
        gradient_scale: float,
        fresh_optimizer: bool,
    ) -> None:
        """Applies the sealed step. ``groups_of`` divides the tensors of a server."""
        groups = {c: groups_of([tensor.name for tensor in c.model.tensors]) for c in self.training}
        step = self.step if self._decision is None else self._decision.step
        decision = _Decision(step, gradient_scale, fresh_optimizer, groups)
        if self._committed and decision != self._decision:
            raise self._half_done("step() now has other hyperparameters, or gradients that were scaled otherwise")
        self._decision = decision
        for connection in self.training:
            if connection in self._committed:
                continue
            try:
                connection.commit(groups[connection], gradient_scale, fresh_optimizer)
            except Error as error:
                if not self._committed:
                    raise
                decision.repeatable = error.code in _TRANSIENT
                raise self._half_done(str(error)) from error

    def let_go(self) -> None:
        """The trainer has not got any more what a step is committed from."""
        if self._decision is not None:
            self._decision.repeatable = False

    def settle(self) -> None:
        """The trainer's half of the step that was committed is done too."""
        if len(self._committed) == len(self.training):
            self._decision = None

    def discard(self, reason: str, within: float = math.inf) -> None:
        """Moves to the attempts that are open now, in new sessions where the old ones are gone. Gives up on a server
        that does not answer ``within`` seconds."""
        if self._committed:
            raise self._half_done("it can't be discarded")
        for connection in self.training:
            connection.discard(reason, within)
        self._decision = None

    def save_checkpoint(self, name: str) -> _native.Checkpoint:
        """On each. Returns the first's."""
        return [connection.client.save_checkpoint(name) for connection in self.connections][0]

    def checkpoints(self) -> list[_native.Checkpoint]:
        """Those that all have, of one step, as the first lists them."""
        first, *others = [connection.client.list_checkpoints() for connection in self.connections]
        return [c for c in first if all((c.name, c.step) in {(o.name, o.step) for o in other} for other in others)]

    def delete_checkpoint(self, name: str) -> None:
        """On each that has it; raises where none has."""
        missing = []
        for connection in self.connections:
            try:
                connection.client.delete_checkpoint(name)
            except Error as error:
                if error.reason != "UNKNOWN_CHECKPOINT":
                    raise
                missing.append(error)
        if len(missing) == len(self.connections):
            raise missing[0]

    def restore_checkpoint(self, name: str) -> None:
        for connection in self.connections:
            connection.restore_checkpoint(name)
        self._decision = None
        _ = self.step  # which must be one

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def _on_all(self, call: Callable[[Connection], _native.SealedStep]) -> list[_native.SealedStep]:
        """Where one fails, or a signal interrupts, the others are not waited for."""
        if len(self.training) == 1:
            return [call(self.training[0])]
        try:
            with ThreadPoolExecutor(len(self.training)) as pool:
                running = [pool.submit(call, connection) for connection in self.training]
                try:
                    done, _ = wait(running, return_when=FIRST_EXCEPTION)
                    failed = [one for one in running if one in done and one.exception() is not None]
                    return [one.result() for one in failed or running]
                except BaseException:
                    for connection in self.training:
                        connection.interrupted = True
                    raise
        finally:
            for connection in self.training:
                connection.interrupted = False

    @property
    def _committed(self) -> list[Connection]:
        """Those that have told this trainer that they committed the step which is decided. The sessions know it, which
        no signal parts from the answer."""
        decision = self._decision
        return [c for c in self.training if decision is not None and c.session.position.step > decision.step]

    def _half_done(self, why: str) -> Error:
        step, done = self._decision.step, self._committed
        left = [connection for connection in self.training if connection not in done]
        there, not_there = (", ".join(c.target for c in some) for some in (done, left))
        missing = f"not on {not_there} (at step {step})" if left else "not by this trainer itself"
        repeat = "call step() again with the same hyperparameters, or " if self._decision.repeatable else ""
        return Error(
            f"step {step} was committed on {there} (at step {step + 1} now) and {missing}: {why}; {repeat}"
            "take all back to one checkpoint: remote.restore() one of remote.checkpoints(), and the trainer's own of "
            "that step, or a Trainer's resume_from_checkpoint",
            "FAILED_PRECONDITION",
            "DECISION_CONFLICT",
            {"step": str(step), "committed": there, "not_committed": not_there},
        )
