"""A gradient that the server holds, as torch sees it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

_aten = torch.ops.aten


class Attempt(Protocol):
    """One attempt of a step: what the server sums is its own, and is gone when it ends."""

    def norm(self, tensor: str) -> float:
        """The 2-norm of the sum of ``tensor``'s gradients, as the trainers average it. NaN where any is not finite."""

    def unscale(self) -> bool:
        """Notes that a GradScaler unscales its gradients. Whether all of the server's sums are finite."""


@dataclass
class _Value:
    """``factor`` times the sum that the server has in ``attempt``, of whatever is in it by the time that it is asked
    for. The factor 0 is a gradient of zeros, whatever the server has."""

    attempt: Attempt
    factor: float


class ServerGradient(torch.Tensor):
    """The ``grad`` of a parameter that the server owns: no elements here, and the server's sum by name.

    Everything that trainers do with gradients between backward and step() works on it as on a local one: it can be
    scaled, zeroed and dropped, its 2-norm taken, and a GradScaler unscales it. So ``torch.nn.utils.clip_grad_norm_``
    and whatever calls it clip by the global norm. Asking for a norm, or whether it is finite, seals the step: no
    backward may follow until step() or zero_grad(). All else raises TypeError.

    Shape [0]. Made by backward alone. Norms are f32 at least, also of bf16 and f16 parameters.
    """

    # Tensor has attributes called name, grad and the like, so these are private.
    _tensor: str  # the server's name for it
    _value: _Value  # shared by aliases

    @staticmethod
    def __new__(cls, tensor: str, value: _Value, dtype: torch.dtype, device: torch.device) -> ServerGradient:
        self = torch.Tensor._make_wrapper_subclass(cls, (0,), dtype=dtype, device=device)
        self._tensor = tensor
        self._value = value
        return self

    @classmethod
    def of(cls, tensor: str, attempt: Attempt, parameter: torch.nn.Parameter) -> ServerGradient:
        """What backward gives ``parameter``, which stands for ``tensor``."""
        return cls(tensor, _Value(attempt, 1.0), parameter.dtype, parameter.device)

    def __repr__(self, **_: Any) -> str:
        return f"ServerGradient({self._tensor}, {self.dtype}, times {self._value.factor})"

    @classmethod
    def __torch_dispatch__(cls, operator, types, args=(), kwargs=None):
        function = _OPERATORS.get(operator)
        if function is None:
            own = next((a for a in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(a, cls)))
            raise TypeError(
                f"the gradient of {own._tensor} is on the server, which can scale and zero it, take its 2-norm and "
                f"tell a GradScaler whether it is finite; got {operator}. Optimizers step on it once they are given to "
                "Remote.wrap()"
            )
        return function(*args, **(kwargs or {}))


def factor_of(gradient: torch.Tensor, tensor: str, attempt: Attempt) -> float | None:
    """What the server's sum of ``tensor`` in ``attempt`` has to be multiplied with to get ``gradient``, of no elements.
    None where it is of an attempt that is over. Raises TypeError where it is another tensor's."""
    if not isinstance(gradient, ServerGradient):
        return 0.0  # made by hand
    value = gradient._value
    if gradient._tensor != tensor and value.factor != 0:
        raise TypeError(f"{tensor} was given the gradient of {gradient._tensor}, and the server keeps each to its own")
    return value.factor if value.attempt is attempt or value.factor == 0 else None


def _like(gradient: ServerGradient, value: _Value, **options: Any) -> ServerGradient:
    dtype, device = options.get("dtype") or gradient.dtype, options.get("device") or gradient.device
    return ServerGradient(gradient._tensor, value, dtype, torch.device(device))


def _alias(gradient: ServerGradient) -> ServerGradient:
    return _like(gradient, gradient._value)


def _copy(gradient: ServerGradient, **options: Any) -> ServerGradient:
    return _like(gradient, _Value(gradient._value.attempt, gradient._value.factor), **options)


def _add_(to: torch.Tensor, other: torch.Tensor, *, alpha: float = 1) -> torch.Tensor:
    """Accumulates, as autograd does: the server has added the terms already."""
    if isinstance(to, ServerGradient) and isinstance(other, ServerGradient) and alpha == 1:
        mine, theirs = to._value, other._value
        if mine.factor == 0:
            mine.attempt, mine.factor = theirs.attempt, theirs.factor
            return to
        if mine is not theirs and mine.attempt is theirs.attempt and mine.factor == theirs.factor == 1:
            return to
    own = to if isinstance(to, ServerGradient) else other
    raise TypeError(f"nothing can be added to the gradient of {own._tensor}, which is on the server, but by backward")


def _multiply_(gradient: ServerGradient, by: float | torch.Tensor) -> ServerGradient:
    if not isinstance(gradient, ServerGradient) or (isinstance(by, torch.Tensor) and by.numel() != 1):
        raise TypeError("a gradient that is on the server can be multiplied with one number alone")
    gradient._value.factor *= _number(by)
    return gradient


