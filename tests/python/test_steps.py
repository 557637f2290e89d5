"""Steps that end early, lost sessions and servers, and several trainers: the batch is run again and nothing is lost."""

from __future__ import annotations

import threading

import pytest
import torch
from models import load_model, loss_of, relative

import shardmlp


class Trainer:
    """One of several trainers of a run. The gradients of a batch are those of its loss over `count`, added up."""

    def __init__(self, folder, server, offload, rank=0, count=1, lr=0.2):
        self.model = load_model(folder("llama"))
        self.remote = offload(self.model, server, trainer_rank=rank, trainer_count=count)
        self.optimizer = self.remote.wrap(torch.optim.SGD(self.model.parameters(), lr=lr))
        self.local = {name: p for name, p in self.model.named_parameters() if p.numel()}

    def backward(self, seed):
        loss = loss_of(self.model, seed)
        loss.backward()
        return loss.item()

    def local_weights(self):
        return {name: p.detach().clone() for name, p in self.local.items()}

    def has_gradients(self):
        return any(p.grad is not None for p in self.local.values())


def together(*calls):
    """Runs the calls at the same time, and returns what each returned or raised."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def average_local(*trainers):
    """What DistributedDataParallel does to the gradients that trainers hold."""
    for name in trainers[0].local:
        grads = [t.local[name].grad for t in trainers]
        mean = torch.stack(grads).mean(0)
        for grad in grads:
            grad.copy_(mean)


def assert_weights_of(trainer, twin, bound=1e-5):
    state = trainer.remote.state_dict()
    assert max(relative(state[name], weights) for name, weights in twin.state_dict().items()) < bound


@pytest.fixture
def pair(folder, serve, offload):
    server = serve(folder("llama"))
    return [Trainer(folder, server, offload, rank, 2) for rank in range(2)]


def step_of_pair(pair, seeds, max_norm=None):
    for trainer, seed in zip(pair, seeds):
        trainer.backward(seed)
    average_local(*pair)
    clips = [lambda t=t: torch.nn.utils.clip_grad_norm_(t.model.parameters(), max_norm).item() for t in pair]
    norms = together(*clips) if max_norm else None
    assert together(*[t.optimizer.step for t in pair]) == [None, None]
    for trainer in pair:
        trainer.optimizer.zero_grad()
    return norms


def step_of_twin(twin, optimizer, seeds, max_norm=None):
    for seed in seeds:
        (loss_of(twin, seed) / len(seeds)).backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), max_norm).item() if max_norm else None
    optimizer.step()
    optimizer.zero_grad()
    return norm


def test_two_trainers_equal_one(folder, pair):
    """They average, the norm is the average's, and neither's waiting holds up the other in one process."""
    twin = load_model(folder("llama"))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
    for seeds in ((1, 2), (3, 4), (5, 6)):
        norms = step_of_pair(pair, seeds, max_norm=0.3)
        expected = step_of_twin(twin, optimizer, seeds, max_norm=0.3)
        assert norms == pytest.approx([expected, expected], rel=1e-5)
    for trainer in pair:
        assert_weights_of(trainer, twin)


def test_trainer_that_saw_no_batch_still_joins(folder, pair):
    first, second = pair
    twin = load_model(folder("llama"))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
    first.backward(1)
    for name, p in second.local.items():
        p.grad = torch.zeros_like(p)
    average_local(*pair)
    assert together(*[t.optimizer.step for t in pair]) == [None, None]
    (loss_of(twin, 1) / 2).backward()
    optimizer.step()
    for trainer in pair:
        assert_weights_of(trainer, twin)


@pytest.mark.parametrize("to_none", [True, False])
def test_trainer_that_saw_no_batch_clips_as_the_others_do(folder, pair, to_none):
    first, second = pair
    twin = load_model(folder("llama"))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.2)
    for seed in range(3):
        first.backward(seed)
        for name, p in second.local.items():
            p.grad = torch.zeros_like(p)
        average_local(*pair)
        clips = [lambda t=t: torch.nn.utils.clip_grad_norm_(t.model.parameters(), 0.1).item() for t in pair]
        norms = together(*clips)
        assert together(*[t.optimizer.step for t in pair]) == [None, None]
        for trainer in pair:
            trainer.optimizer.zero_grad(set_to_none=to_none)
        (loss_of(twin, seed) / 2).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1).item()
        assert norms == pytest.approx([expected, expected], rel=1e-5)
        optimizer.step()
        optimizer.zero_grad()
    for trainer in pair:
        assert_weights_of(trainer, twin)


def test_trainer_that_saw_no_batch_and_dropped_gradients_by_hand_still_joins(folder, pair):
    first, second = pair
    first.backward(1)
    for p in second.model.parameters():
        p.grad = None
    for name, p in second.local.items():
        p.grad = torch.zeros_like(p)
    average_local(*pair)
    assert together(*[t.optimizer.step for t in pair]) == [None, None]
    assert [t.remote.step for t in pair] == [1, 1]


def test_one_trainer_can_not_zero_the_gradients_of_all(pair):
    for trainer in pair:
        trainer.backward(1)
    for p in pair[0].model.parameters():
        p.grad.zero_()
    with pytest.raises(shardmlp.Error, match="were zeroed here and are those of all trainers"):
        pair[0].optimizer.step()


def ended_by_zero_grad(other):
    other.optimizer.zero_grad()


def ended_by_closing(other):
    other.remote.close()


@pytest.mark.parametrize("end", [ended_by_zero_grad, ended_by_closing])
@pytest.mark.parametrize("where", ["backward", "clip", "step"])
def test_step_that_another_trainer_ends_is_run_again(folder, pair, offload, end, where):
    first, second = pair
    before = first.local_weights()
    for trainer, seed in zip(pair, (1, 2)):
        trainer.backward(seed)
    end(second)
    calls = {
        "backward": lambda: first.backward(1),
        "clip": lambda: torch.nn.utils.clip_grad_norm_(first.model.parameters(), 1.0),
        "step": first.optimizer.step,
    }
    with pytest.raises(shardmlp.StepAborted) as failure:
        calls[where]()
    assert failure.value.code == "ABORTED"
    assert not first.has_gradients()
    assert all(torch.equal(before[name], p) for name, p in first.local.items())

    if end is ended_by_closing:
        server = type("Target", (), {"target": first.remote._servers.connections[0].target})
        pair = [first, Trainer(folder, server, offload, 1, 2)]
    step_of_pair(pair, (1, 2))
    twin = load_model(folder("llama"))
    step_of_twin(twin, torch.optim.SGD(twin.parameters(), lr=0.2), (1, 2))
    for trainer in pair:
        assert_weights_of(trainer, twin)


def restored(trainer, folder):
    trainer.remote.restore("start")
    trainer.model.load_state_dict(load_model(folder("llama")).state_dict())


@pytest.mark.parametrize("way_out", ["the others' learning rate", "restore"])
def test_trainer_whose_learning_rate_is_not_the_others(folder, pair, way_out):
    """The first to commit decides. The other is told what differs, and can follow, or all go back."""
    first, second = pair
    first.remote.save_checkpoint("start")
    for trainer in pair:
        trainer.backward(1)
    before = second.local_weights()
    second.optimizer.param_groups[0]["lr"] = 0.3
    results = together(first.optimizer.step, lambda: torch.nn.utils.clip_grad_norm_(second.model.parameters(), 1e6))
    assert results[0] is None
    with pytest.raises(shardmlp.Error, match="has group 0 as sgd.learning_rate 0.3, .* for sgd.learning_rate 0.2,") as e:
        second.optimizer.step()
    assert e.value.reason == "DECISION_CONFLICT"
    with pytest.raises(shardmlp.Error, match="step 0 was committed, .* restore a checkpoint") as e:
        second.optimizer.zero_grad()
    assert all(torch.equal(before[name], p) for name, p in second.local.items())

    twin = load_model(folder("llama"))
    if way_out == "restore":
        for trainer in pair:
            restored(trainer, folder)
        for trainer in pair:
            trainer.backward(1)
    second.optimizer.param_groups[0]["lr"] = 0.2
    assert together(*[t.optimizer.step for t in (pair if way_out == "restore" else [second])])[-1] is None
    step_of_twin(twin, torch.optim.SGD(twin.parameters(), lr=0.2), [1])
    for trainer in pair:
        assert_weights_of(trainer, twin)


def test_each_trainer_restores_and_no_attempt_is_lost(folder, pair):
    first, second = pair
    first.remote.save_checkpoint("start")
    step_of_pair(pair, (1, 2))
    restored(first, folder)
    restored(second, folder)
    attempts = [t.remote._servers.connections[0].session.position.attempt for t in pair]
    assert attempts[0] == attempts[1]
    step_of_pair(pair, (3, 4))
    twin = load_model(folder("llama"))
    step_of_twin(twin, torch.optim.SGD(twin.parameters(), lr=0.2), (3, 4))
    for trainer in pair:
        assert_weights_of(trainer, twin)


def test_second_run_is_refused(folder, pair, offload):
    with pytest.raises(shardmlp.Error) as failure:
        offload(
            load_model(folder("llama")), type("T", (), {"target": pair[0].remote._servers.connections[0].target}), run_id="other"
        )
    assert failure.value.code == "FAILED_PRECONDITION" and failure.value.reason == "RUN_CONFLICT"


def assert_first_step(trainer, folder):
    """A step from the model as it was loaded is the step that it always is."""
    trainer.backward(1)
    trainer.optimizer.step()
    twin = load_model(folder("llama"))
    step_of_twin(twin, torch.optim.SGD(twin.parameters(), lr=0.2), [1])
    assert_weights_of(trainer, twin)


def test_server_that_comes_back_at_the_same_step(folder, serve, offload):
    """Killed in mid-step before any commit: it starts again from its model, and the batch is run again."""
    server = serve(folder("llama"))
    trainer = Trainer(folder, server, offload)
    trainer.backward(1)
    server.kill()
    server.start()
    with pytest.raises(shardmlp.StepAborted):
        trainer.backward(2)
    assert not trainer.has_gradients()
    assert_first_step(trainer, folder)


def test_server_that_comes_back_at_another_step_is_refused_until_restored(folder, serve, offload):
    server = serve(folder("llama"))
    trainer = Trainer(folder, server, offload)
    trainer.remote.save_checkpoint("start")
    trainer.backward(1)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    server.kill()
    server.start()
    for _ in range(2):
        with pytest.raises(shardmlp.Error, match="is at step 0, the trainer at step 1: restore") as failure:
            trainer.backward(2)
        assert not isinstance(failure.value, shardmlp.StepAborted)
    trainer.remote.restore("start")
    trainer.model.load_state_dict(load_model(folder("llama")).state_dict())
    assert_first_step(trainer, folder)


def test_zero_grad_after_a_failed_call_discards_what_the_server_may_have_counted(folder, serve, offload):
    trainer = Trainer(folder, serve(folder("llama")), offload)
    stale = trainer.model.model.layers[1].mlp(torch.randn(3, 48)).sum()
    trainer.backward(2)
    trainer.optimizer.step()
    trainer.optimizer.zero_grad()
    with pytest.raises(shardmlp.Error) as failure:
        stale.backward()
    assert failure.value.reason == "STALE_WEIGHTS"
    session = trainer.remote._servers.connections[0].session
    attempt = session.position.attempt
    trainer.optimizer.zero_grad()
    assert session.position.attempt == attempt + 1
    trainer.optimizer.zero_grad()
    assert session.position.attempt == attempt + 1


def test_dead_server_is_a_clear_error_and_the_local_half_waits(folder, serve, offload):
    """step() fails with nothing updated and gradients kept."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server, timeouts=shardmlp.Timeouts(retry=0.3))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.2))
    loss_of(model, 1).backward()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    server.kill()
    with pytest.raises(shardmlp.Error) as failure:
        optimizer.step()
    assert failure.value.code == "UNAVAILABLE"
    assert all(torch.equal(before[name], p) for name, p in model.named_parameters())
    assert model.get_input_embeddings().weight.grad is not None
