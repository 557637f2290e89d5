"""DeepSpeed's engine, on gloo: without ZeRO its step commits the server's; with ZeRO, whose optimizers hold parameters
of their own, it is refused by name before anything is committed."""

from __future__ import annotations

import os

import pytest
import torch
from models import load_model, loss_of, relative
from test_hugging_face import logged, make

import shardmlp

deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

LEARNING = dict(lr=1e-3, eps=1e-4)
OPTIMIZER = dict(type="AdamW", params=LEARNING | dict(torch_adam=True))  # as its configuration has one


def prepare(rank, count, rendezvous):
    """What DeepSpeed's launcher does, with gloo."""
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    # Else it compiles collectives of its own between the processes of one machine, for minutes.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=count)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A group of this process alone. DeepSpeed keeps hold of the first that it sees."""
    before = dict(os.environ)
    prepare(0, 1, tmp_path_factory.mktemp("alone") / "rendezvous")
    yield
    torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def engine_of(model, stage=0, **options):
    config = dict(
        train_micro_batch_size_per_gpu=2,
        gradient_clipping=0.5,
        zero_optimization=dict(stage=stage),
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    optimizer = options.pop("optimizer", None)
    parameters = None if isinstance(optimizer, torch.optim.Optimizer) else model.parameters()
    if isinstance(optimizer, dict):
        config["optimizer"], optimizer = optimizer, None
    return deepspeed.initialize(
        model=model, optimizer=optimizer, model_parameters=parameters, config=config | options
    )[0]


def run_step(engine, seed):
    loss = loss_of(engine, seed)
    engine.backward(loss)
    engine.step()
    return loss.item()


def local_step(model, optimizer, seeds):
    """Of a local model, over the mean of several ranks' batches."""
    losses = []
    for seed in seeds:
        losses.append(loss_of(model, seed) / len(seeds))
        losses[-1].backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
    return sum(losses).item()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_without_zero_it_commits(twins, alone, accumulate):
    twins.optimize(torch.optim.AdamW, **LEARNING)
    engine = engine_of(twins.model, optimizer=twins.mine, gradient_accumulation_steps=accumulate)
    for step in range(3):
        seeds = [step * accumulate + i for i in range(accumulate)]
        for seed in seeds:
            run_step(engine, seed)
        local_step(twins.local, twins.theirs, seeds)
    assert twins.remote.step == 3
    assert twins.difference() < 1e-4


def test_under_its_autocast_it_commits(twins, alone):
    """Within the noise of bf16; with an optimizer that DeepSpeed made."""
    theirs = torch.optim.AdamW(twins.local.parameters(), **LEARNING)
    engine = engine_of(twins.model, optimizer=OPTIMIZER, torch_autocast=dict(enabled=True, dtype="bfloat16"))
    twins.remote.wrap(engine.optimizer)
    losses = [(run_step(engine, 1), local_step(twins.local, theirs, [1])) for _ in range(4)]
    assert twins.remote.step == 4
    for mine, local in losses:
        assert mine == pytest.approx(local, rel=1e-2)
    assert losses[3][1] < losses[0][1] - 0.1


def trainer(rank, folder, target, rendezvous, results):
    prepare(rank, 2, rendezvous)
    model = load_model(folder)
    remote = shardmlp.offload(model, target, trainer_count=2, trainer_rank=rank)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), **LEARNING))
    engine = engine_of(model, optimizer=optimizer)
    for step in range(3):
        run_step(engine, 2 * step + rank)
    torch.save((remote.step, remote.state_dict()), results / str(rank))
    remote.close()
    torch.distributed.destroy_process_group()


def test_two_ranks_without_zero(folder, serve, tmp_path):
    arguments = (folder("llama"), serve(folder("llama")).target, tmp_path / "rendezvous", tmp_path)
    torch.multiprocessing.spawn(trainer, arguments, nprocs=2)
    local = load_model(folder("llama"))
    optimizer = torch.optim.AdamW(local.parameters(), **LEARNING)
    for step in range(3):
        local_step(local, optimizer, [2 * step, 2 * step + 1])
    for rank in "01":
        steps, state = torch.load(tmp_path / rank)
        assert steps == 3
        assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-4


def hugging_face_trainer(rank, folder, targets, rendezvous, out):
    prepare(rank, 1, rendezvous)
    config = dict(
        zero_optimization=dict(stage=0),
        train_micro_batch_size_per_gpu="auto",
        gradient_accumulation_steps="auto",
        gradient_clipping="auto",
        zero_allow_untested_optimizer=True,
        zero_force_ds_cpu_optimizer=False,
    )
    model = load_model(folder)
    remote = shardmlp.offload(model, targets[0])
    trainer = make(model, out, remote, deepspeed=config)
    trainer.train()
    torch.save((remote.step, logged(trainer, "loss")), out / "results")
    remote.close()

    config["zero_optimization"]["stage"] = 2
    model = load_model(folder)
    with shardmlp.offload(model, targets[1]) as remote:
        with pytest.raises(ValueError, match="DeepSpeedZeroOptimizer; the server has .*use stage 0"):
            make(model, out, remote, deepspeed=config).train()
        assert remote.step == 0


def test_hugging_faces_trainer(folder, serve, tmp_path):
    """Commits without ZeRO, and with it is refused as it starts."""
    targets = [serve(folder("llama")).target for _ in range(2)]
    arguments = (folder("llama"), targets, tmp_path / "rendezvous", tmp_path)
    torch.multiprocessing.spawn(hugging_face_trainer, arguments, nprocs=1)
    local = make(load_model(folder("llama")), tmp_path)
    local.train()
    steps, losses = torch.load(tmp_path / "results")
    assert steps == 6
    assert losses == pytest.approx(logged(local, "loss"), rel=1e-5)


MODES = {
    "zero1": dict(stage=1),
    "zero2": dict(stage=2),
    "zero3": dict(stage=3),
    "bf16": dict(bf16=dict(enabled=True)),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("optimizer", ["wrapped", "forgotten", "of DeepSpeed"])
def test_zero_is_refused_by_name(twins, alone, mode, optimizer):
    """As it is made or in its first step."""
    given = OPTIMIZER
    expected = r"none was given to Remote.wrap\(\).*"
    if optimizer != "of DeepSpeed":
        given = torch.optim.AdamW(twins.model.parameters(), **LEARNING)
    if optimizer == "wrapped":
        twins.remote.wrap(given)
        expected = "none of the server's tensors.*"
    with pytest.raises((ValueError, shardmlp.Error), match=expected + r"DeepSpeed's ZeRO \(stages 1 to 3\).* stage 0"):
        run_step(engine_of(twins.model, optimizer=given, **MODES[mode]), 1)
    assert twins.remote.step == 0
