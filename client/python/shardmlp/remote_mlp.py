"""The module that stands where an MLP was."""

from __future__ import annotations

import torch
from torch import nn

from . import _native, operators
from .connection import Connection, check_dtype
from .errors import Error
from .step import Step


class Placeholder(nn.Module):
    """Stands where a module of an MLP was, and holds its parameters without their memory. It can't be called: the server
    computes an MLP as a whole.

    Its submodules and parameters have the original's names, and the parameters are the original Parameter objects.
    """

    def __init__(self, original: nn.Module, tensors: dict[str, _native.Tensor], connection: Connection) -> None:
        """``tensors``: what the server owns, by parameter name in ``original``, which is left without memory."""
        super().__init__()
        self.fetches = True  # whether state_dict() holds the server's weights
        self._connection = connection
        self._tensors: dict[str, _native.Tensor] = {}  # by parameter name, without those of submodules
        inner: dict[str, dict[str, _native.Tensor]] = {}
        for path, tensor in tensors.items():
            child, dot, name = path.partition(".")
            if dot:
                inner.setdefault(child, {})[name] = tensor
            else:
                self._take(path, original.get_parameter(path), tensor)
        for child, its_tensors in inner.items():
            self.add_module(child, Placeholder(original.get_submodule(child), its_tensors, connection))
        self.train(original.training)

    def forward(self, *args, **kwargs):
        raise Error(
            f"{self._owned} is on {self._connection.target}, which computes its MLP as a whole: call the MLP, and patch "
            "what replaces an MLP's forward (fused kernels and the like) off",
            "FAILED_PRECONDITION",
            "UNSUPPORTED_MODEL",
        )

    def placeholders(self) -> dict[str, nn.Parameter]:
        """The Parameters that stand for the server's tensors, by the server's names."""
        own = {tensor.name: self._parameters.get(name) for name, tensor in self._tensors.items()}
        children = (child for child in self.children() if isinstance(child, Placeholder))
        return own | {name: p for child in children for name, p in child.placeholders().items()}

    def __reduce_ex__(self, protocol):
        raise TypeError(
            f"{self._owned} is offloaded to {self._connection.target} and can't be copied or pickled: take "
            "model.state_dict(), which holds the server's tensors too, and offload the copy"
        )

    def extra_repr(self) -> str:
        target = self._connection.target
        return f"{self._owned} on {target}, where adapters can't be honoured: leave it out of target_modules"

    @property
    def _owned(self) -> str:
        """The server's name for the module, or of its first tensor."""
        tensor = next(iter(self.placeholders()), None)
        return "its part of an MLP" if tensor is None else tensor.rpartition(".")[0]

    def _apply(self, fn, recurse=True):
        """Of Module.to() and the like. The Parameters stay the same objects, and memory is not theirs to have: on meta,
        a model's weights are gone, and these are on the server."""
        for child in self.children():
            if recurse:
                child._apply(fn)
        for p in self._parameters.values():
            moved, grad = fn(p.data), p.grad
            p.grad = None
            p.data = torch.empty(0, dtype=moved.dtype, device=p.device if moved.is_meta else moved.device)
            p.grad = None if grad is None else grad.to(p.device, p.dtype)
        return self

    def _take(self, name: str, parameter: nn.Parameter, tensor: _native.Tensor) -> None:
        empty = torch.empty(0, dtype=parameter.dtype, device="cpu" if parameter.is_meta else parameter.device)
        if parameter.is_meta:
            parameter = nn.Parameter(empty, parameter.requires_grad)
        else:
            parameter.data = empty
            parameter.grad = None
        self.register_parameter(name, parameter)
        self._tensors[name] = tensor

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        for name, tensor in self._tensors.items() if self.fetches else ():
            weights, version = self._connection.read_tensor(tensor)
            _check_version(destination, prefix, self._connection.target, version)
            destination[prefix + name] = weights.to(self._parameters[name].dtype)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ):
        for name, tensor in self._tensors.items():
            given = state_dict.get(prefix + name)
            if given is None or given.numel() == 0:
                continue
            served, _ = self._connection.read_tensor(tensor)
            if not torch.equal(served.to(given.dtype), given.cpu()):
                error_msgs.append(
                    f"{prefix + name}: differs from the server's weights, which only a server that starts with this "
                    "model, or remote.restore() of a checkpoint, can replace"
                )


def set_fetches(model: nn.Module, fetches: bool) -> None:
    """Whether ``model``'s state_dict() holds the server's weights."""
    for module in model.modules():
        if isinstance(module, Placeholder):
            module.fetches = fetches


def _check_version(state_dict, prefix: str, target: str, version: int) -> None:
    """A state dict holds a server's weights of one step: each module notes whose and which in its metadata."""
    noted = [m["weights_version"] for m in state_dict._metadata.values() if "weights_version" in m]
    others = [other for owner, other in noted if owner == target and other != version]
    if others:
        raise Error(
            f"the server's weights changed while state_dict() read them, from version {others[0]} to {version}: "
            "call it again, between steps",
            "FAILED_PRECONDITION",
            "WEIGHTS_CHANGED",
        )
    state_dict._metadata[prefix[:-1]]["weights_version"] = (target, version)


