"""One trainer's open step: what the server holds of it, what the trainer holds of it, and how both end together."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import nn

from . import _native
from .connection import Connection
from .errors import Error, StepAborted
from .gradient import ServerGradient, factor_of
from .optimizers import check_holds, check_optimizer, check_state, held_by, loss_scaling, parameter_groups
from .servers import Sealed, Servers

T = TypeVar("T")

_WHEN_UNREACHABLE = (
    "the server has ended, stands still or can't be reached. Once it answers again, call zero_grad() and run the step "
    "again; where it was started anew, take both sides back to a checkpoint: remote.restore() and the trainer's own of "
    "that step, or a Trainer's resume_from_checkpoint"
)
_ABANDON_SECONDS = 2.0


class Step:
    """The open step. The server's half is decided first and the local half follows, so that whatever fails on the way
    leaves local parameters untouched. Not thread-safe, except :meth:`guard`.

    What the server sums is kept equal to what torch would have in ``grad``: the placeholders' gradients
    (:class:`ServerGradient`) say which sums are wanted, and times what.

    ``average``: whether the trainers average their gradients, as DistributedDataParallel does.
    """

    def __init__(self, servers: Servers, model: nn.Module, average: bool) -> None:
        self._servers = servers
        self.placeholders: dict[str, nn.Parameter] = {}  # by the server's tensor name, in the server's order
        self.optimizer: torch.optim.Optimizer | None = None
        self.fresh_optimizer = False  # whether the server's optimizer state is zeroed ahead of the next commit
        self._owes_unscaling = False  # to a GradScaler, which had done so when an attempt was aborted
        self._model = model
        self._divisor = servers.trainer_count if average else 1
        self._reset()

    def connection(self, layer: _native.Layer) -> Connection:
        """To the server that has ``layer``."""
        return self._servers.owner(layer)

    def guard(self, call: Callable[[], T], layer: _native.Layer | None = None) -> T:
        """Runs ``call``, of ``layer`` where it is of one; where it fails because the attempt is over, ends the local
        half too and raises StepAborted."""
        try:
            return call()
        except Error as error:
            moved = ""
            if error.code != "ABORTED" and error.reason not in ("UNKNOWN_SESSION", "TICKET_MISSING"):
                self._torn = True
                moved = self._servers.move(error, layer)
                if not moved and (error.reason == "UNREACHABLE" or error.code == "DEADLINE_EXCEEDED"):
                    raise Error(f"{error}; {_WHEN_UNREACHABLE}", error.code, error.reason, error.metadata) from error
                if not moved:
                    raise
            if error.reason != "TICKET_MISSING" and layer is not None and not self.connection(layer).run.train:
                if not moved:
                    self.connection(layer).reopen_session()
                return self.guard(call)  # which has no ticket there
            self.forget()
            self._torn = True  # until it is dropped everywhere
            self._servers.discard(str(error))
            self._torn = False
            raise StepAborted(
                f"{error}; {f'this trainer went to {moved}; ' if moved else ''}local gradients were zeroed and nothing was "
                "updated: run the step's batches again",
                "ABORTED",
                error.reason,
                error.metadata,
            ) from error
        except BaseException:  # Ctrl-C, which ends a call at any point
            self._torn = True
            raise

    def admit(self) -> None:
        """Ahead of a backward call that adds weight gradients. Torch adds to what is in ``grad`` when a backward pass
        begins; what was dropped from there since the pass before is dropped from the server."""
        if self._sealed is not None:
            raise Error(
                "the step is sealed, since the norm of its gradients was asked for, or whether they are finite "
                "(clipping, unscaling), and nothing can be added to it: call step() or zero_grad()",
                "FAILED_PRECONDITION",
                "ALREADY_SEALED",
            )
        backward_pass = torch._C._current_graph_task_id()
        if backward_pass == self._pass:
            return
        self._servers.check_whole()
        dropped, kept = [], []
        for name, p in self._held().items():
            factor = 0.0 if p.grad is None else self._factor(name, p)
            if factor not in (0, 1):
                raise Error(
                    f"the gradient of {name} was scaled, by {factor}, and the server can't add to it any more: scale "
                    "the loss instead, or accumulate before you scale",
                    "FAILED_PRECONDITION",
                )
            if name in self._given:
                (kept if factor else dropped).append(name)
        if dropped and kept:
            raise Error(
                f"the gradient of {dropped[0]} was dropped and that of {kept[0]} was not, and the server drops all of "
                "a step's or none: call zero_grad()",
                "FAILED_PRECONDITION",
            )
        if (dropped or self._torn) and not kept:
            self.discard()
        self._pass = backward_pass

    @property
    def holds_gradients(self) -> bool:
        """Whether backward gave a placeholder a gradient that is neither committed nor dropped."""
        return bool(self._given)

    def give(self, wanted: dict[str, bool]) -> None:
        """Notes to which of a layer's placeholders' ``grad`` a backward call adds that was admitted. The server has
        added to the others too."""
        self._given.update(name for name, adds in wanted.items() if adds)
        self._unwanted.update(name for name, adds in wanted.items() if not adds)

    def stand_for(self, placeholders: dict[str, nn.Parameter]) -> None:
        """Takes the model's placeholders, by the server's tensor name, in the server's order. What reaches ``grad`` of
        one is the server's gradient."""
        self.placeholders = placeholders
        for name, p in placeholders.items():
            trained = p.requires_grad
            p.requires_grad_(True).register_hook(functools.partial(_gradient, weakref.ref(self), name))
            p.requires_grad_(trained)

    def check_placeholders(self, found: dict[str, nn.Parameter | None]) -> None:
        """Raises Error naming one of ``found`` which is not the Parameter that stands for its tensor."""
        for name, p in found.items():
            if p is not self.placeholders[name]:
                raise Error(
                    f"the parameter that stands for the server's {name} was replaced by a {type(p).__name__}: a "
                    "wrapper that shards or replaces parameters has to leave the server's alone, such as with "
                    "fully_shard(..., ignored_params=remote.placeholders())",
                    "FAILED_PRECONDITION",
                )

    def commit(self, optimizer: torch.optim.Optimizer) -> None:
        """Applies the server's half of the step with ``optimizer``'s hyperparameters as they are now."""
        if not self._servers.training:
            return
        if self._sealed is None:
            self._servers.check_whole()
        check_holds(optimizer, {name: p for name, p in self.placeholders.items() if p.requires_grad})
        trained = {name: p for name, p in self._held().items() if self._is_trained(p)}
        check_state(optimizer, self.placeholders)
        scale, found_inf = loss_scaling(optimizer)
        if found_inf or not trained:
            return
        check_optimizer(optimizer)
        factor = self._common_factor(trained)
        if factor == 0:  # what the server has is not wanted, and the optimizer steps on zeros
            if self._servers.trainer_count > 1:
                raise Error(
                    "the server's gradients were zeroed here and are those of all trainers: call zero_grad()",
                    "FAILED_PRECONDITION",
                )
            self.discard()
            factor = 1.0
        if self._owes_unscaling and not self._unscaled and scale == 1:
            raise Error(
                "a GradScaler unscaled the gradients of the attempt that was aborted, and takes these for unscaled "
                "too: call its update() before the step's batches are run again",
                "FAILED_PRECONDITION",
            )
        sealed = self.seal(self._attempt)
        if not sealed.finite or not math.isfinite(factor):
            origin = sealed.non_finite_origin or "one that the trainer holds"
            raise Error(
                f"a gradient is not finite ({origin}): call zero_grad(), which discards the step",
                "FAILED_PRECONDITION",
                "NON_FINITE",
            )
        scale = factor / (scale * self._divisor)
        groups_of = functools.partial(parameter_groups, optimizer, trained=trained)
        self.guard(lambda: self._servers.commit(groups_of, scale, self.fresh_optimizer))
        self.fresh_optimizer = self._owes_unscaling = False
        self._reset()

    def hide_gradients(self) -> None:
        """From the local half of step(), which is to skip the placeholders."""
        self._hidden = [(p, p.grad) for p in self.placeholders.values() if p.grad is not None]
        for p, _ in self._hidden:
            p.grad = None

    def show_gradients(self) -> None:
        """The local half is done. As torch keeps gradients after step(): until zero_grad() they stand for what is gone
        from the server."""
        for p, grad in self._hidden:
            p.grad = grad
        self._hidden = []
        self._servers.settle()

    def discard(self) -> None:
        """Drops the server's half, if it has one that no step() committed."""
        if self._has_half():
            self._servers.discard("zero_grad")
        self._reset()

    def abandon(self) -> None:
        """The loop was left, perhaps in mid-step: zeroes local gradients and drops the server's half; where that does
        not answer soon, the next zero_grad() does."""
        left = True
        with contextlib.suppress(Error):
            if self._has_half():
                self._servers.discard("its training loop was left", within=_ABANDON_SECONDS)
            left = False
        self.forget()
        self._torn = left

    def forget(self) -> None:
        """Zeroes local gradients, of the model and of the wrapped optimizer."""
        groups = self.optimizer.param_groups if self.optimizer else []
        for parameters in (self._model.parameters(), *(group["params"] for group in groups)):
            for p in parameters:
                p.grad = None
        self._owes_unscaling = self._owes_unscaling or self._unscaled
        self._reset()
        self.share()

    def share(self) -> None:
        """After gradients were zeroed. Of several trainers, one that sees no batch clips and decides as the others do:
        the server's gradients are the run's, and so each has them from the start."""
        if self._servers.trainer_count == 1:
            return
        for connection in self._servers.training:
            for tensor in connection.model.tensors:
                p = self.placeholders[tensor.name]
                if p.requires_grad and (p.grad is None or not factor_of(p.grad, tensor.name, self._attempt)):
                    p.grad = ServerGradient.of(tensor.name, self._attempt, p)

    def seal(self, attempt: _Attempt) -> Sealed:
        """Ends the step's backward calls and waits for the other trainers', once."""
        if attempt is not self._attempt:
            raise Error(
                "the gradients are of a step that is over, and the server has dropped its part: call zero_grad()",
                "FAILED_PRECONDITION",
            )
        if self._sealed is None:
            self._sealed = self.guard(self._servers.seal)
        return self._sealed

    def norm(self, attempt: _Attempt, tensor: str) -> float:
        """The 2-norm of ``tensor``'s gradient, as the trainers average it. NaN where any tensor's is not finite."""
        self._check_wanted(tensor)
        sealed = self.seal(attempt)
        if not sealed.finite:
            return math.nan
        return math.sqrt(sealed.squares[tensor]) / self._divisor

    def unscale(self, attempt: _Attempt) -> bool:
        """A GradScaler unscales the gradients. Whether all are finite."""
        finite = self.seal(attempt).finite
        self._unscaled = True
        return finite

    def _held(self) -> dict[str, nn.Parameter]:
        """The placeholders that the optimizer holds; all, where there is none yet. What is in the others' ``grad``
        counts for nothing."""
        if self.optimizer is None:
            return self.placeholders
        held = held_by(self.optimizer, self.placeholders)
        for name, p in self.placeholders.items():
            if name not in held:
                p.grad = None
        return held

    def _has_half(self) -> bool:
        """Whether the servers may hold something of the attempt."""
        training = self._servers.training
        held = self._sealed is not None or self._torn or self._servers.half_done
        return bool(training) and (held or self._servers.pending_row_count > 0)

    def _is_trained(self, p: nn.Parameter) -> bool:
        """As in torch, what has a gradient. Of several trainers, one that has none takes part in the others' step."""
        return p.grad is not None or (p.requires_grad and self._servers.trainer_count > 1)

    def _check_wanted(self, name: str) -> None:
        if name in self._unwanted:
            raise Error(
                f"a backward of this step added to the gradients of {name}'s layer and not to its own (it was frozen, "
                "or not among backward's inputs), and the server adds to all of a layer's: call zero_grad(), and "
                "freeze it for whole steps",
                "FAILED_PRECONDITION",
            )

    def _reset(self) -> None:
        self._servers.let_go()
        self._attempt = _Attempt(self)
        self._sealed: Sealed | None = None
        self._torn = False  # a call failed, so that the server may hold rows that the session does not know of
        self._given: set[str] = set()  # the placeholders that backward gave a gradient in this attempt
        self._unwanted: set[str] = set()  # those that it gave none, though the server added to theirs
        self._unscaled = False  # by a GradScaler
        self._pass: int | None = None  # the backward pass that was admitted last
        self._hidden: list[tuple[nn.Parameter, torch.Tensor]] = []

    def _factor(self, name: str, p: nn.Parameter) -> float:
        factor = factor_of(p.grad, name, self._attempt)
        if factor is None:
            raise Error(
                f"the gradients, such as that of {name}, were not zeroed since the last step(), and the server dropped "
                "its part of them when it committed: call zero_grad() after each step",
                "FAILED_PRECONDITION",
            )
        return factor

    def _common_factor(self, trained: dict[str, nn.Parameter]) -> float:
        """What all of the server's gradients are to be multiplied with."""
        factors = {name: self._factor(name, p) for name, p in trained.items() if p.grad is not None}
        if not factors:
            return 1.0
        for name, factor in factors.items():
            if factor:
                self._check_wanted(name)
        first, *others = factors.items()
        for name, factor in others:
            if factor != first[1] and not (math.isnan(factor) and math.isnan(first[1])):
                raise Error(
                    f"the server scales all of its gradients alike, and that of {first[0]} was scaled by {first[1]}, "
                    f"that of {name} by {factor}: call zero_grad(), which discards the step",
                    "FAILED_PRECONDITION",
                )
        return first[1]


def _gradient(step: weakref.ref[Step], name: str, mark: torch.Tensor) -> ServerGradient:
    """The placeholder's hook. A graph has it, where no collector sees that the model has the graph: hence weak."""
    open_step = step()
    return ServerGradient.of(name, open_step._attempt, open_step.placeholders[name])


class _Attempt:
    """An attempt of a step as its gradients refer to it: the one that is open, or one that is over."""

    def __init__(self, step: Step) -> None:
        self._step = step

    def norm(self, tensor: str) -> float:
        return self._step.norm(self, tensor)

    def unscale(self) -> bool:
        return self._step.unscale(self)
