"""shardmlp.from_pretrained: as transformers loads a model and offload swaps its MLPs, without ever holding these."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap

import huggingface_hub
import pytest
import torch
from conftest import QUICK
from models import load_model, loss_of, mlp_names, relative, tokens
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

import shardmlp


@pytest.fixture
def load():
    """shardmlp.from_pretrained whose session is closed after the test."""
    remotes: list[shardmlp.Remote] = []

    def call(folder, server, **options):
        model, remote = shardmlp.from_pretrained(folder, server.target, **{"timeouts": QUICK, **options})
        remotes.append(remote)
        return model, remote

    yield call
    for remote in remotes:
        remote.close()


def test_it_is_what_loading_and_offloading_give(folder, family, serve, load, offload):
    """Parameters, their order and names, buffers, ties, modes, logits and a step: bit for bit."""
    twin = load_model(folder(family))
    server = serve(folder(family))
    model, remote = load(folder(family), server)
    assert type(model) is type(twin) and not any(module.training for module in model.modules())
    expected = dict(twin.named_parameters())
    assert list(dict(model.named_parameters())) == list(expected)
    for name, p in model.named_parameters():
        assert p.device.type == "cpu" and p.dtype == expected[name].dtype and p.requires_grad
        assert p.numel() == 0 if name in mlp_names(twin) else torch.equal(p, expected[name]), name
    buffers = dict(model.named_buffers())
    assert list(buffers) == list(dict(twin.named_buffers()))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in twin.named_buffers())
    assert model.config.to_dict() == twin.config.to_dict()

    results = []
    theirs = serve(folder(family))
    for each, its_remote in ((model, remote), (twin, offload(twin, theirs))):
        optimizer = its_remote.wrap(torch.optim.SGD(each.parameters(), lr=0.1))
        loss = loss_of(each, seed=1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            results.append((loss, each(tokens(2)).logits, its_remote.state_dict()))
    (loss, logits, state), (its_loss, its_logits, its_state) = results
    assert torch.equal(loss, its_loss) and torch.equal(logits, its_logits)
    assert list(state) == list(its_state) and all(torch.equal(state[name], its_state[name]) for name in state)


@pytest.mark.parametrize("change", ["base", "prefixed", "sharded"])
def test_files_of_a_base_model_and_in_shards(folder, serve, load, tmp_path, change):
    """The server was started from the other kind of folder: names have a first part more, or less."""
    model = load_model(folder("llama"))
    (model.model if change == "base" else model).save_pretrained(
        tmp_path, max_shard_size="40KB" if change == "sharded" else "1GB"
    )
    served = folder("llama")
    if change == "prefixed":
        served = tmp_path / "base"
        model.model.save_pretrained(served)
    kind = type(model.model) if change == "base" else None
    mine, _ = load(tmp_path, serve(served), model_class=kind)
    assert type(mine) is (kind or type(model))
    with torch.no_grad():
        expected = (model.model if change == "base" else model)(tokens(1))[0]
        assert relative(mine(tokens(1))[0], expected) < 1e-5


def test_name_on_the_hub(folder, serve, load, tmp_path, monkeypatch):
    """As its cache has it."""
    cached = tmp_path / "models--someone--tiny"
    commit = "0123456789" * 4
    shutil.copytree(folder("llama"), cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs/main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, _ = load("someone/tiny", serve(folder("llama")))
    with torch.no_grad():
        assert relative(model(tokens(1)).logits, load_model(folder("llama"))(tokens(1)).logits) < 1e-5


@pytest.mark.parametrize(
    "dtype, expected", [("auto", torch.bfloat16), (torch.float32, torch.float32), ("float32", torch.float32)]
)
def test_dtype(folder, serve, load, dtype, expected):
    """Of files in bf16, from which the server computes in f32."""
    model, remote = load(folder("llama", torch.bfloat16), serve(folder("llama", torch.bfloat16), "--dtype=f32"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {expected}
    assert {weights.dtype for weights in remote.state_dict().values()} == {expected}


def test_nothing_is_reported_as_missing_or_unexpected(folder, serve, load, capfd):
    load(folder("llama"), serve(folder("llama")))
    assert "UNEXPECTED" not in capfd.readouterr().err


def test_weights_that_are_not_the_servers_are_refused_by_name(folder, serve, load, tmp_path):
    load_model(folder("llama")).save_pretrained(tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 4] += 1
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    server = serve(folder("llama"))
    with pytest.raises(ValueError, match="model.layers.1.mlp.up_proj.weight: its weights are not those of the server"):
        load(tmp_path, server)
    _, remote = load(folder("llama"), server)  # the refusal left the trainer's place free
    remote.close()
    _, remote = load(tmp_path, server, resume=True)
    name = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(remote.state_dict()[name][3, 4] + 1, state[name][3, 4])


def test_what_is_not_a_folder_of_the_servers_model(folder, serve, load, tmp_path):
    server = serve(folder("llama"))
    with pytest.raises(FileNotFoundError, match="no config.json"):
        load(tmp_path, server)
    with pytest.raises(ValueError, match="cannot offload model.layers.0.mlp: the server owns it"):
        load(folder("gpt2"), server)
    config = load_model(folder("llama")).config
    config.architectures = ["NoSuchModel"]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="transformers has no class NoSuchModel"):
        load(tmp_path, server)
    load(folder("llama"), server)


UNDER_A_LIMIT = """
    import re, resource, sys
    import torch, transformers, shardmlp

    folder, target, mib = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    taken = int(re.search(r"VmData:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
    resource.setrlimit(resource.RLIMIT_DATA, (taken + mib * 2**20,) * 2)  # beyond what the libraries have taken
    if target == "none":
        transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        sys.exit()
    model, remote = shardmlp.from_pretrained(folder, target, dtype=torch.float32)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.arange(14).reshape(2, 7)
    for _ in range(2):
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        print("loss", loss.item(), flush=True)
    remote.close()
"""


def test_model_whose_load_a_memory_limit_ends_trains_under_that_limit(serve, tmp_path):
    """384 MiB of MLPs in f32. Loading takes 690 MiB here, and training offloaded 300."""
    config = LlamaConfig(
        vocab_size=61,
        hidden_size=128,
        intermediate_size=65536,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
    LlamaForCausalLM._from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path, max_shard_size="60MB")

    def run(target: str, mib: int) -> subprocess.CompletedProcess:
        # Threads' stacks and heaps would count in full.
        environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-c", textwrap.dedent(UNDER_A_LIMIT), str(tmp_path), target, str(mib)]
        return subprocess.run(
            ["sh", "-c", 'ulimit -s 1024; exec "$@"', "sh", *command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=300,
        )

    limit = 480
    ended = run("none", limit)
    assert ended.returncode != 0 and "allocate memory" in ended.stderr, ended.stderr
    server = serve(tmp_path, "--dtype=f32")
    server.await_serving()
    trained = run(server.target, limit)
    assert trained.returncode == 0, trained.stderr
    losses = [float(line.split()[1]) for line in trained.stdout.splitlines()]
    assert len(losses) == 2 and losses[1] < losses[0]
