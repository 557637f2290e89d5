"""From which weights a server starts, and what it refuses to start from."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of

WHOLE, TORN = "whole", "torn"


def test_the_latest_checkpoint_is_not_passed_over_because_it_is_torn(folder, serve, offload):
    first = serve(folder("llama"))
    remote = offload(load_model(folder("llama")), first)
    for name in (WHOLE, TORN):
        remote.save_checkpoint(name)
    remote.close()
    first.stop()
    checkpoints = first.log.parent / "checkpoints"
    weights = checkpoints / TORN / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])

    refused = serve(folder("llama"), f"--checkpoint-dir={checkpoints}", "--restore=latest")
    assert refused.wait() == 1
    said = refused.log.read_text()
    assert f"{TORN}/weights.safetensors has" in said
    assert f"{WHOLE} is the latest whole one" in said

    chosen = serve(folder("llama"), f"--checkpoint-dir={checkpoints}", f"--restore={WHOLE}")
    chosen.await_serving()
    assert f"restored checkpoint {WHOLE}" in chosen.log.read_text()


def test_a_frozen_server_serves_the_weights_of_a_checkpoint(folder, serve, offload):
    """For inference with what was trained, without the memory that training takes."""
    trained = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, trained)
    mlps = [p for name, p in model.named_parameters() if ".mlp." in name]
    optimizer = remote.wrap(torch.optim.SGD(mlps, lr=0.5))
    before = loss_of(model, 0).item()
    loss_of(model, 0).backward()
    optimizer.step()
    remote.save_checkpoint(WHOLE)
    after = loss_of(model, 0).item()
    assert abs(after - before) > 1e-3

    checkpoints = trained.log.parent / "checkpoints"
    server = serve(folder("llama"), "--frozen", f"--checkpoint-dir={checkpoints}", f"--restore={WHOLE}")
    reader = load_model(folder("llama"))
    offload(reader, server, resume=True)
    assert loss_of(reader, 0).item() == pytest.approx(after, rel=1e-6)
