"""A step of two servers that only one of them has committed: it is finished, or the error says where both are and what
to do; and a step that one trainer's Ctrl-C parts from the server's."""

from __future__ import annotations

import contextlib
import signal
import threading

import pytest
import torch
from conftest import QUICK
from cutting_proxy import CuttingProxy
from interrupting import end_by_signal
from links import connect
from models import load_model, loss_of, relative
from waiting import until

import shardmlp
from shardmlp.connection import Connection

SOON = shardmlp.Timeouts(connect=20, retry=1)  # when to give up
GO_BACK = r"take all back to one checkpoint: remote.restore\(\)"


class Trainer:
    """A model on servers, and local, its twin."""

    def __init__(self, folder, targets, **options):
        self.model, self.local = load_model(folder("llama")), load_model(folder("llama"))
        self.remote = shardmlp.offload(self.model, targets, **{"timeouts": SOON, **options})
        self.mine = self.remote.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-3, eps=1e-4))
        self.theirs = torch.optim.AdamW(self.local.parameters(), lr=1e-3, eps=1e-4)

    def begin(self, seed=1):
        """As far as a step() of both."""
        for model in (self.model, self.local):
            loss_of(model, seed).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)

    def end(self):
        """However often step() has to be called, as its error says."""
        while True:
            try:
                self.mine.step()
                break
            except shardmlp.Error as error:
                if "call step() again" not in str(error):
                    raise
        self.theirs.step()
        for optimizer in (self.mine, self.theirs):
            optimizer.zero_grad()

    def refusal(self, call) -> str:
        """Of a step that is half done. The model's local weights are as they were."""
        before = {name: p.clone() for name, p in self.model.named_parameters()}
        with pytest.raises(shardmlp.Error) as failure:
            call()
        assert failure.value.reason == "DECISION_CONFLICT"
        assert all(torch.equal(p, before[name]) for name, p in self.model.named_parameters())
        return str(failure.value)

    def go_back(self):
        """To the checkpoint at which both began."""
        self.remote.restore("start")
        twin = load_model(self.local.name_or_path)
        for model in (self.model, self.local):
            model.load_state_dict(twin.state_dict())
        self.mine.state.clear()
        self.theirs.state.clear()
        self.theirs.zero_grad()

    def assert_trains(self):
        """As its twin, from here."""
        for seed in (5, 6):
            self.begin(seed)
            self.end()
        state = self.remote.state_dict()
        assert max(relative(state[name], weights) for name, weights in self.local.state_dict().items()) < 1e-4


class Door:
    """To a server; while it is shut, nobody is connected."""

    def __init__(self, server):
        self._server = server
        self._shut = False
        self.proxy = CuttingProxy(self._connect)
        self.target = self.proxy.target

    def shut(self):
        self._shut = True
        self.proxy.drop()

    def open(self):
        self._shut = False

    def _connect(self):
        if self._shut:
            raise ConnectionRefusedError
        return connect(self._server.target)


class Pair:
    """A server with layer 0, which commits first, and one with the others; a door to each."""

    def __init__(self, folder, serve, *second_flags):
        self.servers = [serve(folder("llama"), "--layers=0"), serve(folder("llama"), "--layers=1-2", *second_flags)]
        self.doors = [Door(server) for server in self.servers]
        self.targets = [door.target for door in self.doors]


@pytest.fixture
def pair(folder, serve):
    """pair(*flags of the second) -> Pair, without trainers."""
    with contextlib.ExitStack() as made:

        def start(*second_flags):
            pair = Pair(folder, serve, *second_flags)
            for door in pair.doors:
                made.callback(door.proxy.close)
            return pair

        yield start


@pytest.fixture
def train(folder):
    """train(targets, **options) -> Trainer, closed after the test."""
    with contextlib.ExitStack() as made:

        def start(targets, **options):
            trainer = Trainer(folder, targets, **options)
            made.callback(trainer.remote.close)
            return trainer

        yield start


def on_commit(monkeypatch, of: int, before=lambda: None, after=lambda: None):
    """Has the commits of the ``of``-th server call these, once."""
    run, calls = Connection.commit, []

    def commit(self, *arguments):
        mine = min(layer.layer for layer in self.model.layers) == of and not calls
        if mine:
            calls.append(self)
            before()
        run(self, *arguments)
        if mine:
            after()

    monkeypatch.setattr(Connection, "commit", commit)


def test_link_that_is_cut_ahead_of_the_commit_and_mended(pair, train, monkeypatch):
    both = pair()
    trainer = train(both.targets)
    trainer.begin()
    on_commit(monkeypatch, 1, before=both.doors[1].shut)
    said = trainer.refusal(trainer.mine.step)
    first, second = both.targets
    assert f"step 0 was committed on {first} (at step 1 now) and not on {second} (at step 0)" in said
    assert "call step() again with the same hyperparameters, or take all back" in said
    assert "can't be discarded" in trainer.refusal(trainer.mine.zero_grad)
    both.doors[1].open()
    trainer.end()
    assert trainer.remote.step == 1
    trainer.assert_trains()


