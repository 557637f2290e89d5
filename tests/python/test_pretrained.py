"""shardmlp.from_pretrained: as transformers loads a model and offload swaps its MLPs, without ever holding these."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch
from conftest import QUICK
from models import load_model, loss_of, mlp_names, relative, tokens
from safetensors.torch import load_file, save_file

import shardmlp


@pytest.fixture
def load():
    """shardmlp.from_pretrained whose session is closed after the test."""
    remotes: list[shardmlp.Remote] = []

    def call(folder, server, **options):
        model, remote = shardmlp.from_pretrained(folder, server.target, **{"timeouts": QUICK, **options})
        remotes.append(remote)
        return model, remote

    yield call
    for remote in remotes:
        remote.close()


def test_it_is_what_loading_and_offloading_give(folder, family, serve, load, offload):
    """Parameters, their order and names, buffers, ties, modes, logits and a step: bit for bit."""
    twin = load_model(folder(family))
    server = serve(folder(family))
    model, remote = load(folder(family), server)
    assert type(model) is type(twin) and not any(module.training for module in model.modules())
    expected = dict(twin.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected)
    for name, p in model.named_parameters():
        assert p.device.type == "cpu" and p.dtype == expected[name].dtype and p.requires_grad
        assert p.numel() == 0 if name in mlp_names(twin) else torch.equal(p, expected[name]), name
    buffers = dict(model.named_buffers())
    assert list(buffers) == list(dict(twin.named_buffers()))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in twin.named_buffers())
    assert model.config.to_dict() == twin.config.to_dict()

    results = []
    theirs = serve(folder(family))
    for each, its_remote in ((model, remote), (twin, offload(twin, theirs))):
        optimizer = its_remote.wrap(torch.optim.SGD(each.parameters(), lr=0.1))
        loss = loss_of(each, seed=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append((loss, each(tokens(2)).logits, its_remote.state_dict()))
    (loss, logits, state), (its_loss, its_logits, its_state) = results
    assert torch.equal(loss, its_loss) and torch.equal(logits, its_logits)
    assert list(state) == list(its_state) and all(torch.equal(state[name], its_state[name]) for name in state)
