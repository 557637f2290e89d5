"""Replicas: servers of the same layers, and trainers that each have one of them."""

from __future__ import annotations

import socket
import threading

import pytest
import safetensors.torch
import torch
from cutting_proxy import CuttingProxy
from links import connect
from models import load_model, loss_of
from networks import free_port
from replica_run import together
from waiting import until
from weight_gradients import difference

import shardmlp
from shardmlp.connection import Connection

STEPS = 3
# No renewal of a lease comes between the messages of a step.
QUICK = ("--replica-heartbeat=100ms", "--replica-timeout=2s", "--lease=5m", "--threads=1")


def start(folder, serve, count: int, *more: str) -> list:
    """As many servers that are replicas of each other."""
    set_of = (f"--replicas={count}", f"--coordinator=127.0.0.1:{free_port()}", *more)
    flags = [(*QUICK, *set_of, f"--rank={rank}") for rank in range(count)] if count > 1 else [QUICK]
    servers = [serve(folder("llama"), *own) for own in flags]
    for server in servers:
        server.await_serving()
    return servers


@pytest.fixture
def pair(folder, serve):
    return start(folder, serve, 2)


def start_anew(servers) -> None:
    """From the model's own weights."""
    for server in servers:
        server.stop()
    for server in servers:
        server.log.write_text("")
        server.start()
    for server in servers:
        server.await_serving()


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


def train(
    trainers, meanwhile=lambda step, rank: None, before=lambda step: None
) -> dict[str, torch.Tensor]:
    for step in range(STEPS):
        before(step)
        together(*(lambda t=t: t.step(step, lambda: meanwhile(step, t.rank)) for t in trainers))
    assert [trainer.remote.step for trainer in trainers] == [STEPS, STEPS]
    states = [trainer.remote.state_dict() for trainer in trainers]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    for trainer in trainers:
        trainer.remote.close()
    return states[0]


def test_two_replicas_are_one_server_that_saw_the_whole_batch(folder, serve, pair):
    trainers = [Trainer(folder, pair, rank) for rank in range(2)]
    assert [trainer.remote._servers.connections[0].target for trainer in trainers] == [s.target for s in pair]
    assert [t.remote._servers.connections[0].model.replica.rank for t in trainers] == [0, 1]
    expect_as_one_server(train(trainers), folder, serve)


def expect_as_one_server(got: dict[str, torch.Tensor], folder, serve) -> None:
    """Whose only trainer saw the batches of both."""
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


@pytest.fixture
def going_on(folder, serve):
    """A pair of which one goes on without the other."""
    return start(folder, serve, 2, "--on-loss=continue")


@pytest.mark.parametrize("phase", ["between steps", "before the seal", "as the other seals"])
def test_trainer_of_a_replica_that_is_lost_for_good_goes_on_at_another(folder, serve, going_on, phase):
    trainers = [Trainer(folder, going_on, rank) for rank in range(2)]
    seals = threading.Event()

    def before(step: int) -> None:
        if step == 1 and phase == "between steps":
            going_on[1].kill()

    def meanwhile(step: int, rank: int) -> None:
        if (step, rank) == (1, 0):
            seals.set()
        if (step, rank) == (1, 1) and phase != "between steps":
            assert phase == "before the seal" or seals.wait(30)
            going_on[1].kill()

    got = train(trainers, meanwhile, before)
    assert trainers[1].redone >= 1
    assert [t.remote._servers.connections[0].target for t in trainers] == [going_on[0].target] * 2
    expect_as_one_server(got, folder, serve)


@pytest.mark.parametrize("call, message", [("seal", 1), ("commit", 3)])
def test_trainer_that_moves_asks_there_for_the_answer_that_died_with_its_replica(folder, serve, going_on, call, message):
    proxy = CuttingProxy(lambda: connect(going_on[1].target))
    trainers = [Trainer(folder, [going_on[0], proxy], rank) for rank in range(2)]

    def first() -> None:
        trainers[0].step(1)
        going_on[1].kill()
        proxy.drop()

    together(*(lambda t=t: t.step(0) for t in trainers))
    together(first, lambda: trainers[1].step(1, lambda: proxy.hold_at(message, answers=True)))
    together(*(lambda t=t: t.step(2) for t in trainers))
    assert [(trainer.redone, trainer.remote.step) for trainer in trainers] == [(0, 3), (0, 3)]
    expect_as_one_server(trainers[1].remote.state_dict(), folder, serve)
    for trainer in trainers:
        trainer.remote.close()
    proxy.close()


