"""bf16 weight gradients in few tiles and in many, against f64 from the same operands, next to DeepSpeed's TiledMLP."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from weight_gradients import Exact, difference, of_local, of_server, tiled, workspace_for

MLP = "model.layers.0.mlp"
TOKENS = 4096
HIDDEN, INTERMEDIATE = 64, 192
COMPUTED = 'shardmlp_stage_seconds_count{pass="backward",stage="compute"}'


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    torch.manual_seed(0)
    sizes = dict(hidden_size=HIDDEN, intermediate_size=INTERMEDIATE, num_hidden_layers=1, num_attention_heads=1)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=8, bos_token_id=0, eos_token_id=0, **sizes))
    model.to(torch.bfloat16).save_pretrained(folder := tmp_path_factory.mktemp("llama"))
    return folder


@pytest.fixture(scope="module")
def operands():
    """x and dy [1, T, H], each with a mean beside what differs from token to token, as a trained model's have."""
    tokens = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(0))
    means = torch.randn(2, 1, HIDDEN, generator=torch.Generator().manual_seed(1))
    return (tokens + 0.5 * means).to(torch.bfloat16)[:, None]


def load(path):
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)


@pytest.fixture
def gradients(path, serve, offload, operands):
    """gradients(tiles) -> the server's, and TiledMLP's."""
    x, dy = operands

    def compute(tiles):
        workspace = workspace_for(TOKENS // tiles, HIDDEN, INTERMEDIATE, x.element_size())
        server = serve(path, "--dtype=bf16", "--metrics-address=127.0.0.1:0", workspace)
        model = load(path)
        remote = offload(model, server)
        model.get_submodule(MLP)(x).backward(dy)
        assert server.metric(COMPUTED) == tiles
        local = load(path).get_submodule(MLP)
        tiled(local, x.clone().requires_grad_(), tiles).backward(dy)
        return of_server(remote, server.checkpoints, MLP)[0], of_local(local)

    return compute


def test_a_gradient_of_64_tiles_is_ten_times_closer_than_tiledmlp_to_the_exact_one(path, operands, gradients):
    exact = Exact(load(path).get_submodule(MLP))
    exact.add(*operands)
    ours, theirs = (exact.error_of(g) for g in gradients(tiles=64))
    print(f"errors {ours:.1e} and {theirs:.1e}")
    assert 10 * ours < theirs


def test_tiles_do_not_show_in_a_gradient(gradients):
    """TiledMLP rounds its sums to bf16 after each tile."""
    ours, theirs = (difference(many, one) for many, one in zip(gradients(tiles=64), gradients(tiles=1)))
    print(f"64 tiles differ from one by {ours:.1e} and {theirs:.1e}")
    assert ours < 1e-5
    assert theirs > 5e-3
