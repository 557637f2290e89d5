"""Each family against transformers' own modules: what a user sees must not tell where the MLPs are."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of, mlp_names, mlps, relative, tokens

import shardmlp

# Largest difference over largest value, in f32 on both sides; sums are ordered differently.
F32 = 1e-5


def test_model_computes_the_same(folder, family, serve, offload):
    local, remote_model = load_model(folder(family)), load_model(folder(family))
    offload(remote_model, serve(folder(family)))
    with torch.no_grad():
        assert relative(remote_model(tokens(1)).logits, local(tokens(1)).logits) < F32


def test_mlp_gives_the_same_output_and_input_gradient(folder, family, serve, offload):
    local, model = load_model(folder(family)), load_model(folder(family))
    offload(model, serve(folder(family)))
    twins = mlps(local)
    assert len(twins) == 3
    for path, mlp in mlps(model).items():
        x = torch.randn(2, 5, 48)
        dy = torch.randn(2, 5, 48)
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = mlp(mine), twins[path](theirs)
        y.backward(dy)
        expected.backward(dy)
        assert relative(y, expected) < F32, path
        assert relative(mine.grad, theirs.grad) < F32, path


def test_weight_gradients_are_the_same(folder, family, serve, offload):
    """Read through one SGD step of learning rate 1: what the weights lose is the gradient."""
    local, model = load_model(folder(family)), load_model(folder(family))
    remote = offload(model, serve(folder(family)))
    before = remote.state_dict()
    loss_of(local, seed=2).backward()
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=1.0))
    loss_of(model, seed=2).backward()
    optimizer.step()
    after = remote.state_dict()
    names = mlp_names(local)
    assert len(names) >= 6
    for name in names:
        assert relative(before[name] - after[name], local.get_parameter(name).grad) < 5e-5, name


def test_saved_model_loads_in_transformers(folder, family, serve, offload, tmp_path):
    model = load_model(folder(family))
    remote = offload(model, serve(folder(family)))
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-2))
    loss_of(model, seed=3).backward()
    optimizer.step()
    state = remote.state_dict()
    model.save_pretrained(tmp_path, state_dict=dict(state))  # it takes tied weights out of the dict
    plain, info = type(model).from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    loaded = plain.state_dict()
    assert loaded.keys() == state.keys()
    for name in state:
        assert torch.equal(loaded[name], state[name]), name
    with torch.no_grad():
        assert relative(model(tokens(4)).logits, plain.eval()(tokens(4)).logits) < F32


@pytest.mark.parametrize(
    "dtype, served, bound",
    [
        (torch.bfloat16, "f32", 2**-7),  # one rounding of x, y, dy and dx each, at 2^-9
        (torch.float16, "f32", 2**-10),
        (torch.float32, "f64", F32),  # the twin's own
        (torch.float64, "f64", 1e-12),
    ],
)
def test_activations_travel_in_their_own_dtype(folder, serve, offload, dtype, served, bound):
    wide = torch.promote_types(dtype, torch.float32)
    model, local = load_model(folder("llama")), load_model(folder("llama"), wide)
    offload(model, serve(folder("llama"), f"--dtype={served}"))
    mlp, twin = model.model.layers[1].mlp, local.model.layers[1].mlp
    x, dy = torch.randn(9, 48).to(dtype), torch.randn(9, 48).to(dtype)
    mine, theirs = x.clone().requires_grad_(), x.to(wide).requires_grad_()
    y, expected = mlp(mine), twin(theirs)
    y.backward(dy)
    expected.backward(dy.to(wide))
    assert y.dtype == mine.grad.dtype == dtype
    assert relative(y, expected) < bound
    assert relative(mine.grad, theirs.grad) < bound


def test_f64_needs_an_f64_server(folder, serve, offload):
    with pytest.raises(shardmlp.Error, match="f64") as failure:
        offload(load_model(folder("llama"), torch.float64), serve(folder("llama")))
    assert failure.value.code == "INVALID_ARGUMENT" and failure.value.reason == "INVALID_DTYPE"


@pytest.mark.parametrize("dtype, served, bound", [(torch.float64, "f64", 1e-12), (torch.float32, "bf16", 2e-2)])
def test_whole_model_in_the_dtype_that_the_server_computes_in(folder, serve, offload, dtype, served, bound):
    model, twin = load_model(folder("llama"), dtype), load_model(folder("llama"), dtype)
    offload(model, serve(folder("llama"), f"--dtype={served}"))
    loss, expected = loss_of(model, seed=5), loss_of(twin, seed=5)
    loss.backward()
    expected.backward()
    assert relative(loss, expected) < bound
    assert relative(model.get_input_embeddings().weight.grad, twin.get_input_embeddings().weight.grad) < bound
