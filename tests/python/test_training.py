"""Several steps against torch.optim on a local twin: losses and every weight, whatever the optimizer and the loop."""

from __future__ import annotations

import math

import pytest
import torch
from models import load_model, loss_of, relative

import shardmlp


class Twins:
    """A model with its MLPs on a server, and the same model without."""

    def __init__(self, folder, serve, offload, family="llama", **options):
        self.server = serve(folder(family))
        self.model, self.local = load_model(folder(family)), load_model(folder(family))
        self.remote = offload(self.model, self.server, **options)

    def optimize(self, kind, groups=lambda model: model.parameters(), **hyperparameters):
        self.mine = self.remote.wrap(kind(groups(self.model), **hyperparameters))
        self.theirs = kind(groups(self.local), **hyperparameters)

    def each(self):
        return (self.model, self.mine), (self.local, self.theirs)

    def step(self, seed):
        """One usual step of both; returns both losses."""
        losses = []
        for model, optimizer in self.each():
            loss = loss_of(model, seed)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    def difference(self):
        """Of all weights, the largest, relative to the largest of its tensor."""
        mine, theirs = self.remote.state_dict(), self.local.state_dict()
        return max(relative(mine[name], theirs[name]) for name in theirs)


@pytest.fixture
def twins(folder, serve, offload):
    return Twins(folder, serve, offload)


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, dict(lr=1e-3)),
    "adamw with everything": (torch.optim.AdamW, dict(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
    "adamw fused": (torch.optim.AdamW, dict(lr=1e-3, fused=True)),
    "adamw with a tensor for lr": (torch.optim.AdamW, dict(lr=torch.tensor(1e-3))),
    "sgd": (torch.optim.SGD, dict(lr=0.05)),
    "sgd with momentum": (torch.optim.SGD, dict(lr=0.03, momentum=0.9, dampening=0.2, weight_decay=0.01)),
    "sgd with nesterov": (torch.optim.SGD, dict(lr=0.03, momentum=0.8, nesterov=True)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizer_over_several_steps(twins, name):
    kind, hyperparameters = OPTIMIZERS[name]
    twins.optimize(kind, **hyperparameters)
    for seed in range(6):
        loss, expected = twins.step(seed)
        assert loss == pytest.approx(expected, rel=1e-5)
    assert twins.difference() < 1e-4
    assert twins.remote.step == 6


def test_every_family_trains_alike(folder, family, serve, offload):
    twins = Twins(folder, serve, offload, family)
    twins.optimize(torch.optim.AdamW, lr=1e-3)
    for seed in range(5):
        loss, expected = twins.step(seed)
        assert loss == pytest.approx(expected, rel=1e-5)
    assert twins.difference() < 1e-3  # AdamW divides by gradients that are next to nothing here and there


def decay_groups(model):
    """As trainers do: biases and norms without weight decay, and here a rate of their own."""
    named = list(model.named_parameters())
    return [
        {"params": [p for n, p in named if p.requires_grad and n.endswith("proj.weight")], "weight_decay": 0.5},
        {"params": [p for n, p in named if not n.endswith("proj.weight")], "lr": 5e-3, "weight_decay": 0.0},
    ]


def test_parameter_groups_and_schedule(folder, serve, offload):
    """Biases apart from weights, rates that a scheduler changes, and one that the loop changes by hand."""
    twins = Twins(folder, serve, offload, "llama_biased")
    twins.optimize(torch.optim.AdamW, decay_groups, lr=1e-3)
    assert isinstance(twins.mine, torch.optim.AdamW)
    schedules = [torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.3) for _, optimizer in twins.each()]
    for seed in range(6):
        loss, expected = twins.step(seed)
        assert loss == pytest.approx(expected, rel=1e-5)
        for schedule, (_, optimizer) in zip(schedules, twins.each()):
            schedule.step()
            optimizer.param_groups[1]["betas"] = (0.5, 0.9)
    assert twins.difference() < 1e-3


def test_optimizer_made_before_offload(folder, serve, offload):
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    remote = offload(model, serve(folder("llama")))
    assert remote.wrap(optimizer) is optimizer
    twin = torch.optim.SGD(local.parameters(), lr=0.1)
    for seed in range(2):
        for m, o in ((model, optimizer), (local, twin)):
            loss_of(m, seed).backward()
            o.step()
            o.zero_grad()
    state = remote.state_dict()
    assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-5


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_by_the_global_norm(twins, max_norm):
    twins.optimize(torch.optim.SGD, lr=0.5)
    for seed in range(4):
        norms = []
        for model, optimizer in twins.each():
            loss_of(model, seed).backward()
            if model is twins.model:
                norms.append(twins.remote.clip_grad_norm_(max_norm))
            else:
                norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
            optimizer.step()
            optimizer.zero_grad()
        assert (norms[1] > max_norm) == (max_norm < 1)
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-5)
    assert twins.difference() < 1e-5


def test_clipping_twice_scales_twice(twins):
    twins.optimize(torch.optim.SGD, lr=0.5)
    for model, optimizer in twins.each():
        loss_of(model, 1).backward()
        for max_norm in (0.5, 0.1):
            if model is twins.model:
                norm = twins.remote.clip_grad_norm_(max_norm)
            else:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            assert norm > max_norm
        optimizer.step()
    assert twins.difference() < 1e-5


@pytest.mark.parametrize("frozen", [["up_proj"], ["gate_proj", "up_proj", "down_proj"]])
def test_frozen_tensors_stay_and_count_in_no_norm(folder, serve, offload, frozen):
    twins = Twins(folder, serve, offload)
    for model in (twins.model, twins.local):
        for layer in list(model.model.layers)[1:]:
            for name in frozen:
                layer.mlp.get_submodule(name).requires_grad_(False)
    twins.optimize(torch.optim.AdamW, lambda model: [p for p in model.parameters() if p.requires_grad], lr=1e-3)
    before = twins.remote.state_dict()
    for seed in range(3):
        norms = []
        for model, optimizer in twins.each():
            loss_of(model, seed).backward()
            clip = (
                twins.remote.clip_grad_norm_
                if model is twins.model
                else (lambda limit: torch.nn.utils.clip_grad_norm_(twins.local.parameters(), limit))
            )
            norms.append(clip(0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    after = twins.remote.state_dict()
    for name in before:
        if ".mlp." in name:
            trained = ".layers.0." in name or name.split(".")[-2] not in frozen
            assert torch.equal(before[name], after[name]) != trained, name
    assert twins.difference() < 1e-3


def test_layer_without_a_gradient_is_left_alone(twins):
    """As torch.optim skips a parameter whose grad is None: no decay, no momentum."""
    twins.optimize(torch.optim.AdamW, lr=1e-3, weight_decay=0.5)
    twins.step(1)
    x = torch.randn(3, 48)
    for model, optimizer in twins.each():
        model.model.layers[2].mlp(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert twins.difference() < 1e-4


def test_zeroed_gradients_that_are_kept_still_decay(twins):
    """As torch.optim with zero_grad(set_to_none=False), which steps on zeros."""
    twins.optimize(torch.optim.SGD, lr=0.1, momentum=0.9)
    for model, optimizer in twins.each():
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        optimizer.step()
    assert twins.difference() < 1e-5
    assert twins.remote.step == 2


def test_micro_batches(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    for start in (0, 3):
        for model, optimizer in twins.each():
            for seed in range(start, start + 3):
                (loss_of(model, seed, batch=seed + 1) / 3).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert twins.difference() < 1e-5
    assert twins.remote.step == 2


def test_zero_grad_discards_what_no_step_committed(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 7).backward()
    twins.mine.zero_grad()
    loss_of(twins.model, 8).backward()
    twins.model.zero_grad()
    loss_of(twins.model, 9).backward()
    twins.remote.clip_grad_norm_(1.0)
    twins.mine.zero_grad()
    assert all(p.grad is None for p in twins.model.parameters())
    twins.step(1)
    assert twins.difference() < 1e-5


def test_usual_loops_discard_nothing(twins):
    """zero_grad() ahead of backward, or after step(): the attempt shows that the server was not asked."""
    twins.optimize(torch.optim.SGD, lr=0.1)
    session = twins.remote._connection.session
    attempt = session.position.attempt
    for _ in range(2):
        twins.mine.zero_grad()
        loss_of(twins.model, 1).backward()
        twins.mine.step()
        twins.mine.zero_grad()
        twins.model.zero_grad()
    assert (session.position.step, session.position.attempt) == (2, attempt)


def test_closure(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    losses = []
    for model, optimizer in twins.each():

        def closure():
            optimizer.zero_grad()
            loss = loss_of(model, 1)
            loss.backward()
            return loss

        losses.append(optimizer.step(closure).item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert twins.difference() < 1e-5


def test_step_without_backward_does_nothing(twins):
    twins.optimize(torch.optim.AdamW, lr=0.1)
    twins.mine.step()
    assert twins.remote.step == 0


def test_step_again_without_zero_grad_is_refused(twins):
    """The server no longer has its part of what torch would apply again."""
    twins.optimize(torch.optim.SGD, lr=0.1)
    loss_of(twins.model, 1).backward()
    twins.mine.step()
    local = twins.remote.local_state_dict()
    before = {name: weights.clone() for name, weights in local.items()}
    with pytest.raises(shardmlp.Error, match="call zero_grad"):
        twins.mine.step()
    assert all(torch.equal(before[name], weights) for name, weights in local.items())


def test_non_finite_gradients(twins):
    twins.optimize(torch.optim.SGD, lr=0.1)
    session = twins.remote._connection.session
    before = twins.remote.state_dict()
    embedding = twins.model.get_input_embeddings().weight

    (loss_of(twins.model, 1) * math.nan).backward()
    with pytest.raises(RuntimeError, match="not finite|total norm"):
        twins.remote.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert not twins.remote.clip_grad_norm_(1.0).isfinite()
    with pytest.raises(shardmlp.Error) as failure:
        twins.mine.step()
    assert failure.value.reason == "NON_FINITE"
    twins.mine.zero_grad()

    loss_of(twins.model, 1).backward()
    embedding.grad[0, 0] = math.inf  # the trainer's alone
    assert twins.remote.clip_grad_norm_(1.0).isinf()
    with pytest.raises(shardmlp.Error) as failure:
        twins.mine.step()
    assert failure.value.reason == "NON_FINITE"
    twins.mine.zero_grad()

    after = twins.remote.state_dict()
    assert session.position.step == 0
    assert all(torch.equal(before[name], after[name]) for name in before)
    twins.step(2)
    assert twins.difference() < 1e-5


class Homemade(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda ps: torch.optim.Adam(ps), "torch.optim.adam.Adam; the server has torch.optim.AdamW .* torch.optim.SGD"),
        (lambda ps: torch.optim.RMSprop(ps), "RMSprop; the server has"),
        (lambda ps: Homemade(ps), "test_training.Homemade; the server has"),
        (lambda ps: torch.optim.AdamW(ps, amsgrad=True), "AdamW with amsgrad=True"),
        (lambda ps: torch.optim.AdamW(ps, maximize=True), "AdamW with maximize=True"),
        (lambda ps: torch.optim.SGD(ps, maximize=True), "SGD with maximize=True"),
        (lambda ps: torch.optim.SGD([torch.nn.Parameter(torch.ones(2))]), "holds none of the server's tensors"),
    ],
)
def test_optimizer_that_the_server_lacks_is_refused_by_name(twins, make, message):
    with pytest.raises(ValueError, match=message):
        twins.remote.wrap(make(twins.model.parameters()))


def test_optimizer_that_moved_the_weights_already_is_refused(folder, serve, offload):
    model = load_model(folder("llama"))
    optimizer = torch.optim.AdamW(model.parameters())
    loss_of(model, 1).backward()
    optimizer.step()
    model.load_state_dict(load_model(folder("llama")).state_dict())
    remote = offload(model, serve(folder("llama")))
    with pytest.raises(ValueError, match="has updated model.layers.0.mlp.gate_proj.weight before"):
        remote.wrap(optimizer)


def test_one_optimizer_alone_is_wrapped(twins):
    twins.optimize(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="wrapped already"):
        twins.remote.wrap(torch.optim.SGD(twins.model.parameters()))


def test_clip_needs_a_positive_norm(twins):
    with pytest.raises(ValueError, match="max_norm: got 0"):
        twins.remote.clip_grad_norm_(0)


def test_frozen_server(folder, serve, offload):
    """Input gradients alone: the rest of the model trains, the MLPs do not."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama"), "--frozen"))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for name, p in local.named_parameters():
        p.requires_grad_(".mlp." not in name)
    twin = torch.optim.SGD(local.parameters(), lr=0.1)
    for seed in range(3):
        norms = []
        for m, o in ((model, optimizer), (local, twin)):
            loss_of(m, seed).backward()
            norms.append(
                remote.clip_grad_norm_(0.5) if m is model else torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5)
            )
            o.step()
            o.zero_grad()
        assert norms[0].item() == pytest.approx(norms[1].item(), rel=1e-5)
    state = remote.state_dict()
    assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-5
    assert "0 of 3" in remote.report()


def test_unfreezing_after_offload_is_refused_in_a_reading_session(folder, serve, offload):
    model = load_model(folder("llama"))
    model.requires_grad_(False)
    offload(model, serve(folder("llama")))
    model.requires_grad_(True)
    with pytest.raises(shardmlp.Error, match="requires_grad"):
        loss_of(model, 1).backward()


def test_bf16_model_on_an_f32_server(folder, serve, offload):
    """Losses follow the local bf16 run, within its own noise."""
    model = load_model(folder("llama"), torch.bfloat16)
    local = load_model(folder("llama"), torch.bfloat16)
    remote = offload(model, serve(folder("llama")))
    mine = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    theirs = torch.optim.AdamW(local.parameters(), lr=1e-3)
    for seed in range(4):
        losses = []
        for m, optimizer in ((model, mine), (local, theirs)):
            loss = loss_of(m, seed)
            loss.backward()
            if m is model:
                remote.clip_grad_norm_(1.0)
            else:
                torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert remote.state_dict()["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
