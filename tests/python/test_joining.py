"""Trainers that join a run late, or again, and those that the others wait for."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of
from test_steps import Trainer, together

import shardmlp


def step_of(trainer, seed):
    trainer.backward(seed)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()


def commit_together(*trainers):
    steps = [lambda t=t, seed=seed: step_of(t, seed) for seed, t in enumerate(trainers)]
    assert together(*steps) == [None] * len(trainers)


def test_trainer_that_joins_a_running_run_again_is_told_to_resume(folder, serve, offload):
    server = serve(folder("llama"))
    first, second = (Trainer(folder, server, offload, rank, 2) for rank in (0, 1))
    commit_together(first, second)
    second.remote.close()
    for _ in range(2):  # it leaves its place when it is refused
        with pytest.raises(shardmlp.Error, match=r"run 'default' is under way, at step 1.*resume=True") as failure:
            Trainer(folder, server, offload, 1, 2)
        assert failure.value.reason == "RUN_CONFLICT"
    model = load_model(folder("llama"))
    remote = offload(model, server, trainer_rank=1, trainer_count=2, resume=True)
    assert remote.step == 1
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.2))

    def step():
        loss_of(model, 3).backward()
        optimizer.step()

    assert together(lambda: step_of(first, 2), step) == [None, None]
    assert first.remote.step == remote.step == 2


def test_trainers_that_begin_anew_on_a_trained_server_open_one_after_another(folder, serve, offload, tmp_path):
    """A run was here before, and left what it has learned, which the new one starts from."""
    server = serve(folder("llama"))
    before = Trainer(folder, server, offload)
    step_of(before, 1)
    before.model.save_pretrained(tmp_path, state_dict=before.remote.state_dict())
    before.remote.close()
    first, second = (Trainer(lambda _: tmp_path, server, offload, rank, 2) for rank in (0, 1))
    assert first.remote.step == 1
    commit_together(first, second)
    assert first.remote.step == 2


@pytest.mark.parametrize("connected", [False, True])
def test_seal_that_was_waited_for_too_long_names_who_is_missing(folder, serve, offload, connected):
    """Here the trainer's own time is the shorter; engine tests have the server's."""
    server = serve(folder("llama"))
    if connected:
        Trainer(folder, server, offload, 1, 2)
    model = load_model(folder("llama"))
    remote = offload(model, server, trainer_count=2, timeouts=shardmlp.Timeouts(seal=1))
    loss_of(model, 1).backward()
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.2))
    missing = "rank 1" if connected else r"rank 1 \(not connected\)"
    expected = f"not every trainer sealed step 0 within 1s; missing: {missing}$"
    with pytest.raises(shardmlp.Error, match=expected) as failure:
        optimizer.step()
    assert failure.value.reason == "TRAINER_MISSING" and failure.value.code == "UNAVAILABLE"
