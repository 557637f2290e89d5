"""Replicas under random faults, a few of each kind; scripts/chaos has the long form. And on hosts of their own, with a
link that is cut or slow."""

from __future__ import annotations

import contextlib
import tempfile
import threading
from pathlib import Path

import pytest
import torch
from chaos import KINDS, NETWORKS, play
from networks import Namespaces
from replica_run import Replicas, Trainer, equal, final_weights, together
from waiting import until

import shardmlp


@pytest.fixture
def scratch():
    """A folder whose path is short enough for a socket's. The servers' logs in it are shown where the test failed."""
    with tempfile.TemporaryDirectory(prefix="shardmlp-") as scratch:
        yield Path(scratch)
        for log in sorted(Path(scratch).rglob("log")):
            print(f"== {log.parent.relative_to(scratch)}\n{log.read_text()}")


@pytest.fixture
def replicas(folder, scratch):
    """replicas(count, *flags) -> as many, each in a network namespace of its own."""
    if refusal := Namespaces.refusal():
        pytest.skip(refusal)
    with contextlib.ExitStack() as made:

        def start(count: int, *flags: str) -> Replicas:
            network = made.enter_context(contextlib.closing(Namespaces(count)))
            own = scratch / str(len(list(scratch.iterdir())))
            return made.enter_context(contextlib.closing(Replicas(folder("llama"), network, own, *flags)))

        yield start


def trainers_of(folder, replicas: Replicas) -> list[Trainer]:
    count = replicas.network.count
    return [Trainer(folder("llama"), link.address, rank, count) for rank, link in enumerate(replicas.links)]


def train(trainers: list[Trainer], steps: int) -> dict[str, torch.Tensor]:
    """Until each has done ``steps``."""
    while trainers[0].done < steps:
        together(*(trainer.step for trainer in trainers))
    return final_weights(trainers)


@pytest.mark.parametrize("network, seed", [("loopback", 1), ("namespaces", 2)])
def test_training_among_faults_ends_as_if_there_had_been_none(folder, scratch, network, seed):
    if network == "namespaces" and (refusal := Namespaces.refusal()):
        pytest.skip(refusal)
    outcomes, same = play(NETWORKS[network], 3, len(KINDS), seed, folder("llama"), scratch, print)
    assert [outcome.errors for outcome in outcomes] == [[]] * len(KINDS)
    assert same


def test_cut_link_aborts_the_survivors_and_mended_the_replica_joins_again(folder, replicas):
    expected = train(trainers_of(folder, replicas(3)), 3)
    disturbed = replicas(3)
    trainers = trainers_of(folder, disturbed)
    together(*(trainer.step for trainer in trainers))
    for trainer in trainers:
        trainer.begin()
    disturbed.network.cut(2)
    for trainer in trainers[:2]:
        # Before the link is mended, and long before --seal-timeout.
        with pytest.raises(shardmlp.StepAborted, match="rank 2 was lost: nothing was heard from it for 1s"):
            trainer.end()
    disturbed.network.mend(2)
    assert equal(train(trainers, 3), expected)
    assert disturbed.see(2).replica.member_count == 3
    assert disturbed.see(2).replica.generation == disturbed.see(0).replica.generation > 1


def test_slow_link_loses_nobody(folder, replicas):
    expected = train(trainers_of(folder, replicas(2)), 2)
    slow = replicas(2, "--replica-timeout=10s", "--sum-timeout=20s")
    slow.network.slow(1)
    trainers = trainers_of(folder, slow)
    assert equal(train(trainers, 2), expected)
    assert [trainer.aborted for trainer in trainers] == [0, 0]
    assert slow.see(1).replica.generation == 1


@pytest.mark.parametrize("cut", [0, 2])
def test_of_two_halves_the_one_with_rank_0_commits_and_the_other_follows(folder, replicas, cut):
    halves = replicas(3, "--on-loss=continue", "--seal-timeout=2s", "--lease=2s")
    halves.network.cut(cut)
    here = Trainer(folder("llama"), halves.links[0].address, 0, 1)
    there = Trainer(
        folder("llama"),
        halves.links[2 if cut == 2 else 1].address,
        0,
        1,
        shardmlp.Timeouts(connect=20, stall=20, seal=20, retry=4),
    )
    refused: list[shardmlp.Error] = []

    def step() -> None:
        """Nothing comes of it, in whatever part of it the cut is noticed."""
        try:
            there.begin()
            there.end()
        except shardmlp.StepAborted:
            pass
        except shardmlp.Error as error:
            if error.reason != "TRAINER_MISSING":  # the seal's time was over before the cut was noticed
                refused.append(error)

    while not refused:
        stepping = threading.Thread(target=step)
        stepping.start()
        while here.done < 2:
            here.step()
        stepping.join()
        assert there.done == 0
    assert refused[0].reason == "UNREACHABLE" and refused[0].metadata["last"] == "REPLICA_MISSING"
    halves.network.mend(cut)
    until(lambda: [halves.see(rank).replica.member_count for rank in range(3)] == [3, 3, 3])
    until(lambda: [halves.see(rank).position.step for rank in range(3)] == [2, 2, 2])
    assert len({str(halves.checksums(rank)) for rank in range(3)}) == 1
    there.remote.close()
    here.remote.close()
