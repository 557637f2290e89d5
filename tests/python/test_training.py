"""Whole loops against a local twin: clipping, frozen tensors, accumulation, zero_grad, what is not finite."""

from __future__ import annotations

import math

import pytest
import torch
from models import load_model, loss_of, relative
from twins import Twins

import shardmlp


@pytest.mark.parametrize("max_norm", [0.05, 1e3])
def test_clipping_by_the_global_norm(twins, max_norm):
    twins.optimize(torch.optim.SGD, lr=0.5)
    for seed in range(4):
        norms = []
        for model, optimizer in twins.each():
            loss_of(model, seed).backward()
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
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
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
    torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0)
    twins.mine.zero_grad()
    assert all(p.grad is None for p in twins.model.parameters())
    twins.step(1)
    assert twins.difference() < 1e-5


def test_usual_loops_discard_nothing(twins):
    """zero_grad() ahead of backward, or after step(): the attempt shows that the server was not asked."""
    twins.optimize(torch.optim.SGD, lr=0.1)
    session = twins.remote._servers.connections[0].session
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
    session = twins.remote._servers.connections[0].session
    before = twins.remote.state_dict()
    (loss_of(twins.model, 1) * math.nan).backward()
    with pytest.raises(RuntimeError, match="not finite|total norm"):
        torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0, error_if_nonfinite=True)
    assert not torch.nn.utils.clip_grad_norm_(twins.model.parameters(), 1.0).isfinite()
    with pytest.raises(shardmlp.Error) as failure:
        twins.mine.step()
    assert failure.value.reason == "NON_FINITE"
    twins.mine.zero_grad()

    after = twins.remote.state_dict()
    assert session.position.step == 0
    assert all(torch.equal(before[name], after[name]) for name in before)
    twins.step(2)
    assert twins.difference() < 1e-5


def test_infinite_gradient_of_the_trainer_alone_clips_to_zeros(twins):
    """As in torch: all else is scaled by 1 / inf, and the optimizer steps on zeros."""
    twins.optimize(torch.optim.SGD, lr=0.1, weight_decay=0.1)
    for model, optimizer in twins.each():
        loss_of(model, 1).backward()
        model.get_input_embeddings().weight.grad[0, 0] = math.inf
        assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isinf()
        optimizer.step()
    mine, theirs = twins.remote.state_dict(), twins.local.state_dict()
    assert max(relative(mine[name], theirs[name]) for name in theirs if ".mlp." in name) < 1e-6
    assert twins.remote.step == 1


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
            norms.append(torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5))
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
            torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        assert losses[0] == pytest.approx(losses[1], rel=2e-2)
    assert remote.state_dict()["model.layers.0.mlp.up_proj.weight"].dtype == torch.bfloat16