class Follower(Placeholder):
    """A module behind the one that stands for the whole MLP: where it is called, the server has done its part already,
    and it returns what it is given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


class RemoteMLP(Placeholder):
    """An MLP whose weights a server owns: y = MLP(x), x [..., H] to y [..., O], in x's dtype (under autocast, in its).

    Its submodules and parameters have the original's names. The parameters are the original Parameter objects with
    their memory taken away: zero elements, the same dtype and ``requires_grad``. In an optimizer's group they stand for
    the server's tensors, and a ``grad`` of zero elements says that the server holds a gradient. ``state_dict()``
    fetches the server's weights under these names, and ``load_state_dict()`` refuses weights that are not the server's.

    Raises :class:`shardmlp.Error`, and :class:`shardmlp.StepAborted` where the step's attempt ended. Can't be copied,
    pickled, or differentiated twice.
    """

    def __init__(
        self,
        original: nn.Module,
        tensors: dict[str, _native.Tensor],
        followers: list[Follower],
        layer: _native.Layer,
        step: Step,
        output_dropout: nn.Module | None,
        keep_input: bool,
    ) -> None:
        """``followers``: what stands for the rest of the MLP, where ``original`` is its first module alone.
        ``keep_input``: for backward, here too and not on the server alone. The others as in :class:`Placeholder`."""
        super().__init__(original, tensors, step.connection(layer))
        self.layer = layer
        self._step = step
        self._followers = followers  # in a list, so that they are submodules of their own parent alone
        self._handle = operators.handle_of(self)  # no buffer, which would move with the model
        self._output_size = layer.output_size  # since a compiler can't look into `layer`
        self._keep_input = keep_input
        self.dropout = output_dropout
        self.train(original.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device = x.device.type
        if device != "meta" and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(device))
        weights = [p for module in (self, *self._followers) for p in module.parameters()]
        backward_follows = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *weights))
        y, _ = operators.mlp(x, self._handle, weights, self._output_size, backward_follows, self._keep_input)
        return y if self.dropout is None else self.dropout(y)

    def compute(self, x: torch.Tensor, backward_follows: bool) -> tuple[torch.Tensor, int, int]:
        """y [..., O] without a graph from x [..., H], the weights version that it was computed with, and the ticket of
        x on the server, or 0."""
        layer, step = self.layer, self._step
        step.check_placeholders(self.placeholders())
        if x.shape[-1:] != (layer.hidden_size,):
            raise ValueError(f"{layer.module}: got x {list(x.shape)}, expected [..., {layer.hidden_size}]")
        check_dtype(x.dtype)
        rows = x.reshape(-1, layer.hidden_size)
        keep_input = _native.KeepInput.if_room if self._keep_input else _native.KeepInput.pinned
        y, weights_version, ticket = step.guard(
            lambda: step.connection(layer).forward(
                layer.layer, rows, layer.output_size, keep_input if backward_follows else None
            ),
            layer,
        )
        # No view, since one that an operator returns can't be changed in place, as Falcon does with an MLP's output.
        y = torch.ops.aten._unsafe_view(y, (*x.shape[:-1], layer.output_size))
        return y, weights_version, ticket

    def differentiate(
        self,
        x: torch.Tensor | None,
        weights_version: int,
        ticket: int,
        dy: torch.Tensor,
        input_gradient: bool,
        trained: list[bool],
    ) -> torch.Tensor | None:
        """dx [..., H], or None where it is not asked for, from x [..., H] (None: the server has it alone) and dy
        [..., O] of one dtype. In a backward pass that adds to the ``grad`` of any of the ``trained`` placeholders, the
        server adds its weight gradients."""
        layer, step = self.layer, self._step
        wanted = {
            name: train and _accumulates(name, p)
            for (name, p), train in zip(self.placeholders().items(), trained, strict=True)
        }
        weight_gradient = any(wanted.values())
        if weight_gradient:
            step.admit()
        dx = step.guard(
            lambda: step.connection(layer).backward(
                layer.layer,
                weights_version,
                ticket,
                None if x is None else x.reshape(-1, layer.hidden_size),
                dy.reshape(-1, layer.output_size),
                layer.hidden_size,
                input_gradient=input_gradient,
                weight_gradient=weight_gradient,
            ),
            layer,
        )
        if weight_gradient:
            step.give(wanted)
        return None if dx is None else dx.reshape(*dy.shape[:-1], layer.hidden_size)

    def release(self, ticket: int) -> None:
        """No backward will name ``ticket`` any more."""
        self._connection.release(ticket)

    def placeholders(self) -> dict[str, nn.Parameter]:
        """The Parameters that stand for the server's tensors, its followers' too, by the server's names."""
        return super().placeholders() | {name: p for f in self._followers for name, p in f.placeholders().items()}

    @property
    def _owned(self) -> str:
        return self.layer.module

    def extra_repr(self) -> str:
        layer = self.layer
        return (
            f"{layer.module} on {self._connection.target}, H={layer.hidden_size}, I={layer.intermediate_size},"
            f" O={layer.output_size}, {layer.activation}{', gated' if layer.gated else ''}"
        )


def _accumulates(name: str, placeholder: nn.Parameter) -> bool:
    """Whether the backward that runs now adds to the placeholder's ``grad``, as autograd.grad() and
    backward(inputs=...) may not."""
    # Operators run below autograd, where a parameter has no node.
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False):
        node = torch.autograd.graph.get_gradient_edge(placeholder).node
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError as error:  # autograd.grad() with the placeholder among its inputs
        raise Error(
            f"the gradient of {name} stays on the server and can't be returned: use backward() rather than "
            "torch.autograd.grad()",
            "UNIMPLEMENTED",
        ) from error
