"""Which modules are swapped, what stays of them, and what is refused by name."""

from __future__ import annotations

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from models import load_model, loss_of, mlp_names, mlps, relative, tokens
from torch import nn

import shardmlp
from shardmlp.matching import match_layers


def test_swapped_mlps_hold_no_memory_and_keep_their_names(folder, family, serve, offload):
    model = load_model(folder(family))
    before = {name: (p, p.shape, p.dtype) for name, p in model.named_parameters()}
    names, paths = mlp_names(model), list(mlps(model))
    mlp_bytes = sum(4 * model.get_parameter(name).numel() for name in names)
    remote = offload(model, serve(folder(family)))
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    for name, (parameter, shape, dtype) in before.items():
        assert after[name] is parameter and parameter.dtype == dtype and parameter.requires_grad
        assert parameter.shape == ((0,) if name in names else shape), name
    assert sum(layer.freed_bytes for layer in remote.layers) == mlp_bytes
    assert [layer.path for layer in remote.layers] == paths
    assert [layer.module.layer.layer for layer in remote.layers] == [0, 1, 2]


def test_report_names_what_was_swapped(folder, serve, offload):
    model = load_model(folder("llama"))
    model.model.layers[1].mlp.requires_grad_(False)
    table = offload(model, serve(folder("llama"))).report().splitlines()
    assert table[0].split() == ["layer", "module", "H", "I", "O", "activation", "trained", "freed", "MiB"]
    assert "model.layers.1.mlp" in table[2] and "silu, gated" in table[2] and "0 of 3" in table[2]
    assert "3 of 3" in table[3]
    assert table[4].startswith("3 MLPs on unix:")


def test_base_model_without_its_prefix(folder, serve, offload):
    for family, base in (("llama", "model"), ("gpt2", "transformer"), ("opt", "model"), ("bert", "bert")):
        model, local = load_model(folder(family)), load_model(folder(family))
        offload(getattr(model, base), serve(folder(family)))
        with torch.no_grad():
            assert relative(model(tokens(1)).logits, local(tokens(1)).logits) < 1e-5


def test_wrapped_model(folder, serve, offload):
    class Wrapper(nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    model = load_model(folder("llama"))
    remote = offload(Wrapper(Wrapper(model)), serve(folder("llama")))
    assert remote.layers[0].path == "module.module.model.layers.0.mlp"
    assert isinstance(model.model.layers[2].mlp, shardmlp.RemoteMLP)


def test_server_of_some_layers(folder, serve, offload):
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama"), "--layers=1-2"))
    assert [layer.path for layer in remote.layers] == ["model.layers.1.mlp", "model.layers.2.mlp"]
    assert not isinstance(model.model.layers[0].mlp, shardmlp.RemoteMLP)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    twin = torch.optim.SGD(local.parameters(), lr=0.1)
    loss_of(model, seed=1).backward()
    loss_of(local, seed=1).backward()
    optimizer.step()
    twin.step()
    for name, weights in remote.state_dict().items():
        assert relative(weights, local.state_dict()[name]) < 1e-5, name


def test_mlps_that_never_were_in_memory(folder, serve, offload):
    """A trainer may build them on the meta device."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    for layer in model.model.layers:
        layer.mlp.to("meta")
    remote = offload(model, serve(folder("llama")))
    assert sum(layer.freed_bytes for layer in remote.layers) == 0
    loss, expected = loss_of(model, seed=1), loss_of(local, seed=1)
    loss.backward()
    assert relative(loss, expected) < 1e-5


class Adapted(nn.Module):
    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(48, 2, bias=False)


def lora(mlp):
    mlp.up_proj = Adapted(mlp.up_proj)


def replaced_forward(mlp):
    mlp.forward = lambda x: x


def other_shape(mlp):
    mlp.down_proj = nn.Linear(80, 47, bias=False)


def surplus_bias(mlp):
    mlp.down_proj = nn.Linear(80, 48, bias=True)


def missing_tensor(mlp):
    mlp.gate_proj = nn.Identity()


def other_activation(mlp):
    mlp.act_fn = nn.GELU()


def nearly_the_activation(mlp):
    class Swish(nn.Module):
        def forward(self, x):
            return x * torch.sigmoid(1.0000001 * x)

    mlp.act_fn = Swish()


def inner_dropout(mlp):
    mlp.drop = nn.Dropout(0.1)


def other_forward(mlp):
    """As a class of the user's own has."""
    kind = type(mlp)
    mlp.__class__ = type("OtherMLP", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})


def other_class(layer):
    class OtherLayer(type(layer)):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    layer.__class__ = OtherLayer


