"""The ways to compute one MLP that torch_bench.py puts side by side, each a Contender.

untiled   transformers' LlamaMLP as it is, 9 GEMMs a token
tiled     the same through DeepSpeed's TiledMLP, in the shards that its documentation takes, ceil(tokens / H); 12 GEMMs
remote    on a server over loopback that keeps nothing between forward and backward; 11 GEMMs
stash     on a server with room to keep what backward needs; 9 GEMMs
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging

import shardmlp

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))
from weight_gradients import Gradients, of_local, of_server, tiled

logging.disable_progress_bar()

HIDDEN, INTERMEDIATE = 2048, 5632
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
LOCAL, REMOTE = ("untiled", "tiled"), ("remote", "stash")
MLP = "model.layers.0.mlp"


def make_model(folder: Path, dtype: torch.dtype, layers: int = 1) -> None:
    """Layers of the size in question, and little else."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def operands(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x and dy [1, T, H], without a preferred sign."""
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(1, tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return x, dy


@dataclass
class Server:
    """A running shardmlp-server."""

    process: subprocess.Popen
    target: str
    metrics: str
    checkpoints: Path

    def metric(self, series: str) -> float:
        with urllib.request.urlopen(f"http://{self.metrics}/metrics") as answer:
            values = dict(line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#")
        return float(values[series])

    def received_bytes(self) -> float:
        """Activations that it got so far."""
        return self.metric('shardmlp_payload_bytes_total{direction="received"}')


@contextlib.contextmanager
def serve(folder: Path, dtype: str, *flags: str) -> Iterator[Server]:
    target, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    checkpoints = folder / f"checkpoints-{target.rpartition(':')[2]}"
    program = [os.environ["SHARDMLP_SERVER"], f"--model={folder}", f"--dtype={dtype}", f"--listen={target}", *flags]
    process = subprocess.Popen(
        [*program, f"--metrics-address={metrics}", f"--checkpoint-dir={checkpoints}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield Server(process, target, metrics, checkpoints)
    finally:
        process.terminate()
        process.wait(timeout=60)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def stash_for(rows: int, dtype: torch.dtype) -> str:
    """The flag that makes a server keep x, G and U of ``rows`` rows."""
    return f"--stash-bytes={rows * (HIDDEN + 2 * INTERMEDIATE) * dtype.itemsize}"


def flags_of(name: str, tokens: int, dtype: torch.dtype) -> list[str]:
    """Of the server for the contender ``name``."""
    return [stash_for(tokens, dtype)] if name == "stash" else []


@dataclass
class Contender:
    """One way to compute the MLP: y [1, T, H] from x, with the gradients of whatever backward passes followed."""

    forward: Callable[[torch.Tensor], torch.Tensor]
    clear: Callable[[], None]
    gradients: Callable[[], Gradients]
    server: Server | None = None

    def run(self, x: torch.Tensor, dy: torch.Tensor) -> float:
        """Tokens a second of one forward and backward, which add to the gradients."""
        x = x.detach().requires_grad_()
        start = time.perf_counter()
        self.forward(x).backward(dy)
        return x.shape[1] / (time.perf_counter() - start)


def local(name: str, folder: Path, dtype: torch.dtype) -> Contender:
    mlp = LlamaForCausalLM.from_pretrained(folder, dtype=dtype).get_submodule(MLP)

    def forward(x: torch.Tensor) -> torch.Tensor:
        return mlp(x) if name == "untiled" else tiled(mlp, x, math.ceil(x.shape[1] / HIDDEN))

    return Contender(forward, mlp.zero_grad, lambda: of_local(mlp))


@contextlib.contextmanager
def remote(server: Server, folder: Path, dtype: torch.dtype) -> Iterator[Contender]:
    model, held = shardmlp.from_pretrained(folder, server.target, dtype=dtype)
    with held:
        mlp = model.get_submodule(MLP)
        yield Contender(mlp, model.zero_grad, lambda: of_server(held, server.checkpoints, MLP)[0], server)
