"""Two trainer processes on gloo: DistributedDataParallel in all its modes, fully_shard, and accelerate's launcher."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import load_model, loss_of, relative, tokens
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, init_device_mesh
from torch.distributed.tensor.experimental import implicit_replication
from torch.nn.parallel import DistributedDataParallel

import shardmlp

MODES = {
    "plain": {},
    "unused": dict(find_unused_parameters=True),
    "static": dict(static_graph=True),
    "accumulate": {},
    "scaler": {},
}


def join(rank, rendezvous):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)


def seeds_of(step, mode):
    """Of each rank's batches in a step: rank -> its micro-batches."""
    count = 2 if mode == "accumulate" else 1
    return [[step * 2 * count + 2 * i + rank for i in range(count)] for rank in (0, 1)]


def scale_of(step, mode):
    """In step 1 a GradScaler's loss overflows."""
    return 1e38 if (mode, step) == ("scaler", 1) else 1.0


def data_parallel_trainer(rank, folder, targets, rendezvous, results):
    join(rank, rendezvous)
    for mode, target in targets.items():
        module = load_model(folder)
        remote = shardmlp.offload(module, target, trainer_count=2, trainer_rank=rank)
        model = DistributedDataParallel(module, **MODES[mode])
        optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=mode == "scaler")
        norms = []
        for step in range(3):
            *first, last = seeds_of(step, mode)[rank]
            for seed in first:
                with model.no_sync():
                    loss_of(model, seed).backward()
            scaler.scale(loss_of(model, last) * scale_of(step, mode)).backward()
            scaler.unscale_(optimizer)
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        torch.save((norms, scaler.get_scale(), remote.step, remote.state_dict()), results / f"{mode}{rank}")
        remote.close()
    torch.distributed.destroy_process_group()


def local_run(folder, mode):
    """One trainer that sees both ranks' batches."""
    model = load_model(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, enabled=mode == "scaler")
    norms = []
    for step in range(3):
        for seeds in seeds_of(step, mode):
            for seed in seeds:
                scaler.scale(loss_of(model, seed) / 2 * scale_of(step, mode)).backward()
        scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return norms, scaler.get_scale(), model.state_dict()


def test_distributed_data_parallel_in_every_mode(folder, serve, tmp_path):
    targets = {mode: serve(folder("llama")).target for mode in MODES}
    arguments = (folder("llama"), targets, tmp_path / "rendezvous", tmp_path)
    torch.multiprocessing.spawn(data_parallel_trainer, arguments, nprocs=2)
    for mode in MODES:
        expected_norms, expected_scale, weights = local_run(folder("llama"), mode)
        for rank in (0, 1):
            norms, scale, steps, state = torch.load(tmp_path / f"{mode}{rank}")
            assert norms == pytest.approx(expected_norms, rel=1e-5, nan_ok=True), mode
            assert scale == expected_scale, mode
            assert steps == (2 if mode == "scaler" else 3), mode
            assert max(relative(state[name], w) for name, w in weights.items()) < 1e-4, mode


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def sharded_trainer(rank, folder, target, rendezvous, results):
    join(rank, rendezvous)
    mesh = init_device_mesh("cpu", (2,))
    model = load_model(folder)
    remote = shardmlp.offload(model, target, trainer_count=2, trainer_rank=rank)
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh, ignored_params=remote.placeholders())
    fully_shard(model, mesh=mesh, ignored_params=remote.placeholders())
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
    norms = []
    for step in range(3):
        loss_of(model, seeds_of(step, "sharded")[rank][0]).backward()
        with implicit_replication():
            norms.append(full(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)).item())
        optimizer.step()
        optimizer.zero_grad()
    torch.save((norms, {name: full(t) for name, t in remote.state_dict().items()}), results / str(rank))

    forgetful = load_model(folder)
    remote.close()
    with shardmlp.offload(forgetful, target, trainer_count=2, trainer_rank=rank, resume=True):
        fully_shard(forgetful, mesh=mesh)
        try:
            loss_of(forgetful, 1)
        except shardmlp.Error as error:
            (results / f"refusal{rank}").write_text(str(error))
    torch.distributed.destroy_process_group()


def test_fully_shard_of_what_remains_local(folder, serve, tmp_path):
    arguments = (folder("llama"), serve(folder("llama")).target, tmp_path / "rendezvous", tmp_path)
    torch.multiprocessing.spawn(sharded_trainer, arguments, nprocs=2)
    expected, _, weights = local_run(folder("llama"), "sharded")
    for rank in "01":
        norms, state = torch.load(tmp_path / rank)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert max(relative(state[name], w) for name, w in weights.items()) < 1e-4
        assert "model.layers.0.mlp.gate_proj.weight was replaced" in (tmp_path / f"refusal{rank}").read_text()


SCRIPT = """
import sys, torch, shardmlp
from accelerate import Accelerator
from models import load_model, tokens

folder, target, results = sys.argv[1:]
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = load_model(folder)
remote = shardmlp.offload(
    model, target, trainer_count=accelerator.num_processes, trainer_rank=accelerator.process_index
)
optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
batches = torch.utils.data.DataLoader([tokens(seed, batch=1)[0] for seed in range(16)], batch_size=2)
model, optimizer, batches = accelerator.prepare(model, optimizer, batches)
norms = []
for ids in batches:
    with accelerator.accumulate(model):
        accelerator.backward(model(input_ids=ids, labels=ids).loss)
        if accelerator.sync_gradients:
            norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
state = accelerator.get_state_dict(model)
if accelerator.is_main_process:
    torch.save((norms, remote.step, state), results)
remote.close()
accelerator.end_training()
"""


LAUNCHERS = {
    1: ["accelerate.commands.launch", "--cpu", "--num_processes=1", "--num_machines=1", "--mixed_precision=no"]
    + ["--dynamo_backend=no"],
    # What accelerate starts with several processes; of CPUs, it asks mpirun for it.
    2: ["torch.distributed.run", "--nproc-per-node=2", "--standalone"],
}


@pytest.mark.parametrize("processes", LAUNCHERS)
def test_launched_script_of_accelerate(folder, serve, tmp_path, processes):
    """Sees the batches of a local run, in its order, as many at a time as there are processes."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", *LAUNCHERS[processes]]
    here = Path(__file__).parent
    path = {"PYTHONPATH": os.pathsep.join([str(here), os.environ.get("PYTHONPATH", "")])}
    script = [tmp_path / "train.py", folder("llama"), serve(folder("llama")).target, tmp_path / "results"]
    subprocess.run([*command, *script], check=True, env=os.environ | path | {"OMP_NUM_THREADS": "1"})

    local = load_model(folder("llama"))
    optimizer = torch.optim.AdamW(local.parameters(), lr=1e-3, eps=1e-4)
    micro = [torch.cat([tokens(i, batch=1), tokens(i + 1, batch=1)]) for i in range(0, 16, 2)]
    expected = []
    for start in range(0, 8, 2 * processes):
        for ids in micro[start : start + 2 * processes]:
            (local(input_ids=ids, labels=ids).loss / (2 * processes)).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(local.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    norms, steps, state = torch.load(tmp_path / "results")
    assert steps == len(expected)
    assert norms == pytest.approx(expected, rel=1e-5)
    assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-4