def test_other_hyperparameters_are_refused_until_they_are_the_first_ones_again(pair, train, monkeypatch):
    both = pair()
    trainer = train(both.targets)
    trainer.begin()
    on_commit(monkeypatch, 1, before=both.doors[1].shut)
    trainer.refusal(trainer.mine.step)
    both.doors[1].open()
    trainer.mine.param_groups[0]["lr"] = 0.5
    assert "step() now has other hyperparameters" in trainer.refusal(trainer.mine.step)
    trainer.mine.param_groups[0]["lr"] = 1e-3
    trainer.end()
    trainer.assert_trains()


@pytest.mark.parametrize("of", [0, 1])
def test_either_connection_cut_at_every_message_of_seal_and_commit(pair, train, of):
    both = pair()
    trainer = train(both.targets, timeouts=QUICK)
    trainer.remote.save_checkpoint("start")
    proxy = both.doors[of].proxy

    def run(cut_at: int | None) -> tuple[dict[str, torch.Tensor], int]:
        """The weights, and how many messages passed."""
        trainer.go_back()
        loss_of(trainer.model, 1).backward()
        proxy.cut_at(cut_at)
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
        trainer.mine.step()
        passed = proxy.passed
        proxy.cut_at(None)
        trainer.mine.zero_grad()
        assert trainer.remote.step == 1
        return {name: weights.clone() for name, weights in trainer.remote.state_dict().items()}, passed

    expected, messages = run(None)
    assert messages >= 4  # a question and an answer each
    for message in range(1, messages + 1):
        weights, _ = run(message)
        assert all(torch.equal(weights[name], expected[name]) for name in expected), f"cut behind message {message}"


def test_lease_that_ends_before_the_link_is_mended_takes_all_back(pair, train, monkeypatch):
    both = pair("--lease=3s")
    trainer = train(both.targets)
    trainer.remote.save_checkpoint("start")
    trainer.begin()
    on_commit(monkeypatch, 1, before=both.doors[1].shut)
    trainer.refusal(trainer.mine.step)
    until(lambda: "session lost: its lease ended" in both.servers[1].log.read_text())
    both.doors[1].open()
    said = trainer.refusal(trainer.mine.step)
    assert f"not on {both.targets[1]} (at step 0)" in said and "take all back" in said
    assert "step() again" not in said
    assert "step() again" not in trainer.refusal(trainer.mine.zero_grad)
    trainer.go_back()
    trainer.assert_trains()


def test_first_server_whose_answer_is_lost_decides_for_all(pair, train):
    """Nobody knows whether it has committed: dropping the step asks it first."""
    both = pair()
    trainer = train(both.targets)
    trainer.begin()
    first = both.doors[0]
    first.proxy.hold_at(1, answers=True)

    def shut_once_committed():
        until(lambda: Connection(both.servers[0].target, 1, QUICK).model.position.step == 1)
        first.shut()

    shutting = threading.Thread(target=shut_once_committed)
    shutting.start()
    with pytest.raises(shardmlp.Error, match="gave up on"):
        trainer.mine.step()
    shutting.join()
    first.open()
    with pytest.raises(shardmlp.Error, match="was committed.*and can't be discarded.*commit with the same"):
        trainer.mine.zero_grad()
    trainer.end()
    assert trainer.remote.step == 1
    trainer.assert_trains()


def test_other_trainer_can_drop_nothing_and_finishes_the_step(pair, train, monkeypatch):
    """It lists the servers in another order, and asks them in the same."""
    both = pair()
    trainers = [
        train(both.targets, trainer_count=2, trainer_rank=0),
        train([server.target for server in reversed(both.servers)], trainer_count=2, trainer_rank=1, timeouts=QUICK),
    ]
    for trainer in trainers:
        trainer.theirs.step = lambda: None  # each has half of the batch
        loss_of(trainer.model, 1).backward()
    sealing = threading.Thread(target=lambda: trainers[1].remote._step.seal(trainers[1].remote._step._attempt))
    sealing.start()
    trainers[0].remote._step.seal(trainers[0].remote._step._attempt)
    sealing.join()
    on_commit(monkeypatch, 1, before=both.doors[1].shut)
    trainers[0].refusal(trainers[0].mine.step)
    with pytest.raises(shardmlp.Error, match="can't be discarded"):
        trainers[1].mine.zero_grad()
    trainers[1].end()
    both.doors[1].open()
    trainers[0].end()
    assert [trainer.remote.step for trainer in trainers] == [1, 1]
    assert [c.session.position.step for t in trainers for c in t.remote._servers.connections] == [1] * 4


