"""Rows of another device: copied a chunk at a time while the call runs. The device here is as slow as one may be: what
is to be copied is copied when somebody waits for it and no sooner, and until then host memory holds NaN."""

from __future__ import annotations

import pytest
import torch
from models import load_model, loss_of
from waiting import until

import shardmlp
from shardmlp import staging


class LazyDevice:
    """Stands for a device with streams, though its tensors are on the host."""

    pinned = False

    def __init__(self, events: list[str]) -> None:
        self._enqueued = []
        self._events = events

    def copy(self, source, to):
        to.fill_(torch.nan)
        self._enqueued.append((source, to))

    def mark(self):
        until = len(self._enqueued)
        return lambda: self._run(until, "waited")

    def join(self):
        self._run(len(self._enqueued), "joined")

    def _run(self, end, why):
        self._events.append(why)
        for i, (source, to) in enumerate(self._enqueued[:end]):
            if source is not None:
                to.copy_(source)
                self._enqueued[i] = (None, None)


@pytest.fixture
def lazy(monkeypatch):
    """What its copies did, in order."""
    events = []
    monkeypatch.setattr(staging, "copies_with", lambda device: LazyDevice(events))
    monkeypatch.setattr(staging, "_CHUNK_BYTES", 1000)  # five rows of x
    return events


@pytest.mark.parametrize("keep_inputs", [True, False])
def test_a_device_trains_as_the_host_does(folder, serve, offload, lazy, monkeypatch, keep_inputs):
    trained = []
    for copies_with in (staging.copies_with, lambda device: None):
        monkeypatch.setattr(staging, "copies_with", copies_with)
        server = serve(folder("llama"), "--stash-bytes=16MiB", "--threads=1")
        model = load_model(folder("llama"))
        remote = offload(model, server, keep_inputs=keep_inputs)
        optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=0.01))
        losses = []
        for step in range(2):
            loss = loss_of(model, step)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        trained.append((losses, remote.state_dict()))
        remote.close()
    (losses, weights), (expected_losses, expected_weights) = trained
    assert losses == expected_losses
    assert all(torch.equal(weights[name], expected_weights[name]) for name in weights)
    assert lazy.count("waited") > lazy.count("joined") > 0


def test_the_first_shard_is_sent_before_the_last_is_there(folder, serve, lazy, monkeypatch):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0")
    rows = 16 * 1024
    connection = shardmlp.connection.Connection(server.target, 1, shardmlp.Timeouts())
    connection.open_session(shardmlp.connection.Run("default", 1, 0, False))
    layer = connection.model.layers[0]
    x = torch.randn(rows, layer.hidden_size)

    class OneAfterTheOther(LazyDevice):
        def mark(self):
            wait = super().mark()
            last = len(self._enqueued) == rows // 5 + 1

            def wait_for_the_first():
                if last:
                    until(lambda: server.metric('shardmlp_payload_bytes_total{direction="received"}') > 0)
                wait()

            return wait_for_the_first

    monkeypatch.setattr(staging, "copies_with", lambda device: OneAfterTheOther(lazy))
    y, *_ = connection.forward(0, x, layer.output_size)
    monkeypatch.setattr(staging, "copies_with", lambda device: None)
    expected, *_ = connection.forward(0, x, layer.output_size)
    connection.close()
    assert torch.equal(y, expected)


def test_what_a_copy_raises_ends_the_call_and_nothing_is_counted(folder, serve, offload, lazy, monkeypatch):
    class Broken(LazyDevice):
        def mark(self):
            def fail():
                raise RuntimeError("the device is lost")

            return fail

    server = serve(folder("llama"))
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    loss = loss_of(model, 1)
    works = staging.copies_with
    monkeypatch.setattr(staging, "copies_with", lambda device: Broken([]))
    with pytest.raises(RuntimeError, match="the device is lost"):
        loss.backward()
    monkeypatch.setattr(staging, "copies_with", works)
    optimizer.zero_grad()
    loss_of(model, 1).backward()
    optimizer.step()
    assert remote.step == 1