def quantized_linear(mlp):
    class Linear4bit(nn.Linear):
        pass

    mlp.up_proj.__class__ = Linear4bit


@pytest.mark.parametrize(
    "change, message",
    [
        (lora, "mlp.up_proj.base_layer.weight.*adapters"),
        (lambda mlp: mlp.up_proj.register_forward_hook(print), "mlp.up_proj: it has a hook"),
        (lambda mlp: mlp.register_full_backward_hook(print), "mlp: it has a hook"),
        (lambda mlp: mlp.up_proj.weight.register_hook(print), "mlp.up_proj.weight: it has a gradient hook"),
        (replaced_forward, "mlp: its forward was replaced"),
        (other_shape, r"mlp.down_proj.weight: got \[47, 80\], the server has \[48, 80\]"),
        (surplus_bias, "mlp.down_proj.bias: the server has no such tensor"),
        (missing_tensor, r"mlp.gate_proj.weight: the server has model.layers.1.mlp.gate_proj.weight \[80, 48\]"),
        (lambda mlp: mlp.register_buffer("scale", torch.ones(1)), "mlp.scale: the server has no such buffer"),
        (lambda mlp: mlp.to(torch.float8_e4m3fn), "mlp.gate_proj.weight: got a torch.float8_e4m3fn tensor"),
        (other_activation, "mlp.act_fn: it differs from the server's silu"),
        (nearly_the_activation, "mlp.act_fn: it differs from the server's silu"),
        (inner_dropout, "mlp.drop: dropout 0.1 inside the MLP"),
        (quantized_linear, "mlp.up_proj: got a Linear4bit"),
        (other_forward, "mlp: its output differs from the server's by"),
        (lambda mlp: mlp.up_proj.weight.data.mul_(1.5), "mlp.up_proj.weight: its weights are not those of the server"),
    ],
)
def test_what_the_server_would_not_compute_is_refused_by_name(folder, serve, offload, change, message):
    model = load_model(folder("llama"))
    change(model.model.layers[1].mlp)
    server = serve(folder("llama"))
    with pytest.raises((ValueError, TypeError), match="cannot offload model.layers.1." + message):
        offload(model, server)
    assert not any(isinstance(module, shardmlp.RemoteMLP) for module in model.modules())
    assert model.model.layers[0].mlp.up_proj.weight.numel() > 0
    offload(load_model(folder("llama")), server)  # the refusal left the trainer's place free


@pytest.mark.parametrize(
    "family, change, message",
    [
        ("opt", lambda layer: layer.fc2.register_forward_hook(print), "fc2: it has a hook"),
        ("opt", lambda layer: setattr(layer, "fc2", nn.Linear(80, 48, bias=False)), "fc2.bias: the server has"),
        ("opt", lambda layer: setattr(layer, "activation_fn", nn.GELU()), "activation_fn: it differs from .* relu"),
        ("opt", other_class, "fc1: the layer's forward is .*OtherLayer.forward, expected OPTDecoderLayer.forward"),
        ("opt", lambda layer: layer.fc2.weight.data.mul_(1.5), "fc2.weight: its weights are not those of the server"),
        ("bert", lambda layer: setattr(layer.intermediate, "intermediate_act_fn", nn.ReLU()), "intermediate_act_fn: "),
        ("bert", lambda layer: setattr(layer.output, "dense", Adapted(layer.output.dense)), "dense.base_layer.*adapt"),
    ],
)
def test_every_part_of_an_mlp_without_a_module_of_its_own_is_checked(folder, serve, offload, family, change, message):
    model = load_model(folder(family))
    path = list(mlps(model))[1].rpartition(".")[0]
    change(model.get_submodule(path))
    with pytest.raises(ValueError, match=f"cannot offload {path}.*{message}"):
        offload(model, serve(folder(family)))
    assert not any(isinstance(module, shardmlp.RemoteMLP) for module in model.modules())


def test_tensors_of_a_family_that_only_the_server_knows(folder, serve):
    """As where the server is newer than this package."""
    served = shardmlp.connection.Connection(serve(folder("opt")).target, 1, shardmlp.Timeouts()).model
    unknown = SimpleNamespace(model_type="opt2", layers=served.layers, tensors=served.tensors)
    with pytest.raises(ValueError, match="layers.0.fc1: where .*layers.0.fc2.weight is in a opt2 model is not"):
        match_layers(load_model(folder("opt")), unknown)


def test_model_of_another_size_is_refused(folder, serve, offload):
    with pytest.raises(ValueError, match="cannot offload model.layers.0.mlp: the server owns it"):
        offload(load_model(folder("gpt2")), serve(folder("llama")))


