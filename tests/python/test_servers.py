"""One model on several servers, each with layers of its own: a step is one on all of them."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of, relative

import shardmlp
from conftest import QUICK


class Pair:
    """A model on two servers and, local, its twin."""

    def __init__(self, folder, serve, frozen=(), **options):
        self.servers = [serve(folder("llama"), "--layers=0"), serve(folder("llama"), "--layers=1-2")]
        self.model, self.local = load_model(folder("llama")), load_model(folder("llama"))
        for model in (self.model, self.local):
            for layer in frozen:
                model.model.layers[layer].mlp.requires_grad_(False)
        targets = [server.target for server in self.servers]
        self.remote = shardmlp.offload(self.model, targets, **{"timeouts": QUICK, **options})
        self.mine = self.remote.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4))
        self.theirs = torch.optim.AdamW(self.local.parameters(), lr=1e-3, eps=1e-4)

    def backward(self, seed, who=("mine", "theirs")):
        norms = []
        for model, optimizer in ((self.model, "mine"), (self.local, "theirs")):
            if optimizer in who:
                loss_of(model, seed).backward()
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        return norms

    def step(self, seed):
        norms = self.backward(seed)
        for optimizer in (self.mine, self.theirs):
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)

    def difference(self):
        state = self.remote.state_dict()
        return max(relative(state[name], weights) for name, weights in self.local.state_dict().items())


@pytest.fixture
def pair(folder, serve):
    pair = Pair(folder, serve)
    yield pair
    pair.remote.close()


def test_training_is_that_of_a_local_model(pair):
    for seed in range(4):
        pair.step(seed)
    assert pair.difference() < 1e-4
    assert pair.remote.step == 4
    assert ", ".join(server.target for server in pair.servers) in pair.remote.report()
    assert pair.remote.memory_plan.weights_bytes == 3 * 3 * 48 * 80 * 4


def test_trainer_that_trains_on_one_of_them(folder, serve):
    pair = Pair(folder, serve, frozen=[1, 2])
    for seed in range(3):
        pair.step(seed)
    assert pair.difference() < 1e-4
    pair.remote.close()


def test_layers_that_two_have_are_refused(folder, serve):
    targets = [serve(folder("llama"), "--layers=0-1").target, serve(folder("llama"), "--layers=1-2").target]
    with pytest.raises(ValueError, match="both serve model.layers.1.mlp"):
        shardmlp.offload(load_model(folder("llama")), targets)


def test_attempt_that_one_of_them_ends_is_over_on_both(pair):
    loss_of(pair.model, 7).backward()
    client = pair.remote._servers.connections[1].client
    client.save_checkpoint("now")
    client.restore_checkpoint("now")
    with pytest.raises(shardmlp.StepAborted):
        pair.mine.step()
    assert pair.remote._servers.pending_row_count == 0
    for seed in range(2):
        pair.step(seed)
    assert pair.difference() < 1e-4


def test_gradients_that_are_not_finite_on_one_are_committed_on_none(pair):
    loss_of(pair.model, 7).backward()
    (pair.model.model.layers[2].mlp(torch.ones(1, 48)) * float("nan")).sum().backward()
    with pytest.raises(shardmlp.Error) as failure:
        pair.mine.step()
    assert failure.value.reason == "NON_FINITE"
    pair.mine.zero_grad()
    pair.step(1)
    assert pair.difference() < 1e-4


def test_server_that_dies_between_the_commits(folder, serve):
    """The step is then half done: it can be neither discarded nor passed over, and all go back to the common
    checkpoint."""
    pair = Pair(folder, serve, timeouts=shardmlp.Timeouts(connect=20, retry=2))
    pair.remote.save_checkpoint("start")
    assert [c.name for c in pair.remote.checkpoints()] == ["start"]
    pair.backward(7, ["mine"])
    pair.servers[1].kill()
    with pytest.raises(shardmlp.Error, match=r"committed on .* and not on .*step\(\) again .*remote.restore\(\)"):
        pair.mine.step()
    with pytest.raises(shardmlp.Error, match="can't be discarded"):
        pair.mine.zero_grad()
    pair.servers[1].start()
    pair.servers[1].await_serving()
    with pytest.raises(shardmlp.Error, match="at step 0.*; take all back to one checkpoint"):
        pair.mine.step()
    pair.remote.restore("start")
    pair.model.load_state_dict(pair.local.state_dict())
    for seed in range(3):
        pair.step(seed)
    assert pair.difference() < 1e-4
    pair.remote.close()


def test_commit_that_failed_for_a_while_is_done_where_it_was_not(folder, serve):
    pair = Pair(folder, serve, timeouts=shardmlp.Timeouts(connect=2, stall=1, seal=1, retry=1))
    pair.backward(1)
    pair.servers[1].freeze()
    with pytest.raises(shardmlp.Error, match="committed on"):
        pair.mine.step()
    pair.servers[1].thaw()
    for optimizer in (pair.mine, pair.theirs):
        optimizer.step()
        optimizer.zero_grad()
    pair.step(2)
    assert pair.difference() < 1e-4
    assert pair.remote.step == 2
    pair.remote.close()
