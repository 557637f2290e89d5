"""From which weights a server starts, and what it refuses to start from."""

from __future__ import annotations

from models import load_model

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
