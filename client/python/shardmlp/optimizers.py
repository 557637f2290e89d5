"""Which torch optimizers the server has, and their hyperparameters as the server takes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from . import _native
from .errors import Error

_DEEPSPEED = (
    "DeepSpeed's ZeRO (stages 1 to 3) and its fp16 and bf16 modes put parameters of their own into the optimizer, and "
    "can't commit the server's half of a step: use stage 0, and autocast (torch_autocast) for bf16"
)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Raises ValueError naming the optimizer, or its option, that the server does not have."""
    kind = type(optimizer)
    if kind not in _HYPERPARAMETERS:
        raise ValueError(
            f"got optimizer {kind.__module__}.{kind.__qualname__}; the server has torch.optim.AdamW (without amsgrad "
            "and maximize) and torch.optim.SGD (without maximize)"
            + (f". {_DEEPSPEED}" if kind.__module__.startswith("deepspeed") else "")
        )
    for index, group in enumerate(optimizer.param_groups):
        for option in ("amsgrad", "maximize", "differentiable"):
            if group.get(option):
                raise ValueError(f"{kind.__name__} with {option}=True (parameter group {index}): the server lacks it")


def parameter_groups(
    optimizer: torch.optim.Optimizer, tensors: Iterable[str], trained: dict[str, nn.Parameter]
) -> list[_native.ParameterGroup]:
    """``tensors``, which are all of the server's, in the optimizer's groups, with each group's hyperparameters as they
    are now. What is not among ``trained``, or in no group, gets no update."""
    of_group = _HYPERPARAMETERS[type(optimizer)]
    tensors = list(tensors)
    left = {id(trained[name]): name for name in tensors if name in trained}
    groups = []
    for group in optimizer.param_groups:
        names = [left.pop(id(p)) for p in group["params"] if id(p) in left]
        if names:
            groups.append(_native.ParameterGroup(names, of_group(group)))
    frozen = [name for name in tensors if name not in trained or name in left.values()]
    if frozen:
        groups.append(_native.ParameterGroup(frozen, _native.KeepFrozen()))
    return groups


def held_by(optimizer: torch.optim.Optimizer, placeholders: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of ``placeholders`` that are in the optimizer's groups."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: p for name, p in placeholders.items() if id(p) in held}


def check_holds(optimizer: torch.optim.Optimizer, trained: dict[str, nn.Parameter]) -> None:
    """Raises ValueError where ``optimizer`` can train none of these: it never held one of them, or a wrapper has put
    parameters of its own into its groups."""
    if trained and not held_by(optimizer, trained):
        raise ValueError(
            f"the optimizer holds none of the server's tensors, such as {next(iter(trained))}: give it "
            "model.parameters(), and where they are not to be trained, set requires_grad to False. What replaces an "
            f"optimizer's parameters takes them away: {_DEEPSPEED}"
        )


def refuse_unwrapped(holds_gradients: Callable[[], bool]) -> RemovableHandle:
    """Has any optimizer raise Error that steps while the server ``holds_gradients``, until the handle is removed: no
    wrapped one will commit them."""

    def refuse(*_: Any) -> None:
        if holds_gradients():
            raise Error(
                "an optimizer steps, and none was given to Remote.wrap(), so that nothing would commit the server's "
                "half of the step: wrap the one that holds the model's parameters. Where the server's tensors are not "
                f"to be trained, set requires_grad to False ahead of offload. {_DEEPSPEED}",
                "FAILED_PRECONDITION",
            )

    return register_optimizer_step_pre_hook(refuse)


def check_state(optimizer: torch.optim.Optimizer, placeholders: dict[str, nn.Parameter]) -> None:
    """Raises ValueError where ``optimizer`` has state of its own for a tensor of the server, as one that updated it
    before offload does, or that loaded an ordinary checkpoint."""
    for name, p in placeholders.items():
        for key, value in optimizer.state.get(p, {}).items():
            if torch.is_tensor(value) and value.numel() > 1:
                raise ValueError(
                    f"the optimizer has {key} {list(value.shape)} of {name}, and its state can't move to the server: "
                    "give a new optimizer, or load the state of one that trained with the server"
                )


def loss_scaling(optimizer: torch.optim.Optimizer) -> tuple[float, bool]:
    """What a GradScaler leaves to an optimizer that unscales by itself, as a fused one does: the loss scale, and
    whether it is to skip the step."""
    scale, found_inf = getattr(optimizer, "grad_scale", None), getattr(optimizer, "found_inf", None)
    return 1.0 if scale is None else float(scale), found_inf is not None and bool(found_inf)


def _adamw(group: dict[str, Any]) -> _native.AdamW:
    beta1, beta2 = group["betas"]
    return _native.AdamW(
        learning_rate=float(group["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        epsilon=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
    )


def _sgd(group: dict[str, Any]) -> _native.Sgd:
    return _native.Sgd(
        learning_rate=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        weight_decay=float(group["weight_decay"]),
        nesterov=bool(group["nesterov"]),
    )


_HYPERPARAMETERS = {torch.optim.AdamW: _adamw, torch.optim.SGD: _sgd}
