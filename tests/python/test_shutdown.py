"""SIGTERM: what is open may end, what doesn't is told why, and the server exits with status 0 in bounded time."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cutting_proxy import CuttingProxy
from models import load_model, loss_of, train
from waiting import until

import shardmlp

NO_RETRY = shardmlp.Timeouts(connect=20, retry=0.001)
METRICS = "--metrics-address=127.0.0.1:0"
X = torch.randn(5, 48, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def begin_forward(folder, offload):
    """begin_forward(server, rank, count) -> (future, release): a forward of X through layer 1 whose rows are sent and
    whose end is not, until release()."""
    pool = ThreadPoolExecutor(4)
    proxies = []

    def begin(server, rank=0, count=1):
        server.await_serving()

        def connect():
            connected = socket.socket(socket.AF_UNIX)
            connected.connect(server.target.removeprefix("unix:"))
            return connected

        proxies.append(CuttingProxy(connect))
        model = load_model(folder("llama"))
        offload(model, proxies[-1], trainer_rank=rank, trainer_count=count, timeouts=NO_RETRY)
        proxies[-1].hold_at(2)  # the header and the rows
        return pool.submit(model.model.layers[1].mlp, X), proxies[-1].release

    yield begin
    for proxy in proxies:
        proxy.close()
    pool.shutdown()


def assert_draining(error: shardmlp.Error) -> None:
    assert error.code == "UNAVAILABLE"
    assert error.metadata["last"] == "DRAINING"
    assert "the server is shutting down" in str(error)


def refuses_sessions(server, folder) -> bool:
    try:
        shardmlp.offload(load_model(folder("llama")), server.target, run_id="other", timeouts=NO_RETRY).close()
    except shardmlp.Error as error:
        return error.metadata.get("last") == "DRAINING"
    return False


def test_calls_that_stay_open_are_ended(folder, serve, begin_forward):
    server = serve(folder("llama"), METRICS, "--drain-timeout=1s")
    futures = [begin_forward(server, rank, 2)[0] for rank in range(2)]
    until(lambda: server.metric("shardmlp_open_calls") == 2)
    server.terminate()
    for future in futures:
        with pytest.raises(shardmlp.Error) as failure:
            future.result(timeout=30)
        assert_draining(failure.value)
    assert server.wait() == 0


def test_calls_that_end_are_answered(folder, serve, begin_forward):
    server = serve(folder("llama"), METRICS, "--drain-timeout=10m")
    future, release = begin_forward(server)
    until(lambda: server.metric("shardmlp_open_calls") == 1)
    server.terminate()
    until(lambda: refuses_sessions(server, folder))
    release()
    expected = load_model(folder("llama")).model.layers[1].mlp(X)
    torch.testing.assert_close(future.result(timeout=30), expected, rtol=1e-5, atol=1e-6)
    assert server.wait() == 0


def test_second_signal_ends_it_at_once(folder, serve, begin_forward):
    server = serve(folder("llama"), METRICS, "--drain-timeout=10m")
    future, _ = begin_forward(server)
    until(lambda: server.metric("shardmlp_open_calls") == 1)
    server.terminate()
    until(lambda: refuses_sessions(server, folder))
    server.terminate()
    assert server.wait() == 1
    with pytest.raises(shardmlp.Error) as failure:
        future.result(timeout=30)
    assert failure.value.code == "UNAVAILABLE"


def test_step_that_waits_for_another_trainer_is_handed_back(folder, serve, offload):
    server = serve(folder("llama"), METRICS, "--drain-timeout=10m")
    model = load_model(folder("llama"))
    offload(model, server, trainer_count=2)
    loss_of(model, 1).backward()
    with ThreadPoolExecutor(1) as pool:
        clip = pool.submit(torch.nn.utils.clip_grad_norm_, model.parameters(), 1.0)
        labels = 'grpc_method="SealStep",grpc_service="shardmlp.v1.Training",grpc_type="unary"'
        until(lambda: server.metric(f"grpc_server_started_total{{{labels}}}") == 1)
        assert server.stop() == 0
        server.start()
        with pytest.raises(shardmlp.StepAborted, match="the server is shutting down"):
            clip.result(timeout=30)


def test_training_goes_on_from_the_checkpoint_after_sigterm_in_mid_step(folder, serve, offload, tmp_path):
    """Gradients of the open step are lost, and nothing else: the losses are those of an undisturbed run."""
    server = serve(folder("llama"), "--drain-timeout=10m")
    model = load_model(folder("llama"))
    remote = offload(model, server, timeouts=shardmlp.Timeouts(connect=20, retry=20))
    optimizer = remote.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3))
    train(model, optimizer, range(2), max_norm=1.0)
    remote.save_checkpoint("two")
    torch.save({"model": remote.local_state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "local.pt")
    expected = train(model, optimizer, range(2, 5), max_norm=1.0)

    loss_of(model, 5).backward()
    assert server.stop() == 0
    server.start()
    remote.restore("two")
    local = torch.load(tmp_path / "local.pt")
    model.load_state_dict(local["model"])
    optimizer.load_state_dict(local["optimizer"])
    assert train(model, optimizer, range(2, 5), max_norm=1.0) == expected
