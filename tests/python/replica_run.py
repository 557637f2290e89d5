"""Replicas as real processes on a network that can fail, and their trainers, who do over a step that is aborted."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from conftest import Server
from links import Link
from models import load_model, loss_of

import shardmlp
from shardmlp.connection import Connection

LOSS = 1.0  # seconds after which a replica that is not heard of is lost
FLAGS = (
    "--on-loss=wait",
    "--replica-heartbeat=100ms",
    f"--replica-timeout={LOSS:g}s",
    "--sum-timeout=3s",
    "--lease=10s",
    "--seal-timeout=20s",
    "--threads=1",
)
TIMEOUTS = shardmlp.Timeouts(connect=20, stall=20, seal=40, retry=30)


class Replicas:
    """A server for each rank of ``network``, and a link of its own to each."""

    def __init__(self, model: Path, network, scratch: Path, *flags: str) -> None:
        self.network = network
        self.servers: list[Server] = []
        for rank in range(network.count):
            own = scratch / str(rank)
            own.mkdir(parents=True)
            all_flags = (*FLAGS, *flags, f"--replicas={network.count}", f"--rank={rank}", *network.flags(rank))
            self.servers.append(Server(model, own, all_flags, network.prefix(rank)))
        self.links = [Link(server.target) for server in self.servers]
        for server in self.servers:
            server.await_serving()

    def see(self, rank: int):
        """What the server says of itself now."""
        return Connection(self.servers[rank].target, 1, TIMEOUTS).model

    def checksums(self, rank: int) -> dict[str, int]:
        """Of its weights, by name."""
        return Connection(self.servers[rank].target, 1, TIMEOUTS).checksums()

    def close(self) -> None:
        for link in self.links:
            link.close()
        for server in self.servers:
            server.terminate()
        for server in self.servers:
            server.wait()


class Trainer:
    """One of ``count``, on batches of its own. Its local parameters are frozen: what is trained is what the replicas
    hold."""

    def __init__(self, model: Path, target: str, rank: int, count: int, timeouts: shardmlp.Timeouts = TIMEOUTS) -> None:
        self.rank, self._count = rank, count
        self._model = load_model(model)
        for name, p in self._model.named_parameters():
            p.requires_grad_(".mlp." in name)
        self.remote = shardmlp.offload(self._model, target, trainer_count=count, trainer_rank=rank, timeouts=timeouts)
        self.optimizer = self.remote.wrap(torch.optim.AdamW(self._model.parameters(), lr=1e-3))
        self.done = 0  # steps that were committed, as this trainer was told
        self.aborted = 0
        self.errors: list[str] = []  # named ones, other than that an attempt was aborted
        self.failure: BaseException | None = None
        self._last: int | None = None  # steps to do; None: not known yet
        self._entered: set[str] = set()  # phases, since somebody waits for one
        self._moved = threading.Condition()

    def begin(self) -> None:
        """The step as far as backward."""
        self.optimizer.zero_grad()
        self._enter("forward")
        loss = loss_of(self._model, self._count * self.done + self.rank, length=5 + self.rank)
        self._enter("backward")
        loss.backward()

    def end(self) -> None:
        """Seals and commits."""
        self._enter("seal")
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._enter("commit")
        self.optimizer.step()
        self.done += 1
        if self.remote.step != self.done:
            raise AssertionError(f"trainer {self.rank} has done {self.done} steps, its server {self.remote.step}")
        self._enter("between")

    def step(self) -> None:
        """Until it is done. A named error is noted, and the step begun anew, as its message says."""
        while True:
            try:
                self.begin()
                return self.end()
            except shardmlp.StepAborted:
                self.aborted += 1
            except shardmlp.Error as error:
                self.errors.append(f"{error.code} {error.reason}: {error}")
                if len(self.errors) > 100:
                    raise

    def start(self) -> None:
        """Does steps on a thread of its own, until finish()."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish_after(self, steps: int) -> None:
        self._last = steps

    def join(self) -> None:
        """Raises what the thread raised."""
        self._thread.join(60 + self._last / 5)
        assert not self._thread.is_alive(), f"trainer {self.rank} hangs after {self.done} of {self._last} steps"
        if self.failure is not None:
            raise self.failure

    def await_phase(self, phase: str, seconds: float) -> None:
        """Until it comes to ``phase`` the next time; no longer than ``seconds``."""
        with self._moved:
            self._entered.clear()
            self._moved.wait_for(lambda: phase in self._entered or self.failure is not None, seconds)

    def _enter(self, phase: str) -> None:
        with self._moved:
            self._entered.add(phase)
            self._moved.notify_all()

    def _run(self) -> None:
        try:
            while self._last is None or self.done < self._last:
                self.step()
        except BaseException as error:  # noqa: BLE001
            self.failure = error
        self._enter("ended")


def together(*calls) -> None:
    """Runs them on threads, and raises what one of them raised."""
    raised: list[BaseException] = []

    def run(call) -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            raised.append(error)

    threads = [threading.Thread(target=run, args=(call,)) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if raised:
        raise raised[0]


def final_weights(trainers: list[Trainer]) -> dict[str, torch.Tensor]:
    """Of all of them, which must be the same to the bit. Closes their sessions."""
    states = [trainer.remote.state_dict() for trainer in trainers]
    for trainer in trainers:
        trainer.remote.close()
    assert all(equal(states[0], state) for state in states), "the replicas' weights differ"
    return states[0]


def equal(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(weights, other[name]) for name, weights in some.items())
