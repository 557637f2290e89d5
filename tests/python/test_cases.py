"""What users of tiled MLPs reported of other implementations, by project and number, and others of the kind: here each is
right. Rows that tests elsewhere are about are named there."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch
from models import load_model, loss_of, relative
from transformers import LlamaConfig, LlamaForCausalLM
from twins import Twins

F32 = 1e-5
SMALL_TILES = "--workspace-bytes=16KiB"  # a few rows each


class OneMlp:
    """A model of one layer and little else, its MLP on a server and, as `twin`, local."""

    def __init__(self, tmp_path, serve, offload, *flags, hidden=128, intermediate=96, dtype=torch.float32, **config):
        config = LlamaConfig(
            vocab_size=8,
            hidden_size=hidden,
            intermediate_size=intermediate,
            num_hidden_layers=1,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=8,
            **config,
        )
        LlamaForCausalLM(config).to(dtype).save_pretrained(tmp_path)
        self.model = load_model(tmp_path, dtype)
        self.twin = load_model(tmp_path, dtype).model.layers[0].mlp
        self.server = serve(tmp_path, *flags)
        self.remote = offload(self.model, self.server)
        self.mlp = self.model.model.layers[0].mlp
        self.optimizer = self.remote.wrap(torch.optim.SGD(self.model.parameters(), lr=1.0))

    @property
    def tile_rows(self) -> int:
        return int(re.search(r"tiles of (\d+) rows", self.server.log.read_text())[1])

    def weight_gradients(self):
        """By name, of what has been through backward: what a step of rate 1 takes away."""
        names = [f"{part}_proj.weight" for part in ("gate", "up", "down")]
        before, _ = self.remote.state_dict(), self.optimizer.step()
        after = self.remote.state_dict()
        self.optimizer.zero_grad()
        return {name: (before[key] - after[key]) for name in names for key in [f"model.layers.0.mlp.{name}"]}

    def assert_same(self, x, dy, bound=F32):
        mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = self.mlp(mine), self.twin(theirs)
        y.backward(dy)
        expected.backward(dy)
        assert relative(y, expected) < bound and relative(mine.grad, theirs.grad) < bound
        for name, gradient in self.weight_gradients().items():
            assert relative(gradient, self.twin.get_parameter(name).grad) < 10 * bound, name
        with torch.no_grad():
            for name in [name for name, _ in self.twin.named_parameters()]:
                self.twin.get_parameter(name).copy_(self.remote.state_dict()[f"model.layers.0.mlp.{name}"])
                self.twin.get_parameter(name).grad = None


def test_kernels_community_1081_each_gradient_is_final_once_a_step(folder, serve, offload):
    """Several MLP layers, two trainers, several tiles: one sum of each, whatever the tiles."""
    server = serve(folder("llama"), SMALL_TILES, "--metrics-address=127.0.0.1:0")
    models = [load_model(folder("llama")) for _ in range(2)]
    remotes = [offload(model, server, trainer_rank=rank, trainer_count=2) for rank, model in enumerate(models)]
    for rank, model in enumerate(models):
        loss_of(model, rank, length=30).backward()
    for remote in remotes:  # none waits for the other's tiles
        assert remote.step == 0
    twin = load_model(folder("llama"))
    for seed in range(2):
        (loss_of(twin, seed, length=30) / 2).backward()
    from test_steps import together

    norms = together(*[lambda m=m: m.model.layers[1].mlp.up_proj.weight.grad.norm().item() for m in models])
    expected = twin.model.layers[1].mlp.up_proj.weight.grad.norm().item()
    assert norms == pytest.approx([expected, expected], rel=1e-5)
    assert server.metric('shardmlp_step_phase_seconds_count{phase="sync"}') == 1


def test_kernels_community_1000_and_liger_893_ranks_need_not_agree_on_tiles(folder, serve, offload):
    """One trainer's whole pass of many tiles, then another's of one, from one thread: a wait for each other would hang."""
    server = serve(folder("llama"), SMALL_TILES)
    models = [load_model(folder("llama")) for _ in range(2)]
    for rank, model in enumerate(models):
        offload(model, server, trainer_rank=rank, trainer_count=2)
    for model, length in zip(models, (40, 1)):
        loss = loss_of(model, 1, length=length + 1)
        loss.backward()
        assert loss.isfinite()


def test_liger_1128_micro_batches_add_up_and_are_summed_once(folder, serve, offload):
    server = serve(folder("llama"), SMALL_TILES, "--metrics-address=127.0.0.1:0")
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, server)
    for m, optimizer in (
        (model, remote.wrap(torch.optim.SGD(model.parameters(), lr=0.2))),
        (local, torch.optim.SGD(local.parameters(), lr=0.2)),
    ):
        for seed in range(3):
            loss_of(m, seed).backward()
        optimizer.step()
    mine = remote.state_dict()
    assert max(relative(mine[name], weights) for name, weights in local.state_dict().items()) < F32
    assert server.metric('shardmlp_step_phase_seconds_count{phase="sync"}') == 1


def test_deepspeed_7412_and_7422_batches_in_shards(tmp_path, serve, offload):
    """Batch 2, sequence 125, hidden 128, four tiles and more."""
    one = OneMlp(tmp_path, serve, offload, "--workspace-bytes=64KiB")
    assert 250 / one.tile_rows >= 4
    one.assert_same(torch.randn(2, 125, 128), torch.randn(2, 125, 128))


def test_deepspeed_7622_tokens_without_a_batch(tmp_path, serve, offload):
    OneMlp(tmp_path, serve, offload).assert_same(torch.randn(7, 128), torch.randn(7, 128))


def test_deepspeed_7780_a_second_step_is_as_right_as_the_first(tmp_path, serve, offload):
    """Backward of something that is no scalar, too."""
    one = OneMlp(tmp_path, serve, offload, SMALL_TILES)
    for _ in range(3):
        one.assert_same(torch.randn(2, 9, 128), 1e-3 * torch.randn(2, 9, 128))


def test_deepspeed_7477_evaluation_keeps_nothing(tmp_path, serve, offload):
    one = OneMlp(tmp_path, serve, offload)
    one.model.requires_grad_(False)
    y = one.mlp(torch.randn(3, 128))
    assert y.grad_fn is None
    assert one.remote._servers.connections[0].session.pending_row_count == 0


@pytest.mark.parametrize("served", ["f32", "bf16"])
def test_axolotl_2865_the_gradient_norm_does_not_drift_with_tiles(tmp_path, serve, offload, served):
    """64 tiles and one of bf16 rows: f32 sums, so that the norms are equal but for the order of adding."""
    x, dy = torch.randn(512, 128).bfloat16(), torch.randn(512, 128).bfloat16()
    norms = []
    for flags in ([], ["--workspace-bytes=8KiB"]):
        torch.manual_seed(1)
        one = OneMlp(tmp_path, serve, offload, f"--dtype={served}", *flags)
        one.mlp(x).backward(dy)
        norms.append([p.grad.norm().item() for p in one.mlp.parameters()])
    assert 512 / one.tile_rows >= 64
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    twin = one.twin.to(torch.bfloat16 if served == "bf16" else torch.float32).double()
    twin(x.double()).backward(dy.double())
    assert norms[1] == pytest.approx([p.grad.norm().item() for p in twin.parameters()], rel=2**-8)


def test_axolotl_2891_a_single_replica_touches_no_network(folder, serve):
    server = serve(folder("llama"))  # on a Unix socket, without metrics
    server.await_serving()
    process = Path(f"/proc/{server._process.pid}")
    sockets = {os.readlink(fd) for fd in (process / "fd").iterdir() if "socket:" in os.readlink(fd)}
    inodes = {
        line.split()[9]
        for table in ("tcp", "tcp6", "udp", "udp6")
        for line in (process / "net" / table).read_text().splitlines()[1:]
    }
    assert sockets and not {f"socket:[{inode}]" for inode in inodes} & sockets


def test_axolotl_3666_memory_is_planned_printed_and_refused_up_front(folder):
    command = [os.environ["SHARDMLP_SERVER"], f"--model={folder('llama')}", "--metrics-address=", "--memory-bytes=1MiB"]
    ended = subprocess.run([*command, "--listen=127.0.0.1:0"], capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    for line in ("gradients", "optimizer state", "workspace", "total"):
        assert line in ended.stdout + ended.stderr
    assert re.search(r"1\.0 MiB|1048576|1 MiB", ended.stderr)


def test_transformers_48335_the_models_own_activation_is_computed(tmp_path, serve, offload):
    one = OneMlp(tmp_path, serve, offload, hidden_act="gelu")
    assert "gelu" in one.remote.report()
    one.assert_same(torch.randn(5, 128), torch.randn(5, 128))


@pytest.mark.parametrize("flags", [[], [SMALL_TILES]])
def test_transformers_46575_and_ms_swift_7090_each_product_is_computed_once(tmp_path, serve, offload, flags):
    """3 GEMMs forward and 6 backward of all rows, and 2 recomputed, whatever the tiles: no schedule within another."""
    one = OneMlp(tmp_path, serve, offload, "--metrics-address=127.0.0.1:0", *flags)
    useful, recomputed = (f'shardmlp_gemm_flops_total{{kind="{kind}"}}' for kind in ("useful", "recomputed"))
    before = one.server.metric(useful)  # of comparing outputs when it was offloaded
    x = torch.randn(250, 128, requires_grad=True)
    one.mlp(x).sum().backward()
    one.optimizer.step()  # when it answers, all was counted
    gemm = 2 * 250 * 128 * 96
    assert one.server.metric(useful) - before == 9 * gemm
    assert one.server.metric(recomputed) == 2 * gemm


@pytest.mark.parametrize("hidden", [45, 2880])
@pytest.mark.parametrize("rows", [0, 1, 5])
def test_odd_sizes(tmp_path, serve, offload, hidden, rows):
    one = OneMlp(tmp_path, serve, offload, hidden=hidden, intermediate=33)
    one.assert_same(torch.randn(rows, hidden), torch.randn(rows, hidden))


def test_layer_that_no_token_reaches_takes_part_with_zero(folder, serve, offload):
    """As an expert without tokens: momentum and decay go on where its gradient is zero rather than missing."""
    twins = Twins(folder, serve, offload)
    twins.optimize(torch.optim.SGD, lr=0.1, momentum=0.9)
    twins.step(1)
    for model, optimizer in twins.each():
        loss_of(model, 2).backward()
        layer = model.model.layers[1].mlp
        model.zero_grad()
        layer(torch.randn(0, 48)).sum().backward()
        optimizer.step()
    assert twins.difference() < F32
