"""What a remote MLP is in a graph: two operators, the same in eager mode and in a compiled graph.

A graph holds no Python object and no :class:`ServerGradient`. So a module goes by its handle, a tensor, which a
compiler takes for an input: layers share compiled code. Backward gives each weight a mark, a gradient without elements,
which the placeholder's hook makes the server's gradient of as it reaches ``grad``; whatever adds marks up on the way
there does no harm.
"""

from __future__ import annotations

import itertools
import struct
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
    schema="(Tensor x, Tensor handle, Tensor[] weights, int output_size, bool backward_follows, bool keep_input)"
    " -> (Tensor y, Tensor forwarded)",
)
def _mlp(x, handle, weights, output_size, backward_follows, keep_input):
    """y [..., O] from x [..., H], and what its backward quotes: int64 [2], the weights version that it was computed
    with, and the ticket of x on the server, or 0. ``weights``: the placeholders, so that backward runs, and as often,
    as it would for the weights themselves. ``keep_input``: for backward, here too."""
    module = _module(handle)
    y, weights_version, ticket = module.compute(x, backward_follows)
    memory = _Owner(struct.pack("qq", weights_version, ticket))
    if ticket:
        weakref.finalize(memory, module.release, ticket).atexit = False
    return y, torch.frombuffer(memory, dtype=torch.int64)


class _Owner(bytearray):
    """A tensor's memory, whose end is that of the ticket in it: a graph keeps the tensor for as long as its backward
    may run."""

    __slots__ = ("__weakref__",)


@_mlp.register_fake
def _(x, handle, weights, output_size, backward_follows, keep_input):
    return x.new_empty((*x.shape[:-1], output_size)), torch.empty(2, dtype=torch.int64)


@torch.library.custom_op(
    "shardmlp::mlp_backward",
    mutates_args=(),
    schema="(Tensor? x, Tensor forwarded, Tensor dy, Tensor handle, int hidden_size, bool input_gradient,"
    " bool[] trained) -> (Tensor dx, Tensor mark)",
)
def _mlp_backward(x, forwarded, dy, handle, hidden_size, input_gradient, trained):
    """dx [..., H], or [0] where it is not asked for, and a mark [0]. The server adds the weight gradients."""
    weights_version, ticket = forwarded.tolist()
    dx = _module(handle).differentiate(x, weights_version, ticket, dy, input_gradient, trained)
    return dy.new_empty(0) if dx is None else dx, torch.empty(0)


@_mlp_backward.register_fake
def _(x, forwarded, dy, handle, hidden_size, input_gradient, trained):
    return dy.new_empty((*dy.shape[:-1], hidden_size) if input_gradient else 0), torch.empty(0)


# Two of one x and dy are two, and one whose results nobody needs still adds.
_register_effectful_op(torch.ops.shardmlp.mlp_backward.default, _EffectType.ORDERED)


def _setup_context(ctx, inputs, output) -> None:
    x, ctx.handle, weights, _, _, keep_input = inputs
    ctx.kinds = [(w.dtype, w.device) for w in weights]
    ctx.dtype, ctx.hidden_size = x.dtype, x.shape[-1]
    # One package: where checkpointing recomputes x, backward must quote what the new x came with.
    ctx.save_for_backward(output[1], *([x] if keep_input else []))


def _backward(ctx, dy: torch.Tensor, _: None):
    if torch.is_grad_enabled():
        raise Error(
            f"{_module(ctx.handle).layer.module}: a remote MLP can't be differentiated twice (create_graph=True)",
            "UNIMPLEMENTED",
        )
    forwarded, *x = ctx.saved_tensors
    input_gradient, _, trained, *_ = ctx.needs_input_grad
    dx, mark = mlp_backward(
        x[0] if x else None,
        forwarded,
        dy.to(ctx.dtype),
        ctx.handle,
        ctx.hidden_size,
        input_gradient,
        list(trained),
    )
    marks = [mark.to(device, dtype) if needed else None for (dtype, device), needed in zip(ctx.kinds, trained)]
    return dx if input_gradient else None, None, marks, None, None, None


_mlp.register_autograd(_backward, setup_context=_setup_context)

mlp = torch.ops.shardmlp.mlp.default
mlp_backward = torch.ops.shardmlp.mlp_backward.default