# Ctrl-C, with one server or two, at each point of step() from which on a server has committed.
WHERE = {
    "ahead of the second server's commit": (1, "before"),
    "behind the first server's commit": (0, "after"),
    "behind the second server's commit": (1, "after"),
}


@pytest.fixture
def ctrl_c():
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield lambda: signal.raise_signal(signal.SIGINT)
    signal.signal(signal.SIGINT, handler)


@pytest.mark.parametrize("where", WHERE)
def test_ctrl_c_between_the_commits_is_finished_by_step(pair, train, monkeypatch, ctrl_c, where):
    both = pair()
    trainer = train(both.targets)
    trainer.begin()
    of, when = WHERE[where]
    on_commit(monkeypatch, of, **{when: ctrl_c})
    with pytest.raises(KeyboardInterrupt):
        trainer.mine.step()
    said = trainer.refusal(trainer.mine.zero_grad)
    assert "was committed on" in said and "call step() again" in said
    trainer.end()
    trainer.assert_trains()


def test_ctrl_c_behind_the_only_servers_commit_is_finished_by_step(folder, serve, train, monkeypatch, ctrl_c):
    server = serve(folder("llama"))
    trainer = train(server.target)
    trainer.begin()
    on_commit(monkeypatch, 0, after=ctrl_c)
    with pytest.raises(KeyboardInterrupt):
        trainer.mine.step()
    assert "not by this trainer itself" in trainer.refusal(trainer.mine.zero_grad)
    trainer.end()
    trainer.assert_trains()


def test_ctrl_c_in_the_trainers_own_half_takes_all_back(pair, train, ctrl_c):
    """Which of its parameters have been updated is not known."""
    both = pair()
    trainer = train(both.targets)
    trainer.remote.save_checkpoint("start")
    trainer.begin()
    hook = trainer.mine.register_step_pre_hook(lambda *_: ctrl_c())
    with pytest.raises(KeyboardInterrupt):
        trainer.mine.step()
    hook.remove()
    for call in (trainer.mine.step, trainer.mine.zero_grad):
        said = trainer.refusal(call)
        assert "and not by this trainer itself" in said and "step() again" not in said
    with pytest.raises(shardmlp.Error, match=GO_BACK):
        loss_of(trainer.model, 2).backward()
    trainer.go_back()
    trainer.assert_trains()


def test_ctrl_c_ends_the_wait_for_every_server(pair, train, monkeypatch, ctrl_c):
    """The second stands still, for long."""
    both = pair()
    trainer = train(both.targets, timeouts=shardmlp.Timeouts(connect=600, stall=600, seal=600, retry=600))
    loss_of(trainer.model, 3).backward()
    both.servers[1].freeze()
    answered = threading.Event()
    seal = Connection.seal

    def seal_and_tell(self):
        sealed = seal(self)
        answered.set()
        return sealed

    monkeypatch.setattr(Connection, "seal", seal_and_tell)

    def interrupt():
        answered.wait()
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.5)
    thread.join()
    both.servers[1].thaw()
    trainer.mine.zero_grad()
    trainer.assert_trains()


SCRIPT = """
import sys, torch, shardmlp
from interrupting import stop_here
from models import load_model, loss_of
from shardmlp.connection import Connection

folder, *targets = sys.argv[1:]
model = load_model(folder)
remote = shardmlp.offload(model, targets)
optimizer = remote.wrap(torch.optim.AdamW(model.parameters()))
loss_of(model, 1).backward()
torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
commit = Connection.commit

def stop_and_commit(self, *arguments):
    if self.model.layers[0].layer == 1:
        stop_here()
    commit(self, *arguments)

Connection.commit = stop_and_commit
optimizer.step()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_script_that_ends_between_the_commits_leaves_servers_that_no_step_joins(folder, pair, train, number):
    both = pair()
    with shardmlp.offload(load_model(folder("llama")), both.targets, timeouts=QUICK) as remote:
        remote.save_checkpoint("start")
    # The second, which is frozen at its commit, may have that or the end of the session first.
    targets = [server.target for server in both.servers]
    end_by_signal(SCRIPT, [folder("llama"), *targets], both.servers[1], number)
    trainer = train(both.targets, resume=True, timeouts=QUICK)
    steps = [c.session.position.step for c in trainer.remote._servers.connections]
    assert steps[0] == 1
    if steps[1] == 0:
        for call in (lambda: loss_of(trainer.model, 1).backward(), trainer.mine.step, lambda: trainer.remote.step):
            with pytest.raises(shardmlp.Error, match="the servers are at different steps .*remote.restore()"):
                call()
    trainer.go_back()
    trainer.assert_trains()
