"""Which MLP of a model is which layer of the server, and whether the server computes it exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn

from . import _native
from .connection import Connection, check_dtype, checksum
from .remote_mlp import RemoteMLP

# Dropout after the down projection, which stays with the trainer; elsewhere in an MLP it can't be honoured.
_OUTPUT_DROPOUT: dict[str, Callable[[nn.Module], nn.Module]] = {
    "gpt2": lambda mlp: mlp.dropout,
    "starcoder2": lambda mlp: nn.Dropout(mlp.residual_dropout),
}


@dataclass(frozen=True)
class _Spread:
    """Of an MLP without a module of its own: the forward that runs its parts, and those after the one that the server
    names. Dropout, residual and norm that come next stay with the trainer."""

    forward: str
    followers: tuple[str, ...]


_SPREADS = {
    "opt": _Spread("OPTDecoderLayer.forward", ("activation_fn", "fc2")),
    "bert": _Spread("BertLayer.forward", ("output.dense",)),
}

# What an MLP's activation is called.
_ACTIVATION_NAMES = ("act_fn", "activation_fn", "act", "intermediate_act_fn")

# Linear layers of transformers' own. Falcon's differs from torch's in rounding alone.
_LINEARS = {"Conv1D", "FalconLinear"}

# What wrappers (DataParallel, torch.compile, FSDP, checkpointing) put into a module's path.
_WRAPPERS = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}

# The server's activations by canonical name, f64 to f64.
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * (1 + torch.erf(x / math.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    "gelu_fast": lambda x: x * (1 + torch.tanh(0.7978845608 * (x + 0.044715 * x**3))) / 2,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": lambda x: x.clamp(min=0),
    "relu2": lambda x: x.clamp(min=0) ** 2,
}


@dataclass(frozen=True)
class Part:
    """A module, at ``path`` in the model, that computes an MLP or a part of one."""

    path: str
    module: nn.Module
    tensors: dict[str, _native.Tensor]  # the server's, by parameter name in `module`


@dataclass(frozen=True)
class Match:
    """A layer of the server and what it replaces, one after another: a module, or several where the MLP has none of its
    own."""

    layer: _native.Layer
    parts: list[Part]
    output_dropout: nn.Module | None

    @property
    def path(self) -> str:
        """Of the module that x is given to."""
        return self.parts[0].path

    def parameters(self) -> list[nn.Parameter]:
        """The model's, in the server's order."""
        return [part.module.get_parameter(name) for part in self.parts for name in part.tensors]


def match_layers(model: nn.Module, served: _native.ServedModel) -> list[Match]:
    """Finds every layer of the server in ``model`` and checks it. Raises ValueError naming what differs."""
    paths: dict[str, list[str]] = {}
    for path, _ in model.named_modules():
        plain = ".".join(part for part in path.split(".") if part not in _WRAPPERS)
        paths.setdefault(plain, []).append(path)
    return [_match(model, served, layer, paths) for layer in served.layers]


def check_local(model: nn.Module) -> None:
    """Raises ValueError where another call has offloaded a part of ``model``."""
    for path, module in model.named_modules():
        if isinstance(module, RemoteMLP):
            _refuse(
                path,
                "it is offloaded already; a step is one on all servers of a model, so that one call has to name them "
                "all, as offload(model, [target, ...])",
            )


def check_untied(matches: Iterable[Match]) -> None:
    """Raises ValueError where two MLPs share a parameter."""
    owners: dict[int, str] = {}
    for match in matches:
        for part in match.parts:
            for name in part.tensors:
                path = f"{part.path}.{name}"
                other = owners.setdefault(id(part.module.get_parameter(name)), path)
                if other != path:
                    _refuse(path, f"it is one parameter with {other}, and the server owns two")


def local_weights(matches: list[Match]) -> Iterator[tuple[str, torch.Tensor, _native.Tensor]]:
    """The name in the model, weights, and the server's tensor, of all that are in memory here."""
    for match in matches:
        for part in match.parts:
            for name, tensor in part.tensors.items():
                p = part.module.get_parameter(name)
                if not p.is_meta:
                    yield f"{part.path}.{name}", p.detach(), tensor


def check_weights(weights: Iterable[tuple[str, torch.Tensor, _native.Tensor]], connection: Connection) -> None:
    """Raises ValueError by the name of the first of ``weights`` that are not those of the server's tensor beside them.
    Where the two have other dtypes, either may be the rounded one. Holds one tensor at a time."""
    served = connection.checksums()
    for name, mine, tensor in weights:
        if checksum(mine, tensor) == served[tensor.name]:
            continue
        theirs, _ = connection.read_tensor(tensor)
        if theirs.dtype != mine.dtype and torch.equal(theirs.to(mine.dtype), mine.cpu()):
            continue
        step = connection.session.position.step
        reason = (
            "the server was started with other weights"
            if step == 0
            else f"it is at step {step}. To go on from there, give the model that step's local parameters and "
            "offload with resume=True; to begin anew, start the server again, or restore a checkpoint"
        )
        _refuse(name, f"its weights are not those of the server's {tensor.name}: {reason}")


def check_outputs(match: Match, connection: Connection) -> None:
    """Raises ValueError where module and server, which have the same weights, give different outputs. A few rows tell
    another computation apart; how exact the server is does not matter here."""
    parameters = match.parameters()
    if any(p.is_meta for p in parameters):
        return
    mlp = nn.Sequential(*(part.module for part in match.parts))
    generator = torch.Generator().manual_seed(match.layer.layer)
    x = torch.randn(4, match.layer.hidden_size, generator=generator, device="cpu").to(parameters[0])
    modes = [(module, module.training) for module in mlp.modules()]
    mlp.eval()
    with torch.no_grad():
        expected = mlp(x).double().cpu()
    for module, training in modes:
        module.training = training
    got, *_ = connection.forward(match.layer.layer, x, match.layer.output_size)
    scale = expected.abs().max().clamp(min=1e-30)
    difference = ((got.double().cpu() - expected).abs().max() / scale).item()
    if not difference < 0.05:
        _refuse(
            match.path,
            f"its output differs from the server's by {difference:.2g}, relative: it computes something else",
        )