def _divide_(gradient: ServerGradient, by: float | torch.Tensor) -> ServerGradient:
    by = _number(by)
    return _multiply_(gradient, 1 / by if by else math.inf)


def _number(t: float | torch.Tensor) -> float:
    """The value of ``t``, which is a DTensor where local gradients are sharded."""
    return float(t.full_tensor() if hasattr(t, "full_tensor") else t)


def _zero_(gradient: ServerGradient) -> ServerGradient:
    gradient._value.factor = 0.0
    return gradient


def _norm(gradient: ServerGradient, ord: float = 2, dim=None, keepdim=False, *, dtype=None) -> torch.Tensor:
    if ord != 2 or dim is not None:
        over = "" if dim is None else f" over dimension {dim}"
        raise TypeError(
            f"the gradient of {gradient._tensor} is on the server, which has its whole 2-norm; got norm {ord}{over}"
        )
    value = gradient._value
    norm = abs(value.factor) * value.attempt.norm(gradient._tensor) if value.factor else 0.0
    # At least f32, so that squares of many add up.
    return torch.tensor(norm, dtype=dtype or torch.promote_types(gradient.dtype, torch.float32), device=gradient.device)


def _norms(gradients: list[torch.Tensor], ord: float = 2, dtype=None) -> list[torch.Tensor]:
    return [torch.linalg.vector_norm(gradient, ord, dtype=dtype) for gradient in gradients]


def _isnan(gradient: ServerGradient) -> torch.Tensor:
    """For anomaly detection, which asks in mid-backward. What is not finite shows when the step is sealed."""
    if torch._C._current_graph_task_id() == -1:
        raise TypeError(f"whether the gradient of {gradient._tensor} has NaNs shows in its norm, or in step()")
    return torch.empty(0, dtype=torch.bool)


def _split(gradients: list[torch.Tensor]) -> tuple[list[torch.Tensor], list[ServerGradient]]:
    """Those that are here, and those on the server."""
    local = [g for g in gradients if not isinstance(g, ServerGradient)]
    return local, [g for g in gradients if isinstance(g, ServerGradient)]


def _unscale_(gradients: list[torch.Tensor], found_inf: torch.Tensor, inverse_scale: torch.Tensor) -> None:
    """Of GradScaler. Both sides skip the step where either has found what is not finite."""
    local, ours = _split(gradients)
    if local:
        torch._amp_foreach_non_finite_check_and_unscale_(local, found_inf, inverse_scale)
    for gradient in ours:
        _multiply_(gradient, inverse_scale)
    # After the loop, since a step that can't be sealed takes the gradients away.
    attempts = {id(gradient._value.attempt): gradient._value.attempt for gradient in ours}
    if not all([attempt.unscale() for attempt in attempts.values()]):
        found_inf.fill_(1.0)


def _for_each(one: Callable, all_local: Callable) -> Callable:
    """A foreach operator over local gradients and the server's."""

    def run(gradients: list[torch.Tensor], *arguments: Any) -> None:
        local, ours = _split(gradients)
        if local:
            all_local(local, *arguments)
        for gradient in ours:
            one(gradient, *arguments)

    return run


_OPERATORS: dict[Any, Callable] = {
    _aten.alias.default: _alias,
    _aten.detach.default: _alias,
    _aten.clone.default: lambda gradient, *, memory_format=None: _copy(gradient),
    _aten._to_copy.default: _copy,
    _aten.add.Tensor: lambda a, b, *, alpha=1: _add_(_copy(a) if isinstance(a, ServerGradient) else a, b, alpha=alpha),
    _aten.add_.Tensor: _add_,
    _aten.mul.Tensor: lambda a, b: _multiply_(*((_copy(a), b) if isinstance(a, ServerGradient) else (_copy(b), a))),
    _aten.mul_.Tensor: _multiply_,
    _aten.div.Tensor: lambda a, b: _divide_(_copy(a), b),
    _aten.div_.Tensor: _divide_,
    _aten.zero_.default: _zero_,
    _aten.linalg_vector_norm.default: _norm,
    _aten.isnan.default: _isnan,
    _aten._foreach_norm.Scalar: _norms,
    _aten._foreach_mul_.Scalar: _for_each(_multiply_, torch._foreach_mul_),
    _aten._foreach_mul_.Tensor: _for_each(_multiply_, torch._foreach_mul_),
    _aten._foreach_div_.Scalar: _for_each(_divide_, torch._foreach_div_),
    _aten._foreach_div_.Tensor: _for_each(_divide_, torch._foreach_div_),
    _aten._foreach_zero_.default: _for_each(_zero_, torch._foreach_zero_),
    _aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale_,
}
