"""Replicas: servers of the same layers, and trainers that each have one of them."""

from __future__ import annotations

import socket
import threading

import pytest
import torch
from models import load_model, loss_of

import shardmlp

STEPS = 3
QUICK = ("--replicas=2", "--replica-heartbeat=100ms", "--replica-timeout=2s", "--threads=1")


@pytest.fixture
def pair(folder, serve):
    """Two servers that are replicas of each other."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{held.getsockname()[1]}"
    servers = [serve(folder("llama"), *QUICK, coordinator, f"--rank={rank}") for rank in range(2)]
    for server in servers:
        server.await_serving()
    return servers


class Trainer:
    """One of two, on the batches of its own, whose own parameters are frozen: the MLPs alone are trained."""

    def __init__(self, folder, servers, rank: int) -> None:
        self.rank = rank
        self.model = load_model(folder("llama"))
        for name, p in self.model.named_parameters():
            p.requires_grad_(".mlp." in name)
        self.remote = shardmlp.offload(
            self.model, [server.target for server in servers], trainer_count=2, trainer_rank=rank
        )
        self.optimizer = self.remote.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-3))
        self.redone = 0

    def step(self, step: int, meanwhile=lambda: None) -> None:
        """Over again where it's aborted. ``meanwhile``: once, between backward and the commit."""
        while True:
            try:
                self.optimizer.zero_grad()
                loss_of(self.model, 2 * step + self.rank).backward()
                meanwhile()
                self.optimizer.step()
                return
            except shardmlp.StepAborted:
                meanwhile = lambda: None  # noqa: E731
                self.redone += 1


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


def train(trainers, meanwhile=lambda step, rank: None) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        together(*(lambda t=t: t.step(step, lambda: meanwhile(step, t.rank)) for t in trainers))
    assert [trainer.remote.step for trainer in trainers] == [STEPS, STEPS]
    states = [trainer.remote.state_dict() for trainer in trainers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for trainer in trainers:
        trainer.remote.close()
    return states[0]


def undisturbed(folder, servers) -> dict[str, torch.Tensor]:
    return train([Trainer(folder, servers, rank) for rank in range(2)])


def test_two_replicas_are_one_server_that_saw_the_whole_batch(folder, serve, pair):
    trainers = [Trainer(folder, pair, rank) for rank in range(2)]
    assert [trainer.remote._servers.connections[0].target for trainer in trainers] == [s.target for s in pair]
    assert [t.remote._servers.connections[0].model.replica.rank for t in trainers] == [0, 1]
    got = train(trainers)

    model = load_model(folder("llama"))
    for name, p in model.named_parameters():
        p.requires_grad_(".mlp." in name)
    remote = shardmlp.offload(model, serve(folder("llama")).target)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    for step in range(STEPS):
        optimizer.zero_grad()
        ((loss_of(model, 2 * step) + loss_of(model, 2 * step + 1)) / 2).backward()
        optimizer.step()
    whole = remote.state_dict()
    remote.close()
    for name, weights in whole.items():
        torch.testing.assert_close(got[name], weights, rtol=0, atol=2e-5)


def test_replica_that_is_killed_in_mid_step_comes_back_and_nothing_is_lost(folder, pair):
    first = [Trainer(folder, pair, rank) for rank in range(2)]
    expected = train(first)
    for server in pair:
        server.stop()
    for server in pair:
        server.log.write_text("")
        server.start()
    for server in pair:
        server.await_serving()

    trainers = [Trainer(folder, pair, rank) for rank in range(2)]

    def kill(step: int, rank: int) -> None:
        if (step, rank) == (1, 1):
            pair[1].kill()
            pair[1].start()

    got = train(trainers, kill)
    assert trainers[0].redone == 1 and trainers[1].redone >= 1
    assert all(torch.equal(got[name], weights) for name, weights in expected.items())


def test_servers_of_the_same_layers_that_are_no_replicas_are_refused(folder, serve, pair):
    alone = serve(folder("llama"))
    with pytest.raises(ValueError, match=r"not replicas of each other: .*replica 0 of 2.*, .*replica 0 of 1"):
        shardmlp.offload(load_model(folder("llama")), [pair[0].target, alone.target])
    with pytest.raises(ValueError, match=r"not replicas of each other"):
        shardmlp.offload(load_model(folder("llama")), [pair[0].target, pair[0].target])


def test_replica_of_another_model_is_refused_and_named(folder, serve):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{held.getsockname()[1]}"
    serve(folder("llama"), *QUICK, coordinator, "--rank=0")
    other = serve(folder("gpt2"), *QUICK, coordinator, "--rank=1")
    assert other.wait() == 1
    assert "llama" in other.log.read_text() and "gpt2" in other.log.read_text()


def test_server_is_not_ready_until_its_replicas_are_there(folder, serve):
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{held.getsockname()[1]}"
    first = serve(folder("llama"), *QUICK, coordinator, "--replica-start-timeout=3s", "--rank=0")
    assert first.wait() == 1
    assert "serving on" not in first.log.read_text()
    assert "rank 1" in first.log.read_text()
