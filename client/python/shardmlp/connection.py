"""A trainer's connection to one server, in torch tensors."""

from __future__ import annotations

import contextlib
import math
import os
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from . import _native
from .credentials import Credentials
from .errors import Error
from .sigterm import close_first
from .staging import Incoming, Outgoing

T = TypeVar("T")

_DTYPES = {
    torch.float32: _native.DType.f32,
    torch.bfloat16: _native.DType.bf16,
    torch.float16: _native.DType.f16,
    torch.float64: _native.DType.f64,
}
_TORCH_DTYPES = {native: dtype for dtype, native in _DTYPES.items()}


@dataclass(frozen=True)
class Run:
    """Who this trainer is: ``run_id`` and ``trainer_count`` are equal on all trainers of a run, ``trainer_rank`` counts
    them from 0. A trainer that does not ``train`` takes part in no step."""

    run_id: str
    trainer_count: int
    trainer_rank: int
    train: bool


@dataclass(frozen=True)
class Timeouts:
    """Seconds. ``stall``: a call in which nothing moves fails. ``seal``: waiting for the other trainers. ``retry``:
    how long what can safely be sent again is, before the failure is raised."""

    connect: float = 10.0
    stall: float = 120.0
    seal: float = 600.0
    retry: float = 60.0


_BRIEF = Timeouts(connect=2.0, stall=2.0, seal=2.0, retry=0.0)


