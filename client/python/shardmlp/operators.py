"""What a remote MLP is in a graph: two operators, the same in eager mode and in a compiled graph.

A graph holds no Python object and no :class:`ServerGradient`. So a module goes by its handle, a tensor, which a
compiler takes for an input: layers share compiled code. Backward gives each weight a mark, a gradient without elements,
which the placeholder's hook makes the server's gradient of as it reaches ``grad``; whatever adds marks up on the way
there does no harm.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING

import torch
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op

from .errors import Error

if TYPE_CHECKING:
    from .remote_mlp import RemoteMLP

_modules: weakref.WeakValueDictionary[int, RemoteMLP] = weakref.WeakValueDictionary()
_handles = itertools.count()


def handle_of(module: RemoteMLP) -> torch.Tensor:
    """A new handle [] by which the operators find ``module`` as long as it lives."""
    handle = next(_handles)
    _modules[handle] = module
    return torch.tensor(handle)


def _module(handle: torch.Tensor) -> RemoteMLP:
    module = _modules.get(int(handle))
    if module is None:
        raise Error("the offloaded model that this graph was made of is not in this process", "FAILED_PRECONDITION")
    return module


@torch.library.custom_op(
    "shardmlp::mlp",
    mutates_args=(),
    schema="(Tensor x, Tensor handle, Tensor[] weights, int output_size) -> (Tensor y, Tensor weights_version)",
)
def _mlp(x, handle, weights, output_size):
    """y [..., O] from x [..., H], and the weights version [] that it was computed with. ``weights``: the placeholders,
    so that backward runs, and as often, as it would for the weights themselves."""
    y, version = _module(handle).compute(x)
    return y, torch.tensor(version)


@_mlp.register_fake
def _(x, handle, weights, output_size):
    return x.new_empty((*x.shape[:-1], output_size)), torch.empty((), dtype=torch.int64)


@torch.library.custom_op(
    "shardmlp::mlp_backward",
    mutates_args=(),
    schema="(Tensor x, Tensor weights_version, Tensor dy, Tensor handle, bool input_gradient, bool[] trained)"
    " -> (Tensor dx, Tensor mark)",
)
def _mlp_backward(x, weights_version, dy, handle, input_gradient, trained):
    """dx [..., H], or [0] where it is not asked for, and a mark [0]. The server adds the weight gradients."""
    dx = _module(handle).differentiate(x, int(weights_version), dy, input_gradient, trained)
    return x.new_empty(0) if dx is None else dx, torch.empty(0)


@_mlp_backward.register_fake
def _(x, weights_version, dy, handle, input_gradient, trained):
    return x.new_empty(x.shape if input_gradient else 0), torch.empty(0)


# Two of one x and dy are two, and one whose results nobody needs still adds.
_register_effectful_op(torch.ops.shardmlp.mlp_backward.default, _EffectType.ORDERED)


def _setup_context(ctx, inputs, output) -> None:
    x, ctx.handle, weights, _ = inputs
    ctx.kinds = [(w.dtype, w.device) for w in weights]
    # One package: where checkpointing recomputes x, backward must quote the version that the new x came from.
    ctx.save_for_backward(x, output[1])


def _backward(ctx, dy: torch.Tensor, _: None):
    if torch.is_grad_enabled():
        raise Error(
            f"{_module(ctx.handle).layer.module}: a remote MLP can't be differentiated twice (create_graph=True)",
            "UNIMPLEMENTED",
        )
    x, version = ctx.saved_tensors
    input_gradient, _, trained, _ = ctx.needs_input_grad
    dx, mark = mlp_backward(x, version, dy.to(x.dtype), ctx.handle, input_gradient, list(trained))
    marks = [mark.to(device, dtype) if needed else None for (dtype, device), needed in zip(ctx.kinds, trained)]
    return dx if input_gradient else None, None, marks, None


_mlp.register_autograd(_backward, setup_context=_setup_context)

mlp = torch.ops.shardmlp.mlp.default
mlp_backward = torch.ops.shardmlp.mlp_backward.default
