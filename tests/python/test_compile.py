"""torch.compile around remote MLPs: one graph, and the same training as in eager mode."""

from __future__ import annotations

import shutil

import pytest
import torch
from models import load_model, loss_of, relative, tokens, train

import shardmlp

BACKENDS = [
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs g++")),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model, backend="aot_eager", **options):
    """A compiled model of which any break of the graph is an error."""
    return torch.compile(model, backend=backend, fullgraph=True, **options)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_three_steps_equal_a_local_model(twins, backend, autocast):
    twins.optimize(torch.optim.AdamW, lr=1e-3, eps=1e-4)
    compiled = whole(twins.model, backend)
    losses, norms = [], []
    for seed in range(3):
        for model, (owner, optimizer) in zip((compiled, twins.local), twins.each()):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                losses.append(loss_of(model, seed).item())
                loss_of(model, seed).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(owner.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
    bound = 2e-2 if autocast else 1e-5
    assert losses[::2] == pytest.approx(losses[1::2], rel=bound)
    assert norms[::2] == pytest.approx(norms[1::2], rel=bound)
    assert twins.remote.step == 3
    assert twins.difference() < (2e-2 if autocast else 1e-4)


def test_gradients_are_the_servers_and_add_over_micro_batches(twins):
    twins.optimize(torch.optim.SGD, lr=0.2)
    compiled = whole(twins.model)
    for seed in (1, 2):
        loss_of(compiled, seed).backward()
        loss_of(twins.local, seed).backward()
    weight = twins.model.model.layers[1].mlp.up_proj.weight
    assert isinstance(weight.grad, shardmlp.ServerGradient)
    for mine, theirs in zip(twins.model.parameters(), twins.local.parameters()):
        assert mine.grad.norm().item() == pytest.approx(theirs.grad.norm().item(), rel=1e-4)
    for _, optimizer in twins.each():
        optimizer.step()
    assert twins.difference() < 1e-5


@pytest.mark.parametrize("backend", BACKENDS)
def test_equal_calls_of_one_mlp_each_count(twins, backend):
    """Two calls of one x and, in backward, one dy: whatever a compiler thinks of operators with equal arguments. x
    needs no gradient."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    x = torch.randn(4, 48)

    def twice(mlp):
        return lambda x: mlp(x).sum() + mlp(x).sum()

    mine, theirs = (model.model.layers[1].mlp for model in (twins.model, twins.local))
    loss, expected = whole(twice(mine), backend)(x), twice(theirs)(x)
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < 1e-5
    for _, optimizer in twins.each():
        optimizer.step()
    assert twins.difference() < 1e-5


def test_nothing_is_kept_without_gradients(twins):
    compiled = whole(twins.model)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert relative(compiled(tokens(1)).logits, twins.local(tokens(1)).logits) < 1e-5
    assert twins.remote._servers.connections[0].session.pending_row_count == 0


def test_layers_compiled_one_by_one_share_their_code(twins):
    """A module is an input of the graph: as for a local model, what is compiled for one layer serves the next."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    graphs = {}
    for model, _ in twins.each():
        made = graphs.setdefault(model, [])
        model.config.use_cache = False
        for layer in model.model.layers:
            layer.compile(backend=lambda graph, _, made=made: made.append(graph) or graph, fullgraph=True)
    mine, theirs = twins.step(1)
    assert mine == pytest.approx(theirs, rel=1e-5)
    assert len(graphs[twins.model]) == len(graphs[twins.local])
    assert twins.difference() < 1e-5


def test_gradients_that_are_returned_are_not_added(twins):
    """As torch.autograd.grad() leaves ``grad`` alone."""
    x = torch.randn(4, 48, requires_grad=True)
    mine, theirs = (model.model.layers[1].mlp for model in (twins.model, twins.local))
    (got,) = torch.autograd.grad(whole(mine)(x).sum(), x)
    (expected,) = torch.autograd.grad(theirs(x).sum(), x)
    assert relative(got, expected) < 1e-5
    assert twins.remote._servers.connections[0].session.pending_row_count == 0


def test_compiled_before_offload(folder, serve, offload):
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    model = whole(model)
    offload(model, serve(folder("llama")))
    assert relative(loss_of(model, 1), loss_of(local, 1)) < 1e-5


@pytest.mark.parametrize("family", ["gpt2", "opt", "bert", "falcon"])
def test_every_form_of_mlp(folder, serve, offload, family):
    """Conv1D and dropout, parts without a module of their own, an output that is changed in place."""
    model, local = load_model(folder(family)), load_model(folder(family))
    offload(model, serve(folder(family)))
    outputs = [each(tokens(1)).logits for each in (whole(model), local)]
    for logits in outputs:
        logits.log_softmax(-1)[..., 0].mean().backward()
    assert relative(*outputs) < 1e-5
    for mine, theirs in zip(model.parameters(), local.parameters()):
        assert mine.grad.norm().item() == pytest.approx(theirs.grad.norm().item(), rel=1e-3, abs=1e-6)


def test_compiled_checkpointing(twins):
    """The graph computes again what it did not keep."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    twins.model.gradient_checkpointing_enable({"use_reentrant": False})
    twins.model.config.use_cache = False
    twins.model.train()
    compiled = whole(twins.model)
    for seed in (1, 2):
        for model, (_, optimizer) in zip((compiled, twins.local), twins.each()):
            train(model, optimizer, [seed])
    assert twins.difference() < 1e-5
