"""Servers under load: two replicas of a small model, and a trainer at each, which steps, discards, and fails."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import threading
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import shardmlp

REPLICAS = 2
TOKENS = 256  # of a batch
VOCABULARY = 128
STEPS_A_ROUND = 12  # of which one has a NaN, and another is discarded


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return free.getsockname()[1]


class Servers:
    """Replicas of a model that is made in ``scratch``."""

    def __init__(self, scratch: Path) -> None:
        self.model = scratch / "model"
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=TOKENS,
        )
        LlamaForCausalLM(config).save_pretrained(self.model)
        coordinator = f"--coordinator=127.0.0.1:{free_port()}"
        self._logs = [scratch / f"server-{rank}" for rank in range(REPLICAS)]
        self._processes = [self._start(rank, scratch, coordinator) for rank in range(REPLICAS)]

    def _start(self, rank: int, scratch: Path, coordinator: str) -> subprocess.Popen:
        command = [
            os.environ["SHARDMLP_SERVER"],
            f"--model={self.model}",
            "--listen=127.0.0.1:0",
            "--metrics-address=127.0.0.1:0",
            f"--checkpoint-dir={scratch}/checkpoints-{rank}",
            f"--replicas={REPLICAS}",
            f"--rank={rank}",
            coordinator,
            "--workspace-bytes=2MiB",
            "--stash-bytes=1MiB",
            "--max-calls=2",
            "--threads=1",
        ]
        with open(self._logs[rank], "wb") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def addresses(self, pattern: str) -> list[str]:
        """What each server's log says, once all say it."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            found = [re.findall(pattern, log.read_text()) for log in self._logs]
            if all(found):
                return [each[-1] for each in found]
            time.sleep(0.05)
        raise TimeoutError("\n".join(log.read_text() for log in self._logs))

    @property
    def metrics(self) -> list[str]:
        return self.addresses(r"metrics on http://(\S+)/metrics")

    @property
    def targets(self) -> list[str]:
        return self.addresses(r"serving on (\S+)")

    def kill(self, rank: int) -> None:
        """As power loss does."""
        self._processes[rank].kill()

    def stop(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(timeout=60)


class Load:
    """Trains until it is stopped."""

    def __init__(self, servers: Servers) -> None:
        self._targets = servers.targets
        self._stop = threading.Event()
        self._round = threading.Barrier(REPLICAS)
        self.rounds = 0
        self._raised: list[BaseException] = []
        models = [LlamaForCausalLM.from_pretrained(servers.model, dtype=torch.float32) for _ in range(REPLICAS)]
        self._threads = [
            threading.Thread(target=self._guard, args=(rank, model), daemon=True) for rank, model in enumerate(models)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, seconds: float) -> None:
        """At least as long, and at least two rounds. Raises what a thread of it raised."""
        end = time.monotonic() + seconds
        while not self._raised and (time.monotonic() < end or self.rounds < 2):
            time.sleep(0.05)
        if self._raised:
            raise self._raised[0]

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=60)

    def _guard(self, rank: int, model: LlamaForCausalLM) -> None:
        try:
            self._train(rank, model)
        except BaseException as error:
            self._raised.append(error)
            self._round.abort()

    def _train(self, rank: int, model: LlamaForCausalLM) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".mlp." in name)
        with shardmlp.offload(model, self._targets, trainer_count=REPLICAS, trainer_rank=rank) as remote:
            optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
            while self._go_on():
                for step in range(STEPS_A_ROUND):
                    with contextlib.suppress(shardmlp.StepAborted):
                        self._step(model, optimizer, step)
                with contextlib.suppress(shardmlp.Error):
                    remote.delete_checkpoint("nowhere")
                if rank == 0:
                    self.rounds += 1

    def _go_on(self) -> bool:
        """The same on all trainers: a step waits for all of them."""
        stopping = self._stop.is_set()
        if self._round.wait(timeout=60) == 0:
            self._going = not stopping
        self._round.wait(timeout=60)
        return self._going

    @staticmethod
    def _step(model, optimizer, step: int) -> None:
        optimizer.zero_grad()
        tokens = torch.randint(VOCABULARY, (1, TOKENS))
        loss = model(input_ids=tokens, labels=tokens).loss
        scale = float("nan") if step == 3 else 1.0
        (loss * scale).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not norm.isfinite() or step == 7:
            return  # the next zero_grad discards
        optimizer.step()
