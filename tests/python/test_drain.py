"""SIGTERM as Kubernetes sends it: a drained server has finished its step or handed it back and has saved itself, and the
one that takes its place goes on from there. Trainers redo a batch at most, and lose nothing."""

from __future__ import annotations

import contextlib
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cutting_proxy import CuttingProxy
from health import ready
from links import connect
from models import load_model, loss_of
from networks import free_port
from replica_run import FLAGS, Trainer, equal, final_weights
from waiting import until

import shardmlp

# As the chart gives them to a pod with a volume for checkpoints.
KEEP = ("--restore=latest", "--drain-checkpoint=drain")
STEPS = 4


class Training:
    """A whole model's, a step at a time."""

    def __init__(self, folder, offload, target, **options) -> None:
        self.model = load_model(folder("llama"))
        self.remote = offload(self.model, target, **options)
        self._optimizer = self.remote.wrap(torch.optim.AdamW(self.model.parameters(), lr=1e-3))

    @torch.no_grad()
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Through one MLP."""
        return self.model.model.layers[1].mlp(x)

    def backward(self, step: int) -> float:
        self._optimizer.zero_grad()
        loss = loss_of(self.model, step)
        loss.backward()
        return loss.item()

    def seal(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)

    def commit(self) -> None:
        self._optimizer.step()

    def steps(self, steps) -> list[float]:
        losses = []
        for step in steps:
            losses.append(self.backward(step))
            self.seal()
            self.commit()
        return losses


def saved_step(server) -> int:
    """Of the checkpoint that its drain left."""
    return json.loads((server.checkpoints / "drain/manifest.json").read_text())["step"]


@pytest.fixture
def undisturbed(folder, serve, offload) -> list[float]:
    """The losses of a run on a server that nobody stops."""
    return Training(folder, offload, serve(folder("llama"))).steps(range(STEPS))


def test_step_that_is_open_is_handed_back_and_the_next_server_goes_on(folder, serve, offload, undisturbed):
    server = serve(folder("llama"), *KEEP, "--drain-timeout=10m", "--metrics-address=127.0.0.1:0")
    server.await_serving()

    def to_whichever_is_there():
        with contextlib.suppress(OSError):
            return connect(server.target)

    proxy = CuttingProxy(lambda: until(to_whichever_is_there))
    training = Training(folder, offload, proxy)
    losses = training.steps(range(2))
    training.backward(2)
    x = torch.randn(5, 48)
    expected = training.forward(x)
    with ThreadPoolExecutor(1) as pool:
        proxy.hold_at(2)  # the header and the rows; the end of the call is to come
        call = pool.submit(training.forward, x)
        until(lambda: server.metric("shardmlp_open_calls") == 1)
        assert ready(server.target)

        server.terminate()
        until(lambda: not ready(server.target))
        assert server.metric("shardmlp_open_calls") == 1
        proxy.release()
        torch.testing.assert_close(call.result(timeout=30), expected)
    assert server.wait() == 0
    assert saved_step(server) == 2

    server.start()
    with pytest.raises(shardmlp.StepAborted):
        training.commit()
    assert "restored checkpoint drain, step 2" in server.log.read_text()
    assert losses + training.steps(range(2, STEPS)) == undisturbed
    proxy.close()


def test_step_that_is_sealed_is_finished(folder, serve, offload, undisturbed):
    server = serve(folder("llama"), *KEEP, "--drain-timeout=10m")
    training = Training(folder, offload, server)
    losses = training.steps(range(1))
    losses.append(training.backward(1))
    training.seal()
    server.terminate()
    until(lambda: not ready(server.target))
    training.commit()
    assert server.wait() == 0
    assert saved_step(server) == 2

    server.start()
    with pytest.raises(shardmlp.StepAborted):
        training.backward(2)
    assert losses + training.steps(range(2, STEPS)) == undisturbed


def test_server_that_can_not_save_itself_says_so(folder, serve):
    server = serve(folder("llama"), *KEEP)
    server.await_serving()
    (server.checkpoints / "drain").write_text("no checkpoint")
    assert server.stop() == 1
    assert "the drained server could not be saved" in server.log.read_text()


def test_server_that_could_not_save_itself_does_not_start(folder, serve, tmp_path):
    checkpoints = tmp_path / "taken"
    checkpoints.mkdir()
    (checkpoints / "drain").write_text("no checkpoint")
    server = serve(folder("llama"), *KEEP, f"--checkpoint-dir={checkpoints}")
    assert server.wait() == 1
    assert f"--drain-checkpoint: {checkpoints}/drain is no checkpoint" in server.log.read_text()


def test_calls_are_cut_before_the_checkpoint_is_saved(folder, serve, offload):
    server = serve(folder("llama"), *KEEP, "--drain-timeout=1s", "--metrics-address=127.0.0.1:0")
    server.await_serving()
    proxy = CuttingProxy(lambda: connect(server.target))
    training = Training(folder, offload, proxy, timeouts=shardmlp.Timeouts(retry=0))
    with ThreadPoolExecutor(1) as pool:
        proxy.hold_at(2)
        call = pool.submit(training.forward, torch.randn(5, 48))
        until(lambda: server.metric("shardmlp_open_calls") == 1)
        assert server.stop() == 0
        with pytest.raises(shardmlp.Error):
            call.result(timeout=30)
    proxy.close()
    log = server.log.read_text()
    assert "draining open_streams=1" in log
    cancelling, cut, saved = (
        log.index(event) for event in ("cancelling what is open open_streams=1", "reason=DRAINING", "checkpoint saved")
    )
    assert cancelling < cut < saved


def three_replicas(folder, serve, *flags: str) -> list:
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    servers = [
        serve(folder("llama"), *FLAGS, *flags, "--replicas=3", f"--rank={rank}", coordinator) for rank in range(3)
    ]
    for server in servers:
        server.await_serving()
    return servers


def trainers_of(folder, servers) -> list[Trainer]:
    return [Trainer(folder("llama"), server.target, rank, len(servers)) for rank, server in enumerate(servers)]


def test_rolling_restart_of_three_replicas_under_training_loses_nothing(folder, serve):
    """Each in its turn, from the last, once the one before is ready: a StatefulSet's rolling update."""
    servers = three_replicas(folder, serve, *KEEP)
    trainers = trainers_of(folder, servers)
    for trainer in trainers:
        trainer.start()
    for server in reversed(servers):
        done = trainers[0].done
        until(lambda done=done: trainers[0].done > done)
        assert server.stop() == 0
        server.start()
        until(lambda server=server: ready(server.target))
    steps = max(trainer.done for trainer in trainers) + 20
    for trainer in trainers:
        trainer.finish_after(steps)
    for trainer in trainers:
        trainer.join()
    assert [trainer.errors for trainer in trainers] == [[], [], []], "batches are redone, and nobody has to do more"
    assert sum(trainer.aborted for trainer in trainers) >= 3
    assert all(0 < saved_step(server) < steps for server in servers)
    got = final_weights(trainers)

    trainers = trainers_of(folder, three_replicas(folder, serve))
    for trainer in trainers:
        trainer.finish_after(steps)
        trainer.start()
    for trainer in trainers:
        trainer.join()
    assert equal(got, final_weights(trainers))
