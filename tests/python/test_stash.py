"""The stash: backward names x by its ticket. To the bit the run that sends x, and nothing is left on the server. With
keep_inputs=False the trainer has no x, and to the bit the same run.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import weakref

import pytest
import torch
from models import load_model, loss_of
from torch.utils.checkpoint import checkpoint
from waiting import until

import shardmlp

IN_USE = "shardmlp_stash_bytes"
METRICS = "--metrics-address=127.0.0.1:0"


def tickets(server, event):
    return server.metric(f'shardmlp_stash_tickets_total{{event="{event}"}}')


@pytest.fixture
def stashing(folder, serve, offload):
    """stashing(*flags) -> a server with a stash, and an offloaded model."""

    def start(*flags, dtype=torch.float32, stash="64MiB", **options):
        path = folder("llama", dtype)
        server = serve(path, METRICS, f"--stash-bytes={stash}", "--threads=1", *flags)
        model = load_model(path, dtype)
        return server, model, offload(model, server, **options)

    return start


def train(model, remote, steps=3, wrapped=lambda model: model):
    """The losses of steps of two micro-batches, and the weights after them."""
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    losses = []
    for step in range(steps):
        for micro in range(2):
            loss = loss_of(wrapped(model), 10 * step + micro)
            loss.backward()
            losses.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses, remote.state_dict()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stash", ["64MiB", "100KiB", "20KiB"])  # of everything, of x alone, of less than that
def test_training_is_the_same_to_the_bit(stashing, dtype, stash):
    flags = ("--dtype=bf16",) if dtype == torch.bfloat16 else ()
    losses, weights = train(*stashing(*flags, dtype=dtype, stash="0")[1:])
    server, model, remote = stashing(*flags, dtype=dtype, stash=stash)
    stashed_losses, stashed_weights = train(model, remote)
    assert stashed_losses == losses
    assert all(torch.equal(stashed_weights[name], weights[name]) for name in weights)
    assert tickets(server, "hit") > 0
    if stash == "64MiB":
        assert tickets(server, "hit") == tickets(server, "granted") == 3 * 2 * 3  # steps, micro-batches, layers
        assert server.metric('shardmlp_gemm_flops_total{kind="recomputed"}') == 0
    assert server.metric(IN_USE) == 0


def test_backward_uploads_dy_alone(stashing):
    received = 'shardmlp_payload_bytes_total{direction="received"}'
    sent = []
    for stash in ("0", "64MiB"):
        server, model, _ = stashing(stash=stash)
        before = server.metric(received)
        loss_of(model, 1).backward()
        sent.append(server.metric(received) - before)
    assert sent[1] / sent[0] == pytest.approx(2 / 3)  # x and dy, of x, x and dy


def test_forward_that_no_backward_follows_asks_for_no_ticket(stashing):
    server, model, _ = stashing()
    with torch.no_grad():
        loss_of(model, 1)
    with torch.inference_mode():
        loss_of(model, 2)
    model.requires_grad_(False)
    loss_of(model, 3)
    assert tickets(server, "granted") == 0 and server.metric(IN_USE) == 0


def test_each_end_of_a_step_leaves_nothing(stashing):
    server, model, remote = stashing()
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    for end in (optimizer.zero_grad, optimizer.step):
        loss_of(model, 1).backward()
        loss_of(model, 2)  # and never goes back
        assert server.metric(IN_USE) > 0
        end()
        assert server.metric(IN_USE) == 0
        optimizer.zero_grad()
    loss_of(model, 3)
    assert server.metric(IN_USE) > 0
    remote.close()
    assert server.metric(IN_USE) == 0


def test_a_trainer_that_is_killed_leaves_nothing(folder, serve):
    server = serve(folder("llama"), METRICS, "--stash-bytes=64MiB", "--lease=1s")
    server.await_serving()
    program = (
        "import sys, time, torch, shardmlp\n"
        "from models import load_model, loss_of\n"
        "model = load_model(sys.argv[1])\n"
        "remote = shardmlp.offload(model, sys.argv[2])\n"
        "loss = loss_of(model, 1)\n"
        "print('kept', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", program, str(folder("llama")), server.target]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as trainer:
        assert trainer.stdout.readline() == "kept\n"
        assert server.metric(IN_USE) > 0
        trainer.send_signal(signal.SIGKILL)
    until(lambda: server.metric(IN_USE) == 0)


def hold_no_input(model):
    """Asserts, at each MLP's backward, that nothing here holds its input."""
    inputs = []

    def watch(module, args, y):
        inputs.append(weakref.ref(args[0].untyped_storage()))
        y.register_hook(functools.partial(check, len(inputs) - 1))

    def check(index, _):
        assert inputs[index]() is None

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(watch)
    return inputs


@pytest.mark.parametrize("room", ["64MiB", "100KiB"])  # of everything, of x alone
@pytest.mark.parametrize("keep", ["layers", "checkpointed"])
def test_a_trainer_that_holds_no_input(stashing, keep, room):
    losses, weights = train(*stashing(stash="0")[1:], steps=2)
    server, model, remote = stashing(stash=room, keep_inputs=False)
    if keep == "checkpointed":
        model.gradient_checkpointing_enable({"use_reentrant": False})
    again, weights_again = train(model, remote, steps=2)
    assert again == losses
    assert all(torch.equal(weights_again[name], weights[name]) for name in weights)
    assert tickets(server, "missed") == 0
    assert server.metric(IN_USE) == 0


