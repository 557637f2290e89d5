"""LoRA by PEFT on attention, with MLPs that a server holds."""

from __future__ import annotations

import peft
import pytest
import torch
from models import load_model, loss_of, relative, tokens

import shardmlp

ATTENTION = dict(r=2, lora_alpha=4, lora_dropout=0.0, init_lora_weights=False, target_modules=["q_proj", "v_proj"])


def adapted(model, **changes):
    torch.manual_seed(5)
    return peft.get_peft_model(model, peft.LoraConfig(**{**ATTENTION, **changes}))


def train(model, optimizer):
    norms = []
    for seed in range(3):
        loss_of(model, seed).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.fixture(params=["adapters after offload", "offload after adapters"])
def adapted_pair(request, folder, serve, offload):
    """A model with adapters and its MLPs on a server, and its local twin."""
    model, server = load_model(folder("llama")), serve(folder("llama"))
    if request.param == "adapters after offload":
        offload(model, server)
        model = adapted(model)
    else:
        model = adapted(model)
        offload(model, server)
    return model, adapted(load_model(folder("llama")))


def trainable(model):
    return [p for p in model.parameters() if p.requires_grad]


def test_adapters_train_as_on_a_local_model(adapted_pair, folder, tmp_path):
    model, local = adapted_pair
    got, expected = (train(m, torch.optim.AdamW(trainable(m), lr=1e-2)) for m in (model, local))
    assert got == pytest.approx(expected, rel=1e-5)
    for mine, theirs in zip(trainable(model), trainable(local), strict=True):
        assert relative(mine, theirs) < 1e-4

    model.save_pretrained(tmp_path / "adapters")
    plain = peft.PeftModel.from_pretrained(load_model(folder("llama")), tmp_path / "adapters").eval()
    model.eval(), local.eval()
    with torch.no_grad():
        expected = local(tokens(9)).logits
        assert relative(plain(tokens(9)).logits, expected) < 1e-4
        assert relative(model(tokens(9)).logits, expected) < 1e-4

        merged = model.merge_and_unload()
        assert relative(merged(tokens(9)).logits, expected) < 1e-4
        merged.save_pretrained(tmp_path / "merged")
        assert relative(load_model(tmp_path / "merged")(tokens(9)).logits, expected) < 1e-4


def test_adapters_and_mlps_that_train_together(folder, serve, offload):
    """PEFT freezes what it adapts; MLPs that are to be trained are unfrozen ahead of offload."""
    pair = [adapted(load_model(folder("llama"))) for _ in range(2)]
    for model in pair:
        for name, p in model.named_parameters():
            p.requires_grad_(p.requires_grad or ".mlp." in name)
    model, local = pair
    remote = offload(model, serve(folder("llama")))
    mine = remote.wrap(torch.optim.SGD(trainable(model), lr=0.1))
    assert train(model, mine) == pytest.approx(train(local, torch.optim.SGD(trainable(local), lr=0.1)), rel=1e-5)
    state = remote.state_dict()
    assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-5


MLP_TARGETS = [dict(target_modules=["up_proj"]), dict(target_modules="all-linear")]


@pytest.mark.parametrize("targets", MLP_TARGETS)
def test_adapters_on_an_mlp_are_refused_at_offload(folder, serve, offload, targets):
    model = adapted(load_model(folder("llama")), **targets)
    with pytest.raises(ValueError, match=r"mlp\.\w+_proj.*adapters on an MLP .*target_modules"):
        offload(model, serve(folder("llama")))
    assert not any(isinstance(module, shardmlp.RemoteMLP) for module in model.modules())


@pytest.mark.parametrize("kind", [peft.LoraConfig, peft.IA3Config])
def test_adapters_on_an_offloaded_mlp_are_refused_by_name(folder, serve, offload, kind):
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama")))
    more = dict(feedforward_modules=["up_proj"]) if kind is peft.IA3Config else {}
    with pytest.raises(ValueError, match="(?s)Placeholder.*"):
        peft.get_peft_model(model, kind(target_modules=["q_proj", "up_proj"], **more))


def test_all_linear_leaves_offloaded_mlps_alone(folder, serve, offload):
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama")))
    model = adapted(model, target_modules="all-linear")
    assert not any("lora" in name and ".mlp." in name for name, _ in model.named_parameters())
    loss_of(model, 1).backward()
