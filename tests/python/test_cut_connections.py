"""A connection cut at every message of a step: the weights come out bit for bit as if nothing had happened."""

from __future__ import annotations

import socket

import pytest
import torch
from cutting_proxy import CuttingProxy
from models import load_model, loss_of

import shardmlp

FAST_RETRY = shardmlp.Timeouts(connect=20, retry=20)


def train_one_step(folder, target) -> dict[str, torch.Tensor]:
    """Two micro-batches, clipped, one step of AdamW. The server must be at its first step."""
    model = load_model(folder("llama"))
    with shardmlp.offload(model, target, timeouts=FAST_RETRY) as remote:
        optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
        for seed in (1, 2):
            loss_of(model, seed).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        assert remote.step == 1
        return {name: weights.clone() for name, weights in remote.state_dict().items()}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("stash", ["0", "64MiB"])  # where a ticket may be used up, and its answer lost
def test_connection_cut_at_every_message_of_a_step(folder, serve, stash):
    # Tiles of a few rows, so that each call is several tiles, results and marks in the ledger.
    server = serve(folder("llama"), "--workspace-bytes=16KiB", f"--stash-bytes={stash}")
    with shardmlp.offload(load_model(folder("llama")), server.target, timeouts=FAST_RETRY) as remote:
        remote.save_checkpoint("start")
        path = server.target.removeprefix("unix:")

        def connect() -> socket.socket:
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(path)
            return connected

    proxy = CuttingProxy(connect)

    def run(cut_at: int | None) -> dict[str, torch.Tensor]:
        model = load_model(folder("llama"))
        with shardmlp.offload(model, server.target, resume=True, timeouts=FAST_RETRY) as remote:
            remote.restore("start")
        proxy.cut_at(cut_at)
        return train_one_step(folder, proxy.target)

    expected = run(None)
    messages = proxy.passed
    assert messages > 30
    cuts = 0
    for message in range(1, messages + 1):
        weights = run(message)
        cuts += proxy.has_cut
        assert all(torch.equal(weights[name], expected[name]) for name in expected), f"cut behind message {message}"
    # Reads of tensors at the end can take a few messages more or less.
    assert cuts >= messages - 10
    proxy.close()
