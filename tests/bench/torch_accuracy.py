"""bf16 weight gradients in 1, 8 and 64 tiles against f64 from the same rounded operands: the server's and TiledMLP's.

Random x and dy, which have no preferred sign, at the size of the other measurements; and those of SmolLM2-135M-Instruct
on prose, in every third of its layers.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch_mlps import DTYPES, HIDDEN, INTERMEDIATE, MLP, make_model, operands, serve
from torch_report import aligned
from transformers import AutoModelForCausalLM, AutoTokenizer
from weight_gradients import Exact, Gradients, difference, of_local, of_server, tiled, workspace_for

import shardmlp

sys.path.append(str(Path(__file__).resolve().parents[2] / "client/python/examples"))
import finetune

TILES = (1, 8, 64)
TOKENS = 16384
BF16 = DTYPES["bf16"]


@dataclass
class Case:
    """MLPs of one model, by path, with x and dy [1, T, H] of each."""

    name: str
    description: str
    folder: Path
    operands: dict[str, tuple[torch.Tensor, torch.Tensor]]

    def load(self) -> torch.nn.Module:
        return AutoModelForCausalLM.from_pretrained(self.folder, dtype=BF16)

    @property
    def tokens(self) -> int:
        return next(iter(self.operands.values()))[0].shape[1]


@dataclass
class Errors:
    """Of each MLP: against f64, and of the gradient in one tile against that in these."""

    ours: list[float]
    theirs: list[float]
    our_difference: list[float]
    their_difference: list[float]


def random_case(scratch: Path, tokens: int = TOKENS) -> Case:
    make_model(scratch / "random", BF16)
    return Case("random", f"random, H {HIDDEN}, I {INTERMEDIATE}", scratch / "random", {MLP: operands(tokens, BF16)})


def real_case(scratch: Path, tokens: int = TOKENS, length: int = 512) -> Case:
    """``tokens`` tokens in sequences of ``length``."""
    folder = scratch / "smollm2"
    with contextlib.redirect_stdout(sys.stderr):
        finetune.convert(folder)
    case = Case("smollm2", "SmolLM2-135M on prose, 10 layers", folder, {})
    model = case.load()
    sizes = dict(steps=tokens // length, batch=1, length=length)
    recipe = finetune.Recipe(model=str(folder), text=finetune.PROSE, learning_rate=0.0, seed=1, **sizes)
    seen: dict[str, tuple[list, list]] = {}
    for number, layer in list(enumerate(model.model.layers))[::3]:
        inputs, gradients = seen[f"model.layers.{number}.mlp"] = [], []

        def see(_, x, y, inputs=inputs, gradients=gradients) -> None:
            inputs.append(x[0].detach())
            y.register_hook(lambda dy: gradients.append(dy.detach()))

        layer.mlp.register_forward_hook(see)
    for ids in finetune.batches(recipe, AutoTokenizer.from_pretrained(folder)):
        model(input_ids=ids, labels=ids).loss.backward()
    case.operands = {path: (torch.cat(x, dim=1), torch.cat(dy, dim=1)) for path, (x, dy) in seen.items()}
    return case


def of_tiledmlp(case: Case, tiles: int) -> list[Gradients]:
    model = case.load()
    for path, (x, dy) in case.operands.items():
        tiled(model.get_submodule(path), x.detach().requires_grad_(), tiles).backward(dy)
    return [of_local(model.get_submodule(path)) for path in case.operands]


def of_tiles(case: Case, tiles: int) -> list[Gradients]:
    """The server's, which is made to cut as many tiles."""
    model = case.load()
    config = model.config
    workspace = workspace_for(case.tokens // tiles, config.hidden_size, config.intermediate_size, BF16.itemsize)
    patient = shardmlp.Timeouts(connect=120)  # the server may have to load its model next to other work
    with (
        serve(case.folder, "bf16", workspace) as server,
        shardmlp.offload(model, server.target, timeouts=patient) as remote,
    ):
        for path, (x, dy) in case.operands.items():
            model.get_submodule(path)(x.detach().requires_grad_()).backward(dy)
        computed = server.metric('shardmlp_stage_seconds_count{pass="backward",stage="compute"}')
        assert computed == tiles * len(case.operands), computed
        return of_server(remote, server.checkpoints, *case.operands)


def exact_gradients(case: Case) -> list[Exact]:
    model, exact = case.load(), []
    for path, (x, dy) in case.operands.items():
        exact.append(Exact(model.get_submodule(path)))
        exact[-1].add(x, dy)
    return exact


def measure(case: Case) -> Iterator[tuple[int, Errors]]:
    """By how many tiles."""
    exact = exact_gradients(case)
    our_one, their_one = of_tiles(case, 1), of_tiledmlp(case, 1)
    for tiles in TILES:
        ours, theirs = (our_one, their_one) if tiles == 1 else (of_tiles(case, tiles), of_tiledmlp(case, tiles))
        yield (
            tiles,
            Errors(
                ours=[e.error_of(g) for e, g in zip(exact, ours)],
                theirs=[e.error_of(g) for e, g in zip(exact, theirs)],
                our_difference=[difference(g, one) for g, one in zip(ours, our_one)],
                their_difference=[difference(g, one) for g, one in zip(theirs, their_one)],
            ),
        )


def ratios(errors: Errors) -> list[float]:
    """How many times closer the server's are, by MLP."""
    return [theirs / ours for ours, theirs in zip(errors.ours, errors.theirs)]


def worst(errors: list[float]) -> str:
    return f"{max(errors):.1e}"


def run() -> str:
    """Prints lines and returns the table."""
    header = ["x and dy", "tiles", "error, shardmlp", "TiledMLP", "times closer", "off 1 tile, shardmlp", "TiledMLP"]
    cells = []
    with tempfile.TemporaryDirectory() as scratch:
        for case in (random_case(Path(scratch)), real_case(Path(scratch))):
            for tiles, errors in measure(case):
                closer = ratios(errors)
                print(f"torch_bf16_{case.name}_{tiles}_tiles_times_closer {statistics.median(closer):.2f}", flush=True)
                spread = f" ({min(closer):.1f} to {max(closer):.1f})" if len(closer) > 1 else ""
                cells.append(
                    [
                        case.description,
                        str(tiles),
                        worst(errors.ours),
                        worst(errors.theirs),
                        f"{statistics.median(closer):.1f}{spread}",
                        worst(errors.our_difference),
                        worst(errors.their_difference),
                    ]
                )
    return aligned(header, cells)
