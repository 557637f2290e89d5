"""One trainer's open step: what the server holds of it, what the trainer holds of it, and how both end together."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from . import _native
from .connection import Connection
from .errors import Error, StepAborted
from .optimizers import parameter_groups

T = TypeVar("T")


class Step:
    """The open step. The server's half is decided first and the local half follows, so that whatever fails on the way
    leaves local parameters untouched. Not thread-safe, except :meth:`guard`.

    ``average``: whether the trainers average their gradients, as DistributedDataParallel does.
    """

    def __init__(self, connection: Connection, model: nn.Module, average: bool) -> None:
        self.connection = connection
        self.placeholders: dict[str, nn.Parameter] = {}  # by the server's tensor name, in the server's order
        self.optimizer: torch.optim.Optimizer | None = None
        self._model = model
        self._divisor = connection.run.trainer_count if average else 1
        self._sealed: _native.SealedStep | None = None
        self._clip_factor = 1.0
        self._torn = False  # a call failed, so that the server may hold rows that the session does not know of
        self._spent = False  # committed, and gradients not zeroed since

    def guard(self, call: Callable[[], T]) -> T:
        """Runs ``call``; where it fails because the attempt is over, ends the local half too and raises StepAborted."""
        try:
            return call()
        except Error as error:
            if error.code != "ABORTED" and error.reason != "UNKNOWN_SESSION":
                self._torn = True
                raise
            if not self.connection.run.train:
                self.connection.reopen_session()
                return call()
            self.forget()
            self._discard(str(error))
            raise StepAborted(
                f"{error}; local gradients were zeroed and nothing was updated: run the step's batches again",
                "ABORTED",
                error.reason,
                error.metadata,
            ) from error
        except BaseException:  # Ctrl-C, which ends a call at any point
            self._torn = True
            raise

    def clip(self, max_norm: float, error_if_nonfinite: bool) -> torch.Tensor:
        """See Remote.clip_grad_norm_."""
        if not max_norm > 0:
            raise ValueError(f"max_norm: got {max_norm}, expected a number above 0")
        local = [p for p in self._model.parameters() if p.grad is not None and p.numel() > 0]
        total = torch.nn.utils.get_total_norm([p.grad for p in local])
        if total.dtype in (torch.bfloat16, torch.float16):
            total = total.float()
        if self._takes_part():
            total = torch.hypot(total, torch.as_tensor(self._server_norm()).to(total))
        if error_if_nonfinite and not total.isfinite():
            raise RuntimeError(
                f"the gradients' total norm is {total.item()}, so they can't be clipped; to scale them by "
                "it anyway, set error_if_nonfinite=False"
            )
        torch.nn.utils.clip_grads_with_norm_(local, max_norm, total)
        self._clip_factor *= min(1.0, max_norm / (total.item() + 1e-6)) if total.isfinite() else math.nan
        return total

    def commit(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies the server's half of the step with ``optimizer``'s hyperparameters as they are now."""
        if not self._takes_part():
            return
        groups = parameter_groups(optimizer, self.placeholders, self._trained())
        if self._spent and self._has_gradients():
            raise Error(
                "the gradients were not zeroed since the last step(), and the server dropped its part of them "
                "when it committed: call zero_grad() after each step",
                "FAILED_PRECONDITION",
            )
        sealed = self._seal()
        if not sealed.finite or not math.isfinite(self._clip_factor):
            origin = sealed.non_finite_origin or "one that the trainer holds"
            raise Error(
                f"a gradient is not finite ({origin}): call zero_grad(), which discards the step",
                "FAILED_PRECONDITION",
                "NON_FINITE",
            )
        scale = self._clip_factor / self._divisor
        self.guard(lambda: self.connection.session.commit_step(groups, scale))
        self._reset()
        self._spent = True

    def discard(self) -> None:
        """Drops the server's half, if it has one that no step() committed."""
        pending = self._sealed or self._torn or self.connection.session.pending_row_count > 0
        if self.connection.run.train and pending:
            self._discard("zero_grad")
        self._reset()

    def forget(self) -> None:
        """Zeroes local gradients, of the model and of the wrapped optimizer."""
        groups = self.optimizer.param_groups if self.optimizer else []
        for parameters in (self._model.parameters(), *(group["params"] for group in groups)):
            for p in parameters:
                p.grad = None
        self._reset()

    def _reset(self) -> None:
        self._sealed, self._clip_factor, self._torn, self._spent = None, 1.0, False, False

    def _trained(self) -> dict[str, nn.Parameter]:
        """What this step updates: as in torch, what has a gradient. Several trainers must name the same, and one of
        them may have seen no batch, so theirs is what may have one."""
        several = self.connection.run.trainer_count > 1
        return {
            name: p for name, p in self.placeholders.items() if (p.requires_grad if several else p.grad is not None)
        }

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.placeholders.values())

    def _takes_part(self) -> bool:
        """Whether there is a server's half to decide. Several trainers decide every step together."""
        run = self.connection.run
        if not run.train:
            return False
        pending = self.connection.session.pending_row_count > 0
        return run.trainer_count > 1 or self._sealed is not None or pending or self._has_gradients()

    def _seal(self) -> _native.SealedStep:
        if self._sealed is None:
            self._sealed = self.guard(lambda: self.connection.session.seal_step())
        return self._sealed

    def _server_norm(self) -> float:
        """Of the gradients of the server's tensors that are trained, as the trainers average and have clipped them."""
        sealed = self._seal()
        if not sealed.finite:
            return math.nan
        squares = dict(zip(self.placeholders, sealed.tensor_sums_of_squares, strict=True))
        return math.sqrt(math.fsum(squares[name] for name in self._trained())) * self._clip_factor / self._divisor

    def _discard(self, reason: str) -> None:
        """Moves to the attempt that is open now, in a new session where the old one is gone."""
        try:
            self.connection.session.discard_step(reason[:256])
        except Error as error:
            if error.reason != "UNKNOWN_SESSION":
                raise
            self.connection.reopen_session()
