"""The servers of one model, each with layers of its own, as a trainer's step sees them."""

from __future__ import annotations

import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields

from . import _native
from .connection import Connection, is_lost
from .errors import Error


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


class Servers:
    """A step is one on all servers where this trainer trains: all are sealed before any is committed. What fails on one
    is raised, as :class:`shardmlp.Error`; a commit that failed may be repeated, and is done where it was not."""

    def __init__(self, connections: list[Connection]) -> None:
        """Raises ValueError where two serve one layer."""
        self.connections = connections
        self._committed: list[Connection] = []  # of a commit that has failed elsewhere
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
                + "): restore a checkpoint that all of them have",
                "FAILED_PRECONDITION",
                "STALE_ATTEMPT",
            )
        return next(iter(steps.values()))

    @property
    def pending_row_count(self) -> int:
        return sum(connection.session.pending_row_count for connection in self.training)

    def seal(self) -> Sealed:
        """Seals all at once, as each waits for the other trainers."""
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
        for connection in self.training:
            if connection in self._committed:
                continue
            names = [tensor.name for tensor in connection.model.tensors]
            try:
                connection.commit(groups_of(names), gradient_scale, fresh_optimizer)
            except Error as error:
                if self._committed:
                    raise self._half_committed(str(error)) from error
                raise
            self._committed.append(connection)
        self._committed = []

    def discard(self, reason: str, within: float = math.inf) -> None:
        """Moves to the attempts that are open now, in new sessions where the old ones are gone. Gives up on a server
        that does not answer ``within`` seconds."""
        if self._committed:
            raise self._half_committed("it can't be discarded")
        for connection in self.training:
            connection.discard(reason, within)

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
        self._committed = []
        _ = self.step  # which must be one

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def _on_all(self, call: Callable[[Connection], _native.SealedStep]) -> list[_native.SealedStep]:
        """The first in this thread, which a signal may interrupt."""
        first, *others = self.training
        if not others:
            return [call(first)]
        with ThreadPoolExecutor(len(others)) as pool:
            running = [pool.submit(call, connection) for connection in others]
            return [call(first), *(one.result() for one in running)]

    def _half_committed(self, why: str) -> Error:
        done = ", ".join(connection.target for connection in self._committed)
        return Error(
            f"the step was committed on {done} and not on all servers ({why}): call step() again, or restore a "
            "checkpoint that all of them have",
            "FAILED_PRECONDITION",
            "DECISION_CONFLICT",
        )
