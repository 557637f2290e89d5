"""torch.optim's optimizers on the server: every weight after several steps, whatever the groups; what is refused."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of, relative
from twins import Twins


OPTIMIZERS = {
    "adamw": (torch.optim.AdamW, dict(lr=1e-3)),
    "adamw with everything": (torch.optim.AdamW, dict(lr=3e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.3)),
    "adamw fused": (torch.optim.AdamW, dict(lr=1e-3, fused=True)),
    "adamw with a tensor for lr": (torch.optim.AdamW, dict(lr=torch.tensor(1e-3))),
    "sgd": (torch.optim.SGD, dict(lr=0.05)),
    "sgd with negative dampening": (torch.optim.SGD, dict(lr=0.01, momentum=0.9, dampening=-0.5)),
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
    """30 steps of AdamW, clipped and on a schedule: each loss and norm, and the weights at the end."""
    twins = Twins(folder, serve, offload, family)
    # Some gradients are zero but for rounding (of attention's key biases), and AdamW would divide by them.
    twins.optimize(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30) for _, optimizer in twins.each()]
    for seed in range(30):
        steps = []
        for (model, optimizer), schedule in zip(twins.each(), schedules):
            loss = loss_of(model, seed)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            steps.append((loss.item(), norm.item()))
        assert steps[0] == pytest.approx(steps[1], rel=1e-4)
    assert twins.difference() < 1e-3


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


class Homemade(torch.optim.SGD):
    pass


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda ps: torch.optim.Adam(ps), "torch.optim.adam.Adam; the server has torch.optim.AdamW .* torch.optim.SGD"),
        (lambda ps: torch.optim.RMSprop(ps), "RMSprop; the server has"),
        (lambda ps: Homemade(ps), "test_optimizers.Homemade; the server has"),
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
    with pytest.raises(ValueError, match="has exp_avg .80, 48. of model.layers.0.mlp.gate_proj.weight"):
        remote.wrap(optimizer)


def test_one_optimizer_alone_is_wrapped(twins):
    twins.optimize(torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="wrapped already"):
        twins.remote.wrap(torch.optim.SGD(twins.model.parameters()))
