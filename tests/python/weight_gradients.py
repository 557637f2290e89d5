"""Weight gradients of a gated MLP as each way to compute it leaves them, and how far they are from exact ones.

x and dy are [..., H]. Gradients come by parameter name in the MLP.
"""

from __future__ import annotations

import copy
from pathlib import Path

import safetensors.torch
import torch
from deepspeed.runtime.sequence_parallel.ulysses_sp import TiledMLP
from models import relative

import shardmlp

Gradients = dict[str, torch.Tensor]


def tiled(mlp: torch.nn.Module, x: torch.Tensor, shards: int) -> torch.Tensor:
    """y of an MLP of transformers' Llama through DeepSpeed's TiledMLP, called as its documentation does."""

    def forward(mlp: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return mlp.down_proj(mlp.act_fn(mlp.gate_proj(x)) * mlp.up_proj(x))

    return TiledMLP.apply(forward, mlp, x, shards, list(mlp.parameters()))


def of_local(mlp: torch.nn.Module) -> Gradients:
    return {name: p.grad for name, p in mlp.named_parameters()}


def of_server(remote: shardmlp.Remote, checkpoints: Path, *paths: str) -> list[Gradients]:
    """What the server of ``remote``, whose checkpoints are in ``checkpoints``, has summed for the MLPs at ``paths`` in
    the model, in the type that it sums in. Ends the step, in which no weight changes."""
    # SGD's momentum is the gradient where the factor of the one before is too small to count.
    optimizer = remote.optimizer or remote.wrap(torch.optim.SGD(remote.model.parameters(), lr=0.0, momentum=1e-30))
    optimizer.step()
    optimizer.zero_grad()
    remote.save_checkpoint("gradients")
    state = safetensors.torch.load_file(checkpoints / "gradients" / "optimizer.safetensors")
    names = {path: [name for name, _ in remote.model.get_submodule(path).named_parameters()] for path in paths}
    return [{name: state[f"{path}.{name}.moment1"] for name in names[path]} for path in paths]


class Exact:
    """The gradients in f64 from the same weights, x and dy, of whatever rows were added."""

    def __init__(self, mlp: torch.nn.Module) -> None:
        self._twin = copy.deepcopy(mlp).double()

    def add(self, x: torch.Tensor, dy: torch.Tensor, rows: int = 2048) -> None:
        for some_x, some_dy in zip(x.flatten(0, -2).split(rows), dy.flatten(0, -2).split(rows), strict=True):
            self._twin(some_x.detach().double()).backward(some_dy.double())

    def error_of(self, gradients: Gradients) -> float:
        """The largest difference over the largest exact value of a tensor; of the worst tensor."""
        return difference(gradients, of_local(self._twin))


def difference(gradients: Gradients, expected: Gradients) -> float:
    return max(relative(gradients[name], expected[name]) for name in expected)


def workspace_for(rows: int, hidden_size: int, intermediate_size: int, element_bytes: int) -> str:
    """The flag with which a server cuts tiles of ``rows`` rows of a gated MLP: x, dy, a result, G, U and A."""
    return f"--workspace-bytes={rows * (3 * hidden_size + 3 * intermediate_size) * element_bytes}"