def test_trainer_that_moves_finds_its_weights_or_says_so(folder, going_on):
    trainers = [Trainer(folder, going_on, rank) for rank in range(2)]
    together(*(lambda t=t: t.step(0) for t in trainers))
    server = Connection(going_on[0].target, 1, shardmlp.Timeouts())
    server.client.save_checkpoint("one")
    going_on[1].kill()
    server.client.restore_checkpoint("one")
    with pytest.raises(shardmlp.Error, match=r"is lost, and its replica .* weights version") as raised:
        trainers[1].step(1)
    assert raised.value.reason == "STALE_ATTEMPT"
    for trainer in trainers:
        trainer.remote.close()


def test_replica_that_is_killed_in_mid_step_comes_back_and_nothing_is_lost(folder, pair):
    first = [Trainer(folder, pair, rank) for rank in range(2)]
    expected = train(first)
    start_anew(pair)

    trainers = [Trainer(folder, pair, rank) for rank in range(2)]

    def kill(step: int, rank: int) -> None:
        if (step, rank) == (1, 1):
            pair[1].kill()
            pair[1].start()

    got = train(trainers, kill)
    assert trainers[0].redone == 1 and trainers[1].redone >= 1
    assert all(torch.equal(got[name], weights) for name, weights in expected.items())


@pytest.mark.parametrize("call, message", [("seal", 1), ("commit", 3)])
def test_answer_that_died_with_its_replica_is_asked_for_again(folder, pair, call, message):
    """All have committed the step. The trainer whose replica is gone has not heard so, and does it no second time."""
    expected = train([Trainer(folder, pair, rank) for rank in range(2)])
    start_anew(pair)
    proxy = CuttingProxy(lambda: connect(pair[1].target))
    trainers = [Trainer(folder, [pair[0], proxy], rank) for rank in range(2)]

    def first() -> None:
        trainers[0].step(1)
        pair[1].kill()
        pair[1].start()
        pair[1].await_serving(2)
        proxy.drop()

    together(*(lambda t=t: t.step(0) for t in trainers))
    together(first, lambda: trainers[1].step(1, lambda: proxy.hold_at(message, answers=True)))
    together(*(lambda t=t: t.step(2) for t in trainers))
    assert [(trainer.redone, trainer.remote.step) for trainer in trainers] == [(0, 3), (0, 3)]
    state = trainers[1].remote.state_dict()
    assert all(torch.equal(state[name], weights) for name, weights in expected.items())
    for trainer in trainers:
        trainer.remote.close()
    proxy.close()


class Summing:
    """A trainer of a run in which gradients are added, on batches of some lengths, perhaps none."""

    def __init__(self, folder, servers, rank: int, count: int, lengths: list[int]) -> None:
        self._lengths = lengths
        self._model = load_model(folder("llama"))
        for name, p in self._model.named_parameters():
            p.requires_grad_(".mlp." in name)
        targets = [server.target for server in servers]
        self.remote = shardmlp.offload(
            self._model, targets, trainer_count=count, trainer_rank=rank, average=False
        )
        self._optimizer = self.remote.wrap(torch.optim.SGD(self._model.parameters(), lr=0.1, momentum=0.9))

    def step(self) -> None:
        for length in self._lengths:
            if length:
                (loss_of(self._model, length, length=length) * length).backward()
        self._optimizer.step()


def gradients_of(folder, servers, batches: list[list[int]]) -> dict[str, torch.Tensor]:
    """Of one step from the model's own weights, of a trainer for each of ``batches``. All servers then have the same
    weights, and go back."""
    clients = [Connection(server.target, 1, shardmlp.Timeouts()) for server in servers]
    if not clients[0].client.list_checkpoints():
        clients[0].client.save_checkpoint("start")
    before = clients[0].checksums()
    trainers = [Summing(folder, servers, rank, len(batches), lengths) for rank, lengths in enumerate(batches)]
    together(*(trainer.step for trainer in trainers))
    name = f"after{len(batches)}"
    clients[0].client.save_checkpoint(name)
    after = clients[0].checksums()
    assert after != before
    until(lambda: all(client.checksums() == after for client in clients))
    for trainer in trainers:
        trainer.remote.close()
    clients[0].client.restore_checkpoint("start")
    until(lambda: all(client.checksums() == before for client in clients))
    # A momentum that has just begun is the gradient.
    state = safetensors.torch.load_file(servers[0].checkpoints / name / "optimizer.safetensors")
    return {tensor: moment for tensor, moment in state.items() if tensor.endswith(".moment1")}


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_any_number_of_trainers_of_any_number_of_replicas(folder, serve, count):
    replicas, alone = start(folder, serve, count), [serve(folder("llama"))]
    alone[0].await_serving()
    lengths = [9, 0, 4, 2, 6]
    for trainers in range(1, len(lengths) + 1):
        whole = gradients_of(folder, alone, [lengths[:trainers]])
        apart = gradients_of(folder, replicas, [[length] for length in lengths[:trainers]])
        assert whole.keys() == apart.keys() and len(whole) == 9
        assert difference(apart, whole) <= 1e-5


