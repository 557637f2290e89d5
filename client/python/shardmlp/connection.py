"""A trainer's connection to one server, in torch tensors."""

from __future__ import annotations

import contextlib
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
        self._owner = os.getpid()
        self._client = _native.Client.connect(
            target,
            connections=connections,
            connect_timeout_seconds=timeouts.connect,
            stall_timeout_seconds=timeouts.stall,
            seal_timeout_seconds=timeouts.seal,
            retry_budget_seconds=timeouts.retry,
            credentials=credentials.native(),
        )
        self.model = self._client.model
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
        self._hold(
            self.client.open_session(
                run_id=run.run_id, train=run.train, trainer_count=run.trainer_count, trainer_rank=run.trainer_rank
            )
        )
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
                if not gone or self.session.position.step != lost.position.step + 1:
                    if self.session is not lost:
                        self.close()
                        self._hold(lost)
                    raise
                self.session.take_up(lost.position)

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
