"""Memory of each contender's trainer, a process that does nothing else, and of its server.

As a program it is that trainer:
    torch_memory.py train_once NAME FOLDER DTYPE TOKENS [TARGET]   runs the MLP forward and backward; prints its peak
                                                                   memory in MiB, less what it had before the model
    torch_memory.py hold FOLDER DTYPE TOKENS TARGET KEEP_INPUTS    runs all layers forward, each a norm, an MLP and a
                                                                   sum; prints the bytes a token and layer that it then
                                                                   holds for the backward
"""

from __future__ import annotations

import contextlib
import resource
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from torch_mlps import DTYPES, REMOTE, Server, flags_of, local, make_model, operands, remote, serve, stash_for

import shardmlp


@dataclass
class Peaks:
    """MiB. The server's is all that it has, its weights, gradients and the optimizer's state included."""

    trainer: float
    server: float | None


def measure(name: str, dtype: str, tokens: int) -> Peaks | None:
    """None: the machine's memory did not do."""
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder, server, target = Path(scratch), None, []
        make_model(folder, DTYPES[dtype])
        if name in REMOTE:
            server = stack.enter_context(serve(folder, dtype, *flags_of(name, tokens, DTYPES[dtype])))
            target = [server.target]
        command = [sys.executable, __file__, "train_once", name, scratch, dtype, str(tokens), *target]
        child = subprocess.run(command, capture_output=True, text=True)
        if child.returncode == 0:
            return Peaks(float(child.stdout.split()[-1]), server and status_mib(server.process.pid, "VmHWM"))
        if "allocate memory" in child.stderr or "bad_alloc" in child.stderr or child.returncode == -9:
            return None
        raise RuntimeError(child.stderr)


def measure_held(dtype: str, tokens: int, layers: int = 4) -> dict[bool, float]:
    """Bytes a token and layer that a trainer holds between forward and backward, by keep_inputs."""
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), DTYPES[dtype], layers)
        held = {}
        for keeps in (True, False):
            with serve(Path(scratch), dtype, stash_for(layers * tokens, DTYPES[dtype])) as server:
                command = [sys.executable, __file__, "hold", scratch, dtype, str(tokens), server.target, str(keeps)]
                child = subprocess.run(command, capture_output=True, text=True)
                if child.returncode != 0:
                    raise RuntimeError(child.stderr)
                held[keeps] = float(child.stdout.split()[-1])
        return held


def status_mib(process: int | str, line: str) -> float:
    status = Path(f"/proc/{process}/status").read_text()
    return int(status.partition(f"{line}:")[2].split()[0]) / 1024


def available_bytes() -> int:
    return int(Path("/proc/meminfo").read_text().partition("MemAvailable:")[2].split()[0]) * 1024


def train_once(name: str, folder: str, dtype: str, tokens: str, target: str = "") -> None:
    # Rather than that the machine ends whatever process it likes.
    resource.setrlimit(resource.RLIMIT_DATA, (available_bytes(), resource.RLIM_INFINITY))
    before = status_mib("self", "VmRSS")
    x, dy = operands(int(tokens), DTYPES[dtype])
    with contextlib.ExitStack() as stack:
        if target:
            server = Server(None, target, "", Path())
            contender = stack.enter_context(remote(server, Path(folder), DTYPES[dtype]))
        else:
            contender = local(name, Path(folder), DTYPES[dtype])
        Path("/proc/self/clear_refs").write_text("5")  # the peak so far, of loading, does not count
        contender.run(x, dy)
        print(status_mib("self", "VmHWM") - before)


def hold(folder: str, dtype: str, tokens: str, target: str, keep_inputs: str) -> None:
    x, _ = operands(int(tokens), DTYPES[dtype])
    x.requires_grad_()
    options = dict(dtype=DTYPES[dtype], keep_inputs=keep_inputs == "True")
    model, remote = shardmlp.from_pretrained(folder, target, **options)
    with remote:
        before = status_mib("self", "VmRSS")
        for layer in model.model.layers:
            x = x + layer.mlp(layer.post_attention_layernorm(x))
        held = status_mib("self", "VmRSS") - before
        print(held * 2**20 / int(tokens) / len(model.model.layers))


if __name__ == "__main__":
    {"train_once": train_once, "hold": hold}[sys.argv[1]](*sys.argv[2:])
