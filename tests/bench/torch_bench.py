"""A remote MLP against PyTorch's own on the same cores: prints lines ``name value``.

torch_DTYPE_over_untiled is tokens a second of forward and backward of one SwiGLU layer ([4096, 2048], I 5632) through a
server on loopback, over the same layer as transformers computes it in PyTorch, untiled; the median over rounds of pairs
that alternate. The server recomputes the forward (11 GEMMs where PyTorch does 9) and sums weight gradients in fp32.
torch_DTYPE_stash_over_untiled is the same for a server with room to keep what backward needs (--stash-bytes), which then
does 9 GEMMs too. torch_DTYPE_sent_bytes_per_token are a forward's and backward's activations to the server.
torch_DTYPE_NAME_mib are peak resident memories of processes that do nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # a team that spins would take the server's cores

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

import shardmlp

logging.disable_progress_bar()

HIDDEN, INTERMEDIATE = 2048, 5632
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


def make_model(folder: Path, dtype: torch.dtype) -> None:
    """One layer of the size in question, and little else."""
    config = LlamaConfig(
        vocab_size=8,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        num_hidden_layers=1,
        num_attention_heads=16,
        num_key_value_heads=1,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(dtype).save_pretrained(folder)


def load(folder: Path, dtype: torch.dtype) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)


@contextlib.contextmanager
def server(folder: Path, dtype: str, *flags: str):
    """The server's process, its address and that of its metrics."""
    target, metrics = (f"127.0.0.1:{free_port()}" for _ in range(2))
    program = [os.environ["SHARDMLP_SERVER"], f"--model={folder}", f"--listen={target}", f"--dtype={dtype}", *flags]
    process = subprocess.Popen([*program, f"--metrics-address={metrics}"], stdout=subprocess.DEVNULL)
    try:
        yield process, target, metrics
    finally:
        process.terminate()
        process.wait(timeout=60)


def received_bytes(metrics: str) -> float:
    """Activations that the server got so far."""
    with urllib.request.urlopen(f"http://{metrics}/metrics") as answer:
        text = answer.read().decode()
    return float(re.search(r'shardmlp_payload_bytes_total{direction="received"} (\S+)', text)[1])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def peak_mib(process: int | str) -> float:
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("no VmHWM")


def run(mlp: torch.nn.Module, x: torch.Tensor, dy: torch.Tensor) -> float:
    """Tokens a second of one forward and backward."""
    start = time.perf_counter()
    mlp(x).backward(dy)
    seconds = time.perf_counter() - start
    x.grad = None
    return x.shape[0] / seconds


def operands(tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(tokens, HIDDEN, generator=generator).to(dtype) for _ in range(2))
    return x.requires_grad_(), dy


def measure_speed(name: str, rounds: int, tokens: int) -> None:
    dtype = DTYPES[name]
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), dtype)
        x, dy = operands(tokens, dtype)
        local = load(Path(scratch), dtype).model.layers[0].mlp
        with contextlib.ExitStack() as stack:
            remotes = {}
            for kind, stash in {"": "0", "_stash": "2GiB"}.items():
                _, target, metrics = stack.enter_context(server(Path(scratch), name, f"--stash-bytes={stash}"))
                model = load(Path(scratch), dtype)
                stack.enter_context(shardmlp.offload(model, target))
                remotes[kind] = model
                before = received_bytes(metrics)
                run(local, x, dy), run(model.model.layers[0].mlp, x, dy)
                print(f"torch_{name}{kind}_sent_bytes_per_token {(received_bytes(metrics) - before) / tokens:.0f}")
            ratios, rates, references = ({kind: [] for kind in remotes} for _ in range(3))
            for _ in range(rounds):
                for kind, model in remotes.items():
                    # The machine drifts: the reference before and after stand for the time in between.
                    before = run(local, x, dy)
                    rates[kind].append(run(model.model.layers[0].mlp, x, dy))
                    references[kind].append((before + run(local, x, dy)) / 2)
                    ratios[kind].append(rates[kind][-1] / references[kind][-1])
                    local.zero_grad()
                    model.zero_grad()
    for kind in remotes:
        print(f"torch_{name}{kind}_over_untiled {statistics.median(ratios[kind]):.3f}")
        print(f"torch_{name}{kind}_remote_tokens_per_second {statistics.median(rates[kind]):.1f}")
    untiled = statistics.median(references[""])
    print(f"torch_{name}_untiled_tokens_per_second {untiled:.1f}")
    flops = 9 * 2 * HIDDEN * INTERMEDIATE * untiled
    print(f"torch_{name}_untiled_gflops {flops / 1e9:.1f}", flush=True)


def measure_memory(name: str, tokens: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        make_model(Path(scratch), DTYPES[name])
        child = [sys.executable, __file__, "--tokens", str(tokens), "--dtype", name, "--model", scratch, "--child"]
        local = subprocess.run([*child, "local"], check=True, capture_output=True, text=True).stdout
        with server(Path(scratch), name) as (process, target, _):
            remote = subprocess.run([*child, target], check=True, capture_output=True, text=True).stdout
            print(f"torch_{name}_server_mib {peak_mib(process.pid):.0f}")
    print(f"torch_{name}_remote_trainer_mib {float(remote):.0f}")
    print(f"torch_{name}_untiled_trainer_mib {float(local):.0f}", flush=True)


def child(target: str, folder: Path, name: str, tokens: int) -> None:
    """Prints the peak memory of this process, which trains once: locally, or through ``target``."""
    model = load(folder, DTYPES[name])
    x, dy = operands(tokens, DTYPES[name])
    with contextlib.nullcontext() if target == "local" else shardmlp.offload(model, target):
        run(model.model.layers[0].mlp, x, dy)
    print(peak_mib("self"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--dtype", choices=DTYPES, action="append")
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(arguments.child, arguments.model, arguments.dtype[0], arguments.tokens)
    for name in arguments.dtype or DTYPES:
        measure_speed(name, arguments.rounds, arguments.tokens)
        measure_memory(name, arguments.tokens)


if __name__ == "__main__":
    main()