class Connection:
    """The client and session of one trainer. Thread-safe, as both are.

    Every method raises :class:`shardmlp.Error`. Ctrl-C ends the call that the main thread waits in, whatever the server
    does; as a call that failed, it may have been counted, so that zero_grad() then discards the step. The connection
    belongs to the process that opened it: in a forked child it can be dropped and nothing else.
    """

    def __init__(
        self, target: str, connections: int, timeouts: Timeouts, credentials: Credentials = Credentials()
    ) -> None:
        self.target = target
        self.interrupted = False  # True ends the calls that any thread waits in
        self.others: list[str] = []  # replicas of the same set, one of which the trainer moves to where its own is lost
        self._owner = os.getpid()
        self._connections, self._credentials, self._timeouts = connections, credentials, timeouts
        self._client = self._connect(target, timeouts)
        self.model = self._client.model
        self._moved = False  # and has nothing of the attempt that is open there
        self._session: _native.Session | None = None
        self._finalizer: weakref.finalize | None = None
        self.run: Run | None = None

    @property
    def client(self) -> _native.Client:
        self._refuse_fork()
        return self._client

    @property
    def session(self) -> _native.Session:
        self._refuse_fork()
        if self._session is None:
            raise Error("no session is open: the Remote was closed", "FAILED_PRECONDITION", "UNKNOWN_SESSION")
        return self._session

    def open_session(self, run: Run) -> None:
        """Takes ``run``'s place on the server; a session that was open is dropped."""
        self._hold(_open(self.client, run))
        self.run = run

    def reopen_session(self) -> None:
        """Takes the place again after the session was lost. A trainer needs the server where it left it: elsewhere it
        raises FAILED_PRECONDITION (STALE_ATTEMPT), now and until restore()."""
        lost = self.session
        self.open_session(self.run)
        expected, got = lost.position.step, self.session.position.step
        if self.run.train and got != expected:
            self.close()
            self._hold(lost)
            raise Error(
                f"the server lost this trainer's session and is at step {got}, the trainer at step {expected}: restore "
                "a checkpoint of the server and the trainer's own of the same step",
                "FAILED_PRECONDITION",
                "STALE_ATTEMPT",
            )

    def move(self, sealed: bool = False) -> bool:
        """Takes the trainer's place at another of the server's replicas, once its own is lost to it. False where none can
        have it. A trainer goes on from where it stood: at its step with the same weights, or, where it had ``sealed``, one
        step ahead, which the others then committed; elsewhere it raises FAILED_PRECONDITION (STALE_ATTEMPT)."""
        for target in self.others:
            with contextlib.suppress(Error):
                client = self._connect(target, self._timeouts)
                if client.model.replica.member_ranks and _can_follow(client.model, self.model):
                    session = _open(client, self.run)
                    break
        else:
            return False
        if self.run.train:
            try:
                self._check_follows(session.position, target, sealed)
            except Error:
                session.close()
                raise
        self.others = [self.target if other == target else other for other in self.others]
        self.target, self.model, self._client = target, client.model, client
        self._hold(session)
        self._moved = True
        return True

    def discard(self, reason: str, within: float) -> None:
        """Moves to the attempt that is open now, in a new session where the old one is gone."""
        if self._moved:
            self._moved = False
            return
        try:
            self.session.discard_step(reason[:256], within)
        except Error as error:
            if error.reason == "UNKNOWN_SESSION":
                self.reopen_session()
            elif within < math.inf or not is_lost(error) or not self.move():
                raise
            self._moved = False

    def seal(self) -> _native.SealedStep:
        """Waits for the other trainers."""
        return self._answer(lambda session: session.seal_step())

    def commit(self, groups: list[_native.ParameterGroup], gradient_scale: float, fresh_optimizer: bool) -> None:
        """Applies the sealed step."""
        self._answer(lambda session: session.commit_step(groups, gradient_scale, fresh_optimizer))

    def restore_checkpoint(self, name: str) -> None:
        """Restores the server, and follows it, in a new session where the old one is gone."""
        self.client.restore_checkpoint(name)
        try:
            self.session.resync()
        except Error as error:
            if error.reason != "UNKNOWN_SESSION":
                raise
            self.open_session(self.run)

    def close(self) -> None:
        """Ends the session. Repeats, and calls in a forked child, do nothing."""
        self._session = None
        if self._finalizer is not None:
            self._finalizer()

    def forward(
        self, layer: int, x: torch.Tensor, output_size: int, keep_input: _native.KeepInput | None = None
    ) -> tuple[torch.Tensor, int, int]:
        """y [T, O] from x [T, H], in x's dtype and on its device; the weights version it was computed with; and the
        ticket of x in the server's stash, 0 where it is not kept."""
        session = self.session
        sent, y = Outgoing(x), Incoming(x.shape[0], output_size, x.dtype, x.device)
        if self.model.memory.stash_bytes == 0:
            keep_input = None
        forwarded = session.forward(
            layer, _matrix(sent.host[0]), _matrix(y.host), keep_input, sent.await_rows, y.arrived
        )
        return y.rows(), *forwarded

    def backward(
        self,
        layer: int,
        weights_version: int,
        ticket: int,
        x: torch.Tensor | None,
        dy: torch.Tensor,
        hidden_size: int,
        *,
        input_gradient: bool,
        weight_gradient: bool,
    ) -> torch.Tensor | None:
        """dx [T, H], or None where it is not asked for, from x [T, H] and dy [T, O] of one dtype and device. x travels
        only where the server's stash has nothing under ``ticket``; None: it is nowhere else."""
        session = self.session
        if weight_gradient and not self.run.train:
            raise Error(
                "no tensor of an MLP had requires_grad set when the model was offloaded, so this trainer takes part in "
                "no step: set it before offload",
                "FAILED_PRECONDITION",
                "FROZEN",
            )
        sent = Outgoing(dy) if x is None else Outgoing(dy, x)
        from_dy = _matrix(sent.host[0])
        nowhere = _native.Matrix(0, dy.shape[0], hidden_size, hidden_size, _DTYPES[dy.dtype])
        from_x = nowhere if x is None else _matrix(sent.host[1])
        dx = Incoming(dy.shape[0], hidden_size if input_gradient else 0, dy.dtype, dy.device)
        to = _matrix(dx.host) if input_gradient else _native.Matrix()
        session.backward(
            layer, weights_version, from_x, from_dy, to, weight_gradient, ticket, sent.await_rows, dx.arrived
        )
        return dx.rows() if input_gradient else None

    def release(self, ticket: int) -> None:
        """No backward will name ``ticket`` any more. Never blocks or raises, as suits a finalizer."""
        session = self._session
        if session is not None and os.getpid() == self._owner:
            session.release(ticket)

    def read_tensor(self, tensor: _native.Tensor) -> tuple[torch.Tensor, int]:
        """The server's weights now, on the host, in the file's shape and the served dtype, and their version."""
        to = torch.empty(tensor.shape, dtype=_TORCH_DTYPES[tensor.dtype], device="cpu")
        version = self.client.read_tensor(tensor.name, to.data_ptr(), to.numel() * to.element_size())
        return to, version

    def checksums(self) -> dict[str, int]:
        """:func:`checksum` of each of the server's tensors as they are now, by name."""
        return self.client.checksums()

    def _answer(self, call: Callable[[_native.Session], T]) -> T:
        """What ``call`` of the session returns. A replica that dies takes the session with it, and perhaps the answer
        to what all replicas had agreed on: of a step that was committed meanwhile, a new session asks for it again."""
        lost = self.session
        while True:
            try:
                return call(self.session)
            except Error as error:
                gone = error.reason == "UNKNOWN_SESSION"
                if gone:
                    self.open_session(self.run)
                moved = not gone and is_lost(error) and self.move(sealed=True)
                if not (gone or moved) or self.session.position.step != lost.position.step + 1:
                    if gone:
                        self.close()
                        self._hold(lost)
                    if moved:
                        raise Error(f"{error}; this trainer went to {self.target}", "ABORTED", error.reason) from error
                    raise
                self._moved = False
                self.session.take_up(lost.position)

    def _connect(self, target: str, timeouts: Timeouts, asks: bool = True) -> _native.Client:
        """``asks``: the other replicas, after a failure, whether this server is worth another try."""
        this = weakref.ref(self)

        def own_says(question: Callable[[Connection], bool]) -> Callable[[], bool]:
            return lambda: (own := this()) is not None and question(own)

        return _native.Client.connect(
            target,
            connections=self._connections,
            connect_timeout_seconds=timeouts.connect,
            stall_timeout_seconds=timeouts.stall,
            seal_timeout_seconds=timeouts.seal,
            retry_budget_seconds=timeouts.retry,
            credentials=self._credentials.native(),
            interrupted=own_says(lambda own: own.interrupted),
            abandoned=own_says(Connection._is_left_behind) if asks else None,
        )

    def _check_follows(self, got: _native.Position, target: str, sealed: bool) -> None:
        expected = self.session.position
        ahead = got.step - expected.step
        if not 0 <= ahead <= sealed or got.weights_version != expected.weights_version + ahead:
            raise Error(
                f"{self.target} is lost, and its replica {target} is at step {got.step} with weights version "
                f"{got.weights_version}, the trainer at step {expected.step} with version {expected.weights_version}: "
                "restore a checkpoint of the servers and the trainer's own of the same step",
                "FAILED_PRECONDITION",
                "STALE_ATTEMPT",
            )

    def _is_left_behind(self) -> bool:
        """Whether another replica says that they go on without this trainer's, which then need not be waited for."""
        for target in self.others:
            with contextlib.suppress(Error):
                members = self._connect(target, _BRIEF, asks=False).model.replica.member_ranks
                if members:
                    return self.model.replica.rank not in members
        return False

    def _hold(self, session: _native.Session) -> None:
        """Keeps ``session``, to be closed with this connection, at exit or by SIGTERM: its place is then free at once."""
        self._session = session
        if self._finalizer is not None:
            self._finalizer.detach()
        self._finalizer = weakref.finalize(self, _close, session, self._owner)
        close_first(self)

    def _refuse_fork(self) -> None:
        if os.getpid() != self._owner:
            raise Error(
                f"the connection to {self.target} was opened by process {self._owner} and can't be used in process "
                f"{os.getpid()}, which was forked from it: offload the model in the process that trains it",
                "FAILED_PRECONDITION",
            )


