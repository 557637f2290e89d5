"""Ctrl-C while the server stands still: it ends the call, and what the step had is dropped."""

from __future__ import annotations

import signal

import pytest
import torch
from interrupting import end_by_signal, interrupted
from models import load_model, loss_of, relative

import shardmlp


class Trainer:
    """A model on a server, and the twin of it that is never interrupted."""

    def __init__(self, folder, serve, offload):
        self.model, self.twin = load_model(folder("llama")), load_model(folder("llama"))
        self.server = serve(folder("llama"))
        self.remote = offload(self.model, self.server)
        self.optimizer = self.remote.wrap(torch.optim.SGD(self.model.parameters(), lr=0.2))

    def step(self):
        loss_of(self.model, 1).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.optimizer.step()

    def assert_first_step(self):
        """A step from here is the first one of the twin's."""
        self.step()
        self.assert_weights_of_first_step()

    def assert_weights_of_first_step(self):
        loss_of(self.twin, 1).backward()
        torch.nn.utils.clip_grad_norm_(self.twin.parameters(), 0.5)
        torch.optim.SGD(self.twin.parameters(), lr=0.2).step()
        state = self.remote.state_dict()
        assert max(relative(state[name], weights) for name, weights in self.twin.state_dict().items()) < 1e-5


@pytest.fixture
def trainer(folder, serve, offload):
    trainer = Trainer(folder, serve, offload)
    yield trainer
    trainer.server.thaw()


CALLS = {
    "forward": lambda t, loss: loss_of(t.model, 2),
    "backward": lambda t, loss: loss.backward(),
    "seal": lambda t, loss: torch.nn.utils.clip_grad_norm_(t.model.parameters(), 1.0),
    "step": lambda t, loss: t.optimizer.step(),
    "zero_grad": lambda t, loss: t.optimizer.zero_grad(),
    "read_tensor": lambda t, loss: t.remote.state_dict(),
    "save_checkpoint": lambda t, loss: t.remote.save_checkpoint("late"),
    "checkpoints": lambda t, loss: t.remote.checkpoints(),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_call_ends_and_zero_grad_starts_the_step_over(trainer, call):
    loss_of(trainer.model, 3).backward()  # what is to be dropped
    loss = loss_of(trainer.model, 2)
    trainer.server.freeze()
    with interrupted():
        CALLS[call](trainer, loss)
    trainer.server.thaw()
    trainer.optimizer.zero_grad()
    assert trainer.remote.step == 0
    trainer.assert_first_step()


def test_a_commit_is_decided_once_however_often_it_is_sent(trainer):
    """Whether the server had applied it is not known here; step() again finds out."""
    loss_of(trainer.model, 1).backward()
    torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
    trainer.server.freeze()
    with interrupted():
        trainer.optimizer.step()
    trainer.server.thaw()
    trainer.optimizer.step()
    assert trainer.remote.step == 1
    trainer.assert_weights_of_first_step()


def test_a_session_that_was_interrupted_closes(trainer, folder, offload):
    trainer.server.freeze()
    with interrupted():
        loss_of(trainer.model, 2)
    trainer.server.thaw()
    trainer.remote.close()
    # Its place is free.
    offload(load_model(folder("llama")), trainer.server)


def test_closing_can_be_interrupted_too(trainer):
    trainer.server.freeze()
    with interrupted():
        trainer.remote.close()


def test_waiting_for_a_server_that_is_not_there(folder, tmp_path):
    """The back-off between tries."""
    with interrupted():
        shardmlp.offload(load_model(folder("llama")), f"unix:{tmp_path}/none", timeouts=shardmlp.Timeouts(connect=600))


SCRIPT = """
import sys, shardmlp
from interrupting import stop_here
from models import load_model
from shardmlp.connection import Connection

folder, target, load, where = sys.argv[1:]
run = getattr(Connection, where)

def stop_and_run(*arguments):
    stop_here()
    return run(*arguments)

setattr(Connection, where, stop_and_run)
if load == "offload":
    shardmlp.offload(load_model(folder), target)
else:
    shardmlp.from_pretrained(folder, target)
"""


@pytest.mark.parametrize(
    "load, where, number",
    [
        ("offload", "open_session", signal.SIGINT),
        ("offload", "checksums", signal.SIGTERM),
        ("from_pretrained", "checksums", signal.SIGINT),
        ("from_pretrained", "checksums", signal.SIGTERM),
    ],
)
def test_script_that_ends_while_it_loads_leaves_its_place_at_once(folder, serve, offload, load, where, number):
    server = serve(folder("llama"), "--lease=5m")
    end_by_signal(SCRIPT, [folder("llama"), server.target, load, where], server, number)
    offload(load_model(folder("llama")), server)
