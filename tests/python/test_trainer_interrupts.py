"""Ctrl-C, and servers that go away, inside Hugging Face's Trainer: the step is dropped on both sides, and the run goes
on from the common checkpoint as if nothing had happened."""

from __future__ import annotations

import signal
import time

import pytest
from interrupting import end_by_signal, interrupted
from models import load_model
from test_hugging_face import assert_same_folders, assert_same_run, make

import shardmlp

pytestmark = pytest.mark.filterwarnings("ignore")

SAVING = dict(save_strategy="steps", save_steps=2)


def watched(where, hook, *args, **kwargs):
    """As make(), and calls ``hook`` once in the fourth update, ahead of a forward, a backward or the seal."""
    trainer = make(*args, **kwargs)
    hooks = [hook]

    def at(place):
        if place == where and trainer.state.global_step == 3 and hooks:
            hooks.pop()()

    def clip(*arguments):
        at("seal")
        return run_clip(*arguments)

    run_clip, trainer.accelerator.clip_grad_norm_ = trainer.accelerator.clip_grad_norm_, clip
    trainer.model.model.layers[0].mlp.register_forward_pre_hook(lambda *_: at("forward"))
    trainer.model.lm_head.register_full_backward_pre_hook(lambda *_: at("backward"))
    return trainer


@pytest.fixture(scope="module")
def undisturbed(folder, tmp_path_factory):
    """The run with its MLPs local, and its folder."""
    out = tmp_path_factory.mktemp("undisturbed")
    trainer = make(load_model(folder("llama")), out, **SAVING)
    trainer.train()
    return trainer, out


def assert_undisturbed(trainer, out, undisturbed):
    theirs, their_out = undisturbed
    assert trainer.state.global_step == theirs.state.global_step == 6
    assert_same_run(trainer, theirs)
    assert_same_folders(out / "checkpoint-6", their_out / "checkpoint-6")


@pytest.mark.parametrize("where", ["forward", "backward", "seal"])
def test_ctrl_c_discards_the_step_at_once(folder, serve, offload, undisturbed, tmp_path, where):
    """As in a notebook: the process lives on."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    trainer = watched(where, server.freeze, model, tmp_path, remote, **SAVING)
    with interrupted(then=server.thaw):
        trainer.train()
    session = remote._servers.connections[0].session
    assert session.position.step == 3 and session.position.attempt == 1
    assert session.pending_row_count == 0
    assert all(p.grad is None for p in model.parameters())
    trainer.train(resume_from_checkpoint=True)
    assert_undisturbed(trainer, tmp_path, undisturbed)


SCRIPT = """
import sys, shardmlp
from interrupting import stop_here
from models import load_model
from test_trainer_interrupts import SAVING, watched

folder, target, out, where = sys.argv[1:]
model = load_model(folder)
remote = shardmlp.offload(model, target)
watched(where, stop_here, model, out, remote, **SAVING).train()
"""


@pytest.mark.parametrize(
    "where, number", [("forward", signal.SIGINT), ("seal", signal.SIGINT), ("backward", signal.SIGTERM)]
)
def test_script_that_a_signal_ends_leaves_its_place_at_once(
    folder, serve, offload, undisturbed, tmp_path, where, number
):
    server = serve(folder("llama"), "--lease=5m")
    end_by_signal(SCRIPT, [folder("llama"), server.target, tmp_path, where], server, number)
    model = load_model(folder("llama"))
    remote = offload(model, server, resume=True)  # the place is free
    assert remote.step == 3
    trainer = make(model, tmp_path, remote, **SAVING)
    trainer.train(resume_from_checkpoint=True)
    assert_undisturbed(trainer, tmp_path, undisturbed)


@pytest.mark.parametrize("where", ["forward", "backward", "seal"])
def test_server_that_dies_is_named_and_the_run_goes_on_once_it_is_back(
    folder, serve, offload, undisturbed, tmp_path, where
):
    server = serve(folder("llama"), "--restore=latest")
    model = load_model(folder("llama"))
    remote = offload(model, server, timeouts=shardmlp.Timeouts(connect=20, retry=2))
    trainer = watched(where, server.kill, model, tmp_path, remote, **SAVING)
    began = time.monotonic()
    expected = r"gave up on unix:.* the server has ended.*resume_from_checkpoint"
    with pytest.raises(shardmlp.Error, match=expected) as failure:
        trainer.train()
    assert failure.value.reason == "UNREACHABLE"
    assert time.monotonic() - began < 30
    server.start()
    server.await_serving(2)
    trainer.train(resume_from_checkpoint=True)
    assert remote.step == 6
    assert_undisturbed(trainer, tmp_path, undisturbed)


def test_server_that_stands_still_is_named(folder, serve, offload, undisturbed, tmp_path):
    """It keeps its sockets open."""
    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server, timeouts=shardmlp.Timeouts(connect=20, retry=1, stall=2))
    trainer = watched("forward", server.freeze, model, tmp_path, remote, **SAVING)
    with pytest.raises(shardmlp.Error, match="no message went or came for 2s.*the server has ended, stands still"):
        trainer.train()
    server.thaw()
    trainer.train(resume_from_checkpoint=True)
    assert_undisturbed(trainer, tmp_path, undisturbed)