def test_servers_of_the_same_layers_that_are_no_replicas_are_refused(folder, serve, pair):
    alone = serve(folder("llama"))
    with pytest.raises(ValueError, match=r"not replicas of each other: .*replica 0 of 2.*, .*replica 0 of 1"):
        shardmlp.offload(load_model(folder("llama")), [pair[0].target, alone.target])
    with pytest.raises(ValueError, match=r"not replicas of each other"):
        shardmlp.offload(load_model(folder("llama")), [pair[0].target, pair[0].target])


def test_replica_of_another_model_is_refused_and_named(folder, serve):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    serve(folder("llama"), *QUICK, coordinator, "--replicas=2", "--rank=0")
    other = serve(folder("gpt2"), *QUICK, coordinator, "--replicas=2", "--rank=1")
    assert other.wait() == 1
    assert "llama" in other.log.read_text() and "gpt2" in other.log.read_text()


def test_server_is_not_ready_until_its_replicas_are_there(folder, serve):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    first = serve(folder("llama"), *QUICK, coordinator, "--replicas=2", "--replica-start-timeout=3s", "--rank=0")
    assert first.wait() == 1
    assert "serving on" not in first.log.read_text()
    assert "rank 1" in first.log.read_text()


@pytest.mark.parametrize("lost", [False, True])
def test_layer_ranges_that_are_replicated_each_are_one_server(folder, serve, lost):
    ranges = [start(folder, serve, 2, "--on-loss=continue", f"--layers={layers}") for layers in ("0", "1-2")]
    trainers = [Trainer(folder, [*ranges[0], *ranges[1]], rank) for rank in range(2)]
    assert [[c.target for c in t.remote._servers.connections] for t in trainers] == [
        [servers[rank].target for servers in ranges] for rank in range(2)
    ]

    def meanwhile(step: int, rank: int) -> None:
        if lost and (step, rank) == (1, 1):
            ranges[1][1].kill()

    got = train(trainers, meanwhile)
    assert trainers[1].remote._servers.connections[0].target == ranges[0][1].target
    assert trainers[1].remote._servers.connections[1].target == ranges[1][0 if lost else 1].target
    expect_as_one_server(got, folder, serve)


def test_layer_ranges_of_one_set_of_replicas_are_refused(folder, serve):
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    serve(folder("llama"), *QUICK, coordinator, "--replicas=2", "--rank=0", "--layers=0")
    other = serve(folder("llama"), *QUICK, coordinator, "--replicas=2", "--rank=1", "--layers=1-2")
    assert other.wait() == 1
    assert "layers 1-2, rank 0 has 0-0" in other.log.read_text()


def test_two_servers_of_rank_0_never_both_commit(folder, serve):
    """A cut network, on both sides of which a rank 0 is alive. A step takes all of a run's trainers, and each is on one
    side."""
    times = ("--on-loss=continue", "--lease=2s", "--seal-timeout=3s")
    ports = [free_port(), free_port()]
    leads = [ports[0]]
    proxy = CuttingProxy(lambda: socket.create_connection(("127.0.0.1", leads[-1])))
    flags = (*QUICK, "--replicas=2", *times)
    pair = [
        serve(folder("llama"), *flags, "--rank=0", f"--coordinator=127.0.0.1:{ports[0]}"),
        serve(folder("llama"), *flags, "--rank=1", f"--coordinator={proxy.target}"),
    ]
    for server in pair:
        server.await_serving()
    trainers = [Trainer(folder, pair, rank) for rank in range(2)]
    together(*(lambda t=t: t.step(0) for t in trainers))

    leads.append(ports[1])
    proxy.drop()
    second = serve(folder("llama"), *flags, "--rank=0", f"--coordinator=127.0.0.1:{ports[1]}")
    second.await_serving()
    members = [Connection(server.target, 1, shardmlp.Timeouts()).model.replica.member_ranks for server in (pair[0], pair[1])]
    assert members == [[0], [0, 1]], "both sides go on"

    def waits(trainer: Trainer, other: int) -> None:
        with pytest.raises(shardmlp.Error, match=f"missing: .*rank {other} .not connected") as raised:
            trainer.step(1)
        assert raised.value.reason == "TRAINER_MISSING"

    together(lambda: waits(trainers[0], 1), lambda: waits(trainers[1], 0))
    for server in (*pair, second):
        assert Connection(server.target, 1, shardmlp.Timeouts()).model.position.step == 1
    for trainer in trainers:
        trainer.remote.close()
    proxy.close()
