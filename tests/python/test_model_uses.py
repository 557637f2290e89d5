"""What people do with a model besides training it: conversion, copies, evaluation, generation, unwrapping."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from accelerate.utils import extract_model_from_parallel
from models import load_model, loss_of, relative, tokens

import shardmlp


def there_and_back(model):
    return model.double().float()


def gradients_too(model):
    loss_of(model, 1).backward()
    there_and_back(model)
    for p in model.parameters():
        p.grad = None
    return model


@pytest.mark.parametrize("convert", [there_and_back, gradients_too, lambda model: model.to("cpu", torch.float32)])
def test_conversion_keeps_the_parameters(twins, convert):
    """The same objects, so that the optimizer still holds them, and their gradients the server's."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    before = list(twins.model.parameters())
    for model, _ in twins.each():
        convert(model)
    assert all(mine is theirs for mine, theirs in zip(before, twins.model.parameters(), strict=True))
    for seed in (1, 2):
        twins.step(seed)
    assert twins.remote.step == 2
    assert twins.difference() < 1e-5


def test_conversion_to_bf16(twins):
    """x travels in it, and the server's own weights stay what they are."""
    for model in (twins.model, twins.local):
        model.to(torch.bfloat16)
    mine, theirs = loss_of(twins.model, 1), loss_of(twins.local, 1)
    mine.backward()
    assert mine.item() == pytest.approx(theirs.item(), rel=2e-2)
    weight = twins.model.model.layers[0].mlp.up_proj.weight
    assert weight.grad.dtype == weight.dtype == torch.bfloat16


def test_meta_infers_shapes_and_asks_no_server(twins):
    weight = twins.model.model.layers[0].mlp.up_proj.weight
    twins.model.to("meta")
    assert twins.model.lm_head.weight.is_meta
    assert twins.model.model.layers[0].mlp.up_proj.weight is weight and weight.device.type == "cpu"
    y = twins.model.model.layers[0].mlp(torch.empty(2, 5, 48, device="meta"))
    assert y.is_meta and y.shape == (2, 5, 48)


@pytest.mark.parametrize("path", ["", "model.layers.0.mlp", "model.layers.0.mlp.up_proj"])
def test_copies_are_refused_with_what_to_do(twins, path):
    """Of the model, an MLP, and a part of one, as PEFT's modules_to_save copies."""
    module = twins.model.get_submodule(path)
    for duplicate in (copy.deepcopy, lambda m: torch.save(m, io.BytesIO())):
        with pytest.raises(TypeError, match=r"model.layers.0.mlp.* is offloaded to unix:.*take model.state_dict\(\)"):
            duplicate(module)


def test_saved_state_dict_is_a_plain_model(twins, folder):
    twins.optimize(torch.optim.SGD, lr=0.2)
    twins.step(1)
    file = io.BytesIO()
    torch.save(twins.model.state_dict(), file)
    file.seek(0)
    plain = load_model(folder("llama"))
    plain.load_state_dict(torch.load(file))
    with torch.no_grad():
        assert relative(plain(tokens(2)).logits, twins.local(tokens(2)).logits) < 1e-4


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_evaluation_keeps_nothing(twins, mode):
    with mode():
        logits = twins.model(tokens(1)).logits
    assert relative(logits, twins.local(tokens(1)).logits) < 1e-5
    assert logits.grad_fn is None
    assert twins.remote._servers.connections[0].session.pending_row_count == 0


@pytest.mark.parametrize("use_cache", [True, False])
def test_generation(twins, use_cache):
    """Between a backward and its step, as an evaluation callback does: it is in nobody's way."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    for model in (twins.model, twins.local):
        loss_of(model, 1).backward()
    pending = twins.remote._servers.connections[0].session.pending_row_count
    options = dict(max_new_tokens=8, min_new_tokens=8, do_sample=False, use_cache=use_cache)
    texts = [model.generate(tokens(3), **options) for model in (twins.model, twins.local)]
    assert torch.equal(*texts) and texts[0].shape == (2, 15)
    assert twins.remote._servers.connections[0].session.pending_row_count == pending
    for _, optimizer in twins.each():
        optimizer.step()
    assert twins.difference() < 1e-5


@pytest.mark.parametrize("wrap", [torch.nn.DataParallel, torch.compile])
def test_unwrapping(twins, wrap):
    assert extract_model_from_parallel(wrap(twins.model), keep_torch_compile=False) is twins.model


def test_parameter_that_was_replaced_is_refused(twins):
    twins.model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.empty(0))
    with pytest.raises(shardmlp.Error, match="layers.1.mlp.up_proj.weight was replaced .*ignored_params=remote.place"):
        loss_of(twins.model, 1)


def test_optimizer_whose_parameters_were_taken_over_is_refused(twins):
    """As DeepSpeed's ZeRO puts flat partitions of its own into the groups: the local half is not done alone."""
    twins.optimize(torch.optim.SGD, lr=0.2)
    loss_of(twins.model, 1).backward()
    partition = torch.nn.Parameter(torch.ones(4))
    partition.grad = torch.ones(4)
    twins.mine.param_groups[0]["params"] = [partition]
    with pytest.raises(ValueError, match="holds none of the server's tensors.*DeepSpeed's ZeRO"):
        twins.mine.step()
    assert twins.remote.step == 0 and torch.equal(partition.detach(), torch.ones(4))
