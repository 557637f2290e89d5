"""Gradient checkpointing around whole layers, as transformers does it."""

from __future__ import annotations

import pytest
import torch
from models import loss_of
from twins import Twins


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "bert"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_three_steps_equal_a_local_model(folder, serve, offload, family, reentrant):
    """Of micro-batches, with clipping: each layer's forward runs twice, its gradients count once."""
    twins = Twins(folder, serve, offload, family)
    twins.optimize(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    twins.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for model in (twins.model, twins.local):
        model.train()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
            elif isinstance(getattr(module, "dropout", None), float):
                module.dropout = 0.0
    norms = []
    for step in range(3):
        for model, optimizer in twins.each():
            for seed in (2 * step, 2 * step + 1):
                (loss_of(model, seed) / 2).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    assert norms[::2] == pytest.approx(norms[1::2], rel=1e-5)
    assert twins.remote.step == 3
    assert twins.difference() < 1e-4


@pytest.mark.parametrize("reentrant", [True, False])
def test_layers_that_are_checkpointed_and_not_recomputed(twins, reentrant):
    """Evaluation keeps nothing, and sends nothing twice."""
    twins.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    twins.model.train()
    with torch.no_grad():
        mine, theirs = loss_of(twins.model, 1), loss_of(twins.local, 1)
    assert mine.item() == pytest.approx(theirs.item(), rel=1e-5)
    assert twins.remote._servers.connections[0].session.pending_row_count == 0