def test_servers_of_one_model_are_named_in_one_call(folder, serve, offload):
    """Two calls would be two steps, each of which could commit without the other."""
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama"), "--layers=0"))
    with pytest.raises(ValueError, match=r"cannot offload model.layers.0.mlp: it is offloaded already; .*offload\(model, \[target"):
        offload(model, serve(folder("llama"), "--layers=1"))


def test_mlps_that_share_a_parameter_are_refused(folder, serve, offload):
    model = load_model(folder("llama"))
    first, second = (layer.mlp for layer in model.model.layers[:2])
    second.up_proj.weight = first.up_proj.weight
    match = "cannot offload model.layers.1.mlp.up_proj.weight: it is one parameter with model.layers.0.mlp.up_proj"
    with pytest.raises(ValueError, match=match):
        offload(model, serve(folder("llama")))
    assert not any(isinstance(module, shardmlp.RemoteMLP) for module in model.modules())


def test_target_without_a_server_is_refused(folder):
    with pytest.raises(ValueError, match="target names no server"):
        shardmlp.offload(load_model(folder("llama")), [])


def test_parts_of_an_offloaded_mlp_cannot_be_called(folder, serve, offload):
    """As kernels that replace an MLP's forward would, which would compute with what is not there."""
    model = load_model(folder("llama"))
    server = serve(folder("llama"))
    offload(model, server)
    mlp, x = model.model.layers[0].mlp, torch.randn(3, model.config.hidden_size)
    for part in (mlp.gate_proj, mlp.up_proj, mlp.down_proj):
        with pytest.raises(shardmlp.Error, match=r"mlp\.\w+_proj is on .*, which computes its MLP as a whole"):
            part(x)


@pytest.mark.parametrize("family, path", [("llama", "model.layers.0.mlp"), ("opt", "model.decoder.layers.0.fc1")])
def test_second_offload_is_refused(folder, serve, offload, family, path):
    model = load_model(folder(family))
    server = serve(folder(family))
    offload(model, server)
    with pytest.raises(ValueError, match=f"cannot offload {path}: it is offloaded already"):
        offload(model, server)


def test_no_server(folder, tmp_path):
    with pytest.raises(shardmlp.Error) as failure:
        shardmlp.offload(load_model(folder("llama")), f"unix:{tmp_path}/none", timeouts=shardmlp.Timeouts(connect=0.2))
    assert failure.value.code == "UNAVAILABLE"


@pytest.mark.parametrize("family, path", [("gpt2", "transformer.h.0.mlp"), ("starcoder2", "model.layers.0.mlp")])
def test_output_dropout_stays_with_the_trainer(folder, serve, offload, family, path):
    """It follows the down projection. The same seed drops the same outputs, in training alone."""
    model, local = load_model(folder(family)), load_model(folder(family))
    offload(model, serve(folder(family)))
    mlp, twin = model.get_submodule(path), local.get_submodule(path)
    x = torch.randn(64, 48)
    for training in (True, False):
        model.train(training)
        local.train(training)
        torch.manual_seed(1)
        y = mlp(x)
        torch.manual_seed(1)
        expected = twin(x)
        assert bool((expected == 0).any()) == training
        assert torch.equal(y == 0, expected == 0)
        assert relative(y, expected) < 1e-5


@pytest.mark.parametrize("family", ["opt", "bert", "gpt2", "starcoder2"])
def test_training_mode_drops_the_same(folder, serve, offload, family):
    """Dropout, residual and norm around an MLP stay as they were, wherever the family has them."""
    model, local = load_model(folder(family)).train(), load_model(folder(family)).train()
    offload(model, serve(folder(family)))
    losses = []
    for each in (model, local):
        torch.manual_seed(3)
        losses.append(loss_of(each, seed=1))
    assert relative(*losses) < 1e-5
    assert relative(losses[1], loss_of(local.eval(), seed=1)) > 1e-4  # something was dropped


def test_offloaded_model_is_not_copied_or_pickled(folder, serve, offload):
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama")))
    for duplicate in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="model.layers.0.mlp is offloaded to unix:.*state_dict"):
            duplicate(model)


def test_model_in_distributed_data_parallel_already_is_refused(folder, serve, offload, tmp_path):
    """It has made buckets for the weights, and would wait for their gradients."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(load_model(folder("llama")))
        with pytest.raises(ValueError, match="DistributedDataParallel already: offload it first"):
            offload(model, serve(folder("llama")))
    finally:
        torch.distributed.destroy_process_group()
