"""What is saved, where, and that training goes on from it as if nothing had happened."""

from __future__ import annotations

from functools import partial

import models
import pytest
import torch
from models import load_model, loss_of, mlp_names, relative

import shardmlp

train = partial(models.train, max_norm=1.0)


def test_rollback_after_the_server_was_killed(folder, serve, offload, tmp_path):
    """kill -9 between steps, restart, restore: the losses are those of a run that was never interrupted."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, range(3))
    assert remote.save_checkpoint("three").step == 3
    torch.save({"model": remote.local_state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "local.pt")
    expected = train(model, optimizer, range(3, 7))

    train(model, optimizer, range(50, 52))  # lost work
    loss_of(model, 52).backward()
    server.kill()
    server.start()
    remote.restore("three")
    local = torch.load(tmp_path / "local.pt")
    model.load_state_dict(local["model"])
    optimizer.load_state_dict(local["optimizer"])
    assert remote.step == 3
    assert train(model, optimizer, range(3, 7)) == expected


@pytest.mark.parametrize("where", ["forward", "backward", "step"])
def test_plain_loop_goes_on_after_the_server_died_in_mid_step(folder, serve, offload, tmp_path, where):
    """In the same process, as the tutorial says."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server, timeouts=shardmlp.Timeouts(connect=20, retry=1))
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, range(2))
    remote.save_checkpoint("two")
    torch.save({"model": remote.local_state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "local.pt")
    expected = train(model, optimizer, range(2, 5))

    with pytest.raises(shardmlp.Error, match="the server has ended.*remote.restore") as failure:
        if where == "forward":
            server.kill()
        loss = loss_of(model, 9)
        if where == "backward":
            server.kill()
        loss.backward()
        server.kill()
        optimizer.step()
    assert failure.value.reason == "UNREACHABLE"
    server.start()
    server.await_serving(2)
    remote.restore("two")
    local = torch.load(tmp_path / "local.pt")
    model.load_state_dict(local["model"])
    optimizer.load_state_dict(local["optimizer"])
    assert train(model, optimizer, range(remote.step, 5)) == expected


def test_deleted_checkpoints_are_gone(folder, serve, offload):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    remote.save_checkpoint("a")
    remote.save_checkpoint("b")
    remote.delete_checkpoint("a")
    assert [c.name for c in remote.checkpoints()] == ["b"]
    for name, reason in [("a", "UNKNOWN_CHECKPOINT"), ("../b", "INVALID_ARGUMENT")]:
        with pytest.raises(shardmlp.Error) as failure:
            remote.delete_checkpoint(name)
        assert failure.value.reason == reason


def test_new_trainer_process_goes_on(folder, serve, offload, tmp_path):
    """Model, optimizer and connection all made anew, as a restarted script does."""
    server = serve(folder("llama"))

    def begin(**options):
        model = load_model(folder("llama"))
        remote = offload(model, server, **options)
        return model, remote, remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))

    model, remote, optimizer = begin()
    train(model, optimizer, range(2))
    remote.save_checkpoint("two")
    state = {"model": remote.local_state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, tmp_path / "local.pt")
    expected = train(model, optimizer, range(2, 5))
    remote.close()

    model, remote, optimizer = begin(resume=True)
    remote.restore("two")
    local = torch.load(tmp_path / "local.pt")
    model.load_state_dict(local["model"])
    optimizer.load_state_dict(local["optimizer"])
    assert train(model, optimizer, range(2, 5)) == expected


def test_checkpoints_are_listed_and_named(folder, serve, offload):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    remote.save_checkpoint("a")
    train(model, optimizer, [1])
    remote.save_checkpoint("b")
    assert [(c.name, c.step) for c in remote.checkpoints()] == [("a", 0), ("b", 1)]
    with pytest.raises(shardmlp.Error) as failure:
        remote.restore("c")
    assert failure.value.code == "NOT_FOUND" and failure.value.reason == "UNKNOWN_CHECKPOINT"
    assert remote.step == 1
    with pytest.raises(shardmlp.Error) as failure:
        remote.save_checkpoint("../a")
    assert failure.value.code == "INVALID_ARGUMENT"


def test_restore_drops_gradients_and_a_sealed_step(folder, serve, offload):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    remote.save_checkpoint("a")
    before = remote.state_dict()
    loss_of(model, 1).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    remote.restore("a")
    assert all(p.grad is None for p in model.parameters())
    optimizer.step()
    after = remote.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_state_dict_is_the_whole_model(folder, family, serve, offload):
    original = load_model(folder(family)).state_dict()
    model = load_model(folder(family))
    names = mlp_names(model)
    remote = offload(model, serve(folder(family)))
    state = remote.state_dict()
    assert list(state) == list(original)
    assert all(torch.equal(state[name], weights) for name, weights in original.items())
    local = remote.local_state_dict()
    assert set(original) - set(local) == names
    assert remote.state_dict().keys() == original.keys()


def test_save_pretrained_by_itself_is_complete(folder, serve, offload, tmp_path):
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama")))
    model.save_pretrained(tmp_path)
    saved, original = load_model(tmp_path).state_dict(), load_model(folder("llama")).state_dict()
    assert all(torch.equal(saved[name], weights) for name, weights in original.items())


def test_load_state_dict_takes_local_weights_and_refuses_others_for_the_server(folder, serve, offload):
    model = load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    state = {name: weights.clone() for name, weights in remote.state_dict().items()}
    state["model.norm.weight"] += 1
    model.load_state_dict(state)
    assert torch.equal(model.model.norm.weight, state["model.norm.weight"])
    state["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    with pytest.raises(RuntimeError, match="model.layers.1.mlp.up_proj.weight: differs from the server's"):
        model.load_state_dict(state)


def test_server_starts_from_what_was_saved(folder, serve, offload, tmp_path):
    """The folder that a run leaves is a model like any other."""
    model = load_model(folder("gpt2"))
    remote = offload(model, serve(folder("gpt2")))
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    train(model, optimizer, range(2))
    model.save_pretrained(tmp_path, state_dict=remote.state_dict())
    again = load_model(tmp_path)
    offload(again, serve(tmp_path))
    with torch.no_grad():
        assert relative(loss_of(again, 3), loss_of(model, 3)) < 1e-6
