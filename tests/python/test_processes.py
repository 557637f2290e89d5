"""Forked workers, scripts that end, and data-parallel trainers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import torch
from models import load_model, loss_of, relative, tokens
from torch.utils.data import DataLoader

import shardmlp


def test_data_loader_workers_forked_after_offload(folder, serve, offload):
    """The dataset holds the model, so that the workers drop it when they end."""
    model, local = load_model(folder("llama")), load_model(folder("llama"))
    remote = offload(model, serve(folder("llama")))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loss_of(model, 0).backward()

    class Batches(torch.utils.data.Dataset):
        def __init__(self):
            self.model = model

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return tokens(index)

    context = torch.multiprocessing.get_context("fork")
    for ids in DataLoader(Batches(), batch_size=None, num_workers=2, multiprocessing_context=context):
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    for seed in (0, 0, 1, 2, 3):
        loss_of(local, seed).backward()
    torch.optim.SGD(local.parameters(), lr=0.1).step()
    state = remote.state_dict()
    assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-5


def test_forked_child_is_told(folder, serve, offload):
    model = load_model(folder("llama"))
    offload(model, serve(folder("llama")))
    child = os.fork()
    if child == 0:
        try:
            loss_of(model, 1)
            os._exit(1)
        except shardmlp.Error as error:
            os._exit(0 if "was forked from it" in str(error) else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    loss_of(model, 1).backward()


def test_sigterm_closes_sessions_in_the_process_that_has_them_alone(folder, serve, offload):
    """A forked worker ends by it as it ever did; and a handler of the program's own is left alone."""
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        offload(load_model(folder("llama")), serve(folder("llama")))
        assert callable(signal.getsignal(signal.SIGTERM))
        child = os.fork()
        if child == 0:
            os._exit(0 if signal.getsignal(signal.SIGTERM) == signal.SIG_DFL else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        own = signal.default_int_handler
        signal.signal(signal.SIGTERM, own)
        offload(load_model(folder("llama")), serve(folder("llama")))
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)


SCRIPT = """
import sys, shardmlp
from models import load_model, loss_of
model = load_model(sys.argv[1])
shardmlp.offload(model, sys.argv[2])
loss_of(model, 1).backward()
"""


def test_script_that_ends_leaves_its_place_at_once(folder, serve, offload):
    server = serve(folder("llama"))
    script = [sys.executable, "-c", SCRIPT, folder("llama"), server.target]
    subprocess.run(script, check=True, cwd=os.path.dirname(__file__))
    offload(load_model(folder("llama")), server)


def data_parallel_trainer(rank, folder, target, rendezvous, results):
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = load_model(folder)
    remote = shardmlp.offload(model, target, trainer_count=2, trainer_rank=rank)
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4))
    norms = []
    for seed in (rank, 2 + rank):
        loss_of(model, seed).backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    torch.save((norms, remote.state_dict()), results / str(rank))


def test_distributed_data_parallel(folder, serve, tmp_path):
    """Two trainer processes, whose local gradients DDP averages, equal one that sees both batches."""
    server = serve(folder("llama"))
    arguments = (folder("llama"), server.target, tmp_path / "rendezvous", tmp_path)
    torch.multiprocessing.spawn(data_parallel_trainer, arguments, nprocs=2)
    local = load_model(folder("llama"))
    optimizer = torch.optim.AdamW(local.parameters(), lr=1e-3, eps=1e-4)
    expected = []
    for seeds in ((0, 1), (2, 3)):
        for seed in seeds:
            (loss_of(local, seed) / 2).backward()
        expected.append(torch.nn.utils.clip_grad_norm_(local.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    for rank in "01":
        norms, state = torch.load(tmp_path / rank)
        assert norms == pytest.approx(expected, rel=1e-5)
        assert max(relative(state[name], weights) for name, weights in local.state_dict().items()) < 1e-5