def test_no_input_stays_here(stashing):
    server, model, remote = stashing(keep_inputs=False)
    inputs = hold_no_input(model)
    loss_of(model, 1).backward()
    assert len(inputs) == 3
    # A graph that is dropped lets go of what the server has for it, which the next call tells.
    remote.model.zero_grad()
    loss = loss_of(model, 2)
    held = server.metric(IN_USE)
    del loss
    gc.collect()
    loss_of(model, 3).backward()
    assert 0 < server.metric(IN_USE) < held
    remote.model.zero_grad()
    assert server.metric(IN_USE) == 0


def test_a_graph_that_is_retained_goes_back_twice_without_x(stashing, folder):
    server, model, remote = stashing(keep_inputs=False)
    weights = []
    for m in (model, load_model(folder("llama"))):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        if m is model:
            remote.wrap(optimizer)
        loss = loss_of(m, 1)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        weights.append(m.state_dict())
    assert tickets(server, "hit") == 2 * 3 and tickets(server, "missed") == 0
    for name, expected in weights[1].items():
        torch.testing.assert_close(weights[0][name], expected, rtol=1e-4, atol=1e-6)


def test_inputs_that_the_server_lost_end_the_step(stashing):
    server, model, remote = stashing(keep_inputs=False)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, 1)
    optimizer.zero_grad()  # which ends no attempt, as nothing was added
    loss_of(model, 2).backward()
    optimizer.zero_grad()  # which ends one, and what its forwards left
    before = remote.state_dict()
    with pytest.raises(shardmlp.StepAborted, match="no ticket.*run the step's batches again"):
        loss.backward()
    loss_of(model, 1).backward()
    optimizer.step()
    assert any(not torch.equal(before[name], weights) for name, weights in remote.state_dict().items())


def test_no_room_for_the_inputs_is_told(stashing, serve, folder):
    _, model, remote = stashing(stash="4KiB", keep_inputs=False)
    with pytest.raises(shardmlp.Error, match="no room to pin.*more --stash-bytes") as error:
        loss_of(model, 1)
    assert error.value.reason == "STASH_FULL"
    remote.close()
    with pytest.raises(ValueError, match="start it with --stash-bytes"):
        shardmlp.offload(load_model(folder("llama")), serve(folder("llama")).target, keep_inputs=False)


@pytest.mark.parametrize("keep_inputs", [True, False])
def test_a_compiled_model_keeps_its_tickets(stashing, keep_inputs):
    losses, weights = train(*stashing(stash="0")[1:], steps=2)
    server, model, remote = stashing(keep_inputs=keep_inputs)
    model.config.use_cache = False
    compiled = torch.compile(model, backend="aot_eager")
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
    for step in range(2):
        for micro in range(2):
            loss = loss_of(compiled, 10 * step + micro)
            loss.backward()
            torch.testing.assert_close(loss.item(), losses[2 * step + micro], rtol=1e-5, atol=1e-6)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert tickets(server, "hit") == 2 * 2 * 3 and tickets(server, "missed") == 0


def test_backward_twice_through_one_forward(stashing, folder):
    server, model, remote = stashing()
    weights = []
    for m, is_remote in ((model, True), (load_model(folder("llama")), False)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        if is_remote:
            remote.wrap(optimizer)
        loss = loss_of(m, 1)
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        weights.append(m.state_dict())
    assert tickets(server, "hit") == tickets(server, "missed") == 3
    for name, expected in weights[1].items():
        torch.testing.assert_close(weights[0][name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_uses_the_tickets_of_what_it_recomputes(stashing, use_reentrant):
    def checkpointed(model):
        model.config.use_cache = False  # a layer that runs again would append to it again
        for layer in model.model.layers:
            forward = type(layer).forward.__get__(layer)

            def again(*args, forward=forward, **kwargs):
                return checkpoint(functools.partial(forward, **kwargs), *args, use_reentrant=use_reentrant)

            layer.forward = again
        return model

    losses, weights = train(*stashing(stash="0")[1:], steps=2)
    server, model, remote = stashing()
    again, checkpointed_weights = train(model, remote, steps=2, wrapped=checkpointed)
    assert again == losses
    assert all(torch.equal(checkpointed_weights[name], weights[name]) for name in weights)
    assert tickets(server, "hit") == 2 * 2 * 3 and tickets(server, "missed") == 0
    assert server.metric(IN_USE) == 0


def test_a_frozen_server_keeps_x_for_its_readers(folder, serve, offload):
    server = serve(folder("llama"), METRICS, "--stash-bytes=64MiB", "--frozen")
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    offload(model, server)
    for m in (model, local):
        loss_of(m, 1).backward()
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(
        dict(model.named_parameters())[name].grad, dict(local.named_parameters())[name].grad, rtol=1e-4, atol=1e-6
    )
    assert tickets(server, "hit") == 3 and server.metric(IN_USE) == 0