def _match(model: nn.Module, served: _native.ServedModel, layer: _native.Layer, paths: dict[str, list[str]]) -> Match:
    parts = _find_parts(model, served, layer, paths)
    find_dropout = _OUTPUT_DROPOUT.get(served.model_type)
    dropout = None if find_dropout is None else find_dropout(parts[0].module)
    for part in parts:
        _check_tensors(part)
        _check_modules(part, dropout)
    _check_activation(parts, layer)
    return Match(layer, parts, dropout)


def _find_parts(
    model: nn.Module, served: _native.ServedModel, layer: _native.Layer, paths: dict[str, list[str]]
) -> list[Part]:
    owner, _, first = layer.module.rpartition(".")
    spread = _SPREADS.get(served.model_type)
    tensors = {t.name: t for t in served.tensors if t.layer == layer.layer}
    parts = []
    for name in (first, *(spread.followers if spread else ())):
        path = _find(f"{owner}.{name}", paths)
        prefix = f"{owner}.{name}."
        own = {t.removeprefix(prefix): tensors.pop(t) for t in list(tensors) if t.startswith(prefix)}
        parts.append(Part(path, model.get_submodule(path), own))
    path = parts[0].path
    if tensors:
        _refuse(path, f"where the server's {next(iter(tensors))} is in a {served.model_type} model is not known here")
    if spread:
        forward = type(model.get_submodule(path.rpartition(".")[0])).forward.__qualname__
        if forward != spread.forward:
            _refuse(path, f"the layer's forward is {forward}, expected {spread.forward}")
    return parts


def _find(module: str, paths: dict[str, list[str]]) -> str:
    """The path of the server's ``module``, which base models have without the first part and wrappers with more."""
    for name in (module, module.partition(".")[2]):
        found = [path for plain in paths if plain == name or plain.endswith("." + name) for path in paths[plain]]
        if len(found) == 1:
            return found[0]
        if found:
            raise ValueError(f"cannot offload {module}: the model has several of it: {', '.join(found)}")
    raise ValueError(f"cannot offload {module}: the server owns it and the model has no such module")


def _check_tensors(part: Part) -> None:
    path, module, tensors = part.path, part.module, part.tensors
    local = dict(module.named_parameters())
    for name, p in local.items():
        if name not in tensors:
            _refuse(
                f"{path}.{name}",
                "the server has no such tensor; adapters on an MLP can't be honoured: leave its linear layers out of "
                "their configuration, as PEFT's target_modules"
                if "lora" in name or "base_layer" in name
                else "the server has no such tensor",
            )
        if list(p.shape) != list(tensors[name].shape):
            _refuse(f"{path}.{name}", f"got {list(p.shape)}, the server has {list(tensors[name].shape)}")
        if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None):
            _refuse(f"{path}.{name}", "it has a gradient hook, and its gradient stays on the server")
        try:
            check_dtype(p.dtype)
        except TypeError as error:
            _refuse(f"{path}.{name}", str(error))
    for name, tensor in tensors.items():
        if name not in local:
            _refuse(f"{path}.{name}", f"the server has {tensor.name} {list(tensor.shape)} and the model does not")
    for name, _ in module.named_buffers():
        _refuse(f"{path}.{name}", "the server has no such buffer")


def _check_modules(part: Part, output_dropout: nn.Module | None) -> None:
    for name, child in part.module.named_modules():
        where = f"{part.path}.{name}" if name else part.path
        if any((child._forward_hooks, child._forward_pre_hooks, child._backward_hooks, child._backward_pre_hooks)):
            _refuse(where, "it has a hook, which would no longer run; register it after offload")
        if "forward" in vars(child):
            _refuse(where, "its forward was replaced, so what it computes is not known")
        linear = type(child) is nn.Linear or type(child).__name__ in _LINEARS
        if list(child.parameters(recurse=False)) and not linear:
            _refuse(where, f"got a {type(child).__name__}, expected a plain linear layer")
        if isinstance(child, nn.modules.dropout._DropoutNd) and child.p > 0 and child is not output_dropout:
            _refuse(where, f"dropout {child.p} inside the MLP can't be honoured")


def _check_activation(parts: list[Part], layer: _native.Layer) -> None:
    path, activation = _find_activation(parts)
    x = torch.linspace(-8, 8, 257, dtype=torch.float64)
    with torch.no_grad():
        difference = (activation(x) - _ACTIVATIONS[layer.activation](x)).abs().max().item()
    if not difference < 1e-12:
        _refuse(path, f"it differs from the server's {layer.activation} by {difference:.2g}")


def _find_activation(parts: list[Part]) -> tuple[str, Callable[[torch.Tensor], torch.Tensor]]:
    """Its path, and what it is: a part by itself, or within one."""
    for part in parts:
        if part.path.rpartition(".")[2] in _ACTIVATION_NAMES:
            return part.path, part.module
        for name in _ACTIVATION_NAMES:
            if callable(getattr(part.module, name, None)):
                return f"{part.path}.{name}", getattr(part.module, name)
    _refuse(parts[0].path, f"a {type(parts[0].module).__name__} has no activation that could be checked")


def _refuse(path: str, reason: str) -> NoReturn:
    raise ValueError(f"cannot offload {path}: {reason}")