def is_lost(error: Error) -> bool:
    """Whether the server does not answer any more, as far as this trainer can tell."""
    return error.reason in ("UNREACHABLE", "STALLED")


def _open(client: _native.Client, run: Run) -> _native.Session:
    return client.open_session(
        run_id=run.run_id, train=run.train, trainer_count=run.trainer_count, trainer_rank=run.trainer_rank
    )


def _can_follow(model: _native.ServedModel, lost: _native.ServedModel) -> bool:
    """Whether a server does what the one that is lost did."""
    tensors, lost_tensors = ([(t.name, t.shape, t.dtype) for t in m.tensors] for m in (model, lost))
    return tensors == lost_tensors and (model.memory.stash_bytes > 0 or lost.memory.stash_bytes == 0)


def _close(session: _native.Session, owner: int) -> None:
    if os.getpid() == owner:
        with contextlib.suppress(Error):
            session.close()


def checksum(weights: torch.Tensor, tensor: _native.Tensor) -> int:
    """Of ``weights``, rounded to what the server holds ``tensor`` in."""
    weights = weights.detach().to("cpu", _TORCH_DTYPES[tensor.dtype]).contiguous()
    return _native.xxh3_64(weights.data_ptr(), weights.numel() * weights.element_size())


def check_dtype(dtype: torch.dtype) -> None:
    """Raises TypeError for an element type that does not travel."""
    if dtype not in _DTYPES:
        raise TypeError(f"got a {dtype} tensor; a remote MLP takes float32, bfloat16, float16 or float64")


def _matrix(t: torch.Tensor) -> _native.Matrix:
    rows, cols = t.shape
    return _native.Matrix(t.data_ptr(), rows, cols, max(t.stride(0), cols), _DTYPES[t.dtype])
