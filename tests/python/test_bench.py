"""``shardmlpctl bench`` against a real server: what it says it did is what the server counted."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path

import matplotlib.image
import pytest
from waiting import until

PROGRAM = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"
KINDS = ("forward", "backward")


def ctl(server, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [PROGRAM, f"--target={server.target}", *arguments], capture_output=True, text=True, timeout=60
    )


def bench(server, *arguments: str) -> dict:
    """Of a load without failures."""
    run = ctl(server, "bench", "--json", *arguments)
    assert run.returncode == 0, run.stdout + run.stderr
    return json.loads(run.stdout)


@pytest.fixture
def server(folder, serve):
    started = serve(folder("llama"), "--metrics-address=127.0.0.1:0", "--workspace-bytes=64KiB")
    started.await_serving()
    return started


class Counted:
    """What a server counted since this was made."""

    def __init__(self, server) -> None:
        self._server = server
        self._before = server.metrics()

    def __call__(self, name: str, *labels: str) -> float:
        """Summed over the series that have the labels."""

        def total(metrics: dict[str, float]) -> float:
            return sum(
                value
                for series, value in metrics.items()
                if re.match(rf"{name}({{|$)", series) and all(label in series for label in labels)
            )

        return total(self._server.metrics()) - total(self._before)


def assert_counted(counted: Counted, report: dict) -> None:
    for kind in KINDS:
        method = f'grpc_method="{kind.capitalize()}"'
        handled = counted("grpc_server_handled_total", method, 'grpc_code="OK"')
        assert handled == report[kind]["calls"]
        assert counted("shardmlp_rows_total", f'pass="{kind}"') == report[kind]["tokens"]
    assert counted("shardmlp_payload_bytes_total", "received") == sum(report[kind]["sent_bytes"] for kind in KINDS)
    assert counted("shardmlp_payload_bytes_total", "sent") == sum(report[kind]["received_bytes"] for kind in KINDS)
    assert counted("shardmlp_gemm_flops_total") == sum(report[kind]["flops"] for kind in KINDS)


def test_a_closed_loop(server):
    counted = Counted(server)
    report = bench(
        server, "--clients=2", "--connections=2", "--rows=300", "--layers=0,2", "--calls=40", "--warm-up=0s"
    )
    assert report["calls"] == 40
    assert report["load"]["loop"] == "closed" and report["load"]["layers"] == [0, 2]
    assert_counted(counted, report)
    for kind in KINDS:
        latency = report[kind]["latency_seconds"]
        assert 0 < latency["p50"] <= latency["p90"] <= latency["p99"] <= latency["p99.9"] <= latency["max"]
        assert report[kind]["tokens"] == 300 * report[kind]["calls"]
        assert report[kind]["tokens_per_second"] == pytest.approx(report[kind]["tokens"] / report["seconds"])
    assert report["tokens_per_second"] == pytest.approx(300 * 40 / 2 / report["seconds"])


def test_an_open_loop(server):
    counted = Counted(server)
    report = bench(server, "--rate=100", "--clients=4", "--rows=8", "--calls=50", "--warm-up=0s", "--dtype=bf16")
    assert report["calls"] == 50 and report["unsent_calls"] == 0
    assert report["seconds"] >= 49 / 100, "the last one is due then"
    assert report["load"]["loop"] == "open"
    assert_counted(counted, report)
    assert report["forward"]["sent_bytes"] == report["forward"]["tokens"] * 48 * 2, "bf16 on the wire"


def test_a_trainers_load_changes_no_weight(server):
    counted = Counted(server)
    before = json.loads(ctl(server, "info", "--json").stdout)
    report = bench(server, "--train", "--clients=2", "--rows=100", "--calls=24", "--warm-up=0s")
    assert_counted(counted, report)
    after = json.loads(ctl(server, "info", "--json").stdout)
    assert after["position"]["weights_version"] == before["position"]["weights_version"]
    assert after["position"]["step"] == 0 and after["trainers"] == []
    assert counted("shardmlp_steps_total", "committed") == 0
    reading = bench(server, "--rows=100", "--layers=0", "--calls=2", "--warm-up=0s")
    # 2 * I * O of dA, and 2 * 2I * H of G and U again and of dX; the weight gradients are 2 * I * O + 2 * 2I * H more.
    assert reading["backward"]["flops"] == 100 * 2 * (48 * 80 * 5)
    assert report["backward"]["flops"] / report["backward"]["tokens"] == 2 * 48 * 80 * 8


def test_refusals_are_counted_by_reason(folder, serve):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0", "--max-calls=2")
    server.await_serving()
    counted = Counted(server)
    run = ctl(server, "bench", "--json", "--clients=6", "--rows=20000", "--duration=2s", "--warm-up=0s")
    assert run.returncode == 1, run.stderr
    report = json.loads(run.stdout)
    assert list(report["failures"]) == ["OVERLOADED"], "readers have half of the calls, which is one"
    assert report["failures"]["OVERLOADED"]["calls"] == report["failed_calls"] > 0
    assert counted("shardmlp_failures_total", "OVERLOADED") == report["failed_calls"]
    assert "readers may have" in report["failures"]["OVERLOADED"]["first"]
    assert report["calls"] > 0


def test_a_server_that_is_drained_and_ctrl_c(server):
    program = subprocess.Popen(
        [PROGRAM, f"--target={server.target}", "bench", "--json", "--rows=500", "--duration=10m", "--warm-up=0s"],
        stdout=subprocess.PIPE,
        text=True,
    )
    until(lambda: server.metric('shardmlp_rows_total{pass="backward"}') > 5000)
    server.stop()
    # It goes on asking, and once the server is back, goes on.
    server.start()
    server.await_serving(times=2)
    until(lambda: server.metric('shardmlp_rows_total{pass="backward"}') > 5000)
    program.send_signal(signal.SIGINT)
    report = json.loads(program.communicate(timeout=30)[0])
    assert program.returncode == 1
    assert report["stopped"] and report["calls"] > 20
    assert 0 < report["failed_calls"] == sum(failure["calls"] for failure in report["failures"].values())
    assert set(report["failures"]) <= {"DRAINING", "UNREACHABLE", "UNKNOWN_SESSION", "STALE_WEIGHTS", "LOADING"}


def test_a_target_that_is_none(tmp_path):
    run = subprocess.run(
        [PROGRAM, f"--target=unix:{tmp_path}/none", "--connect-timeout=100ms", "bench"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 3
    assert "UNREACHABLE" in run.stderr and f"{tmp_path}/none" in run.stderr


def test_the_table_and_the_plot(server, tmp_path):
    plot = tmp_path / "it's a plot.png"
    run = ctl(server, "bench", "--rows=20", "--duration=1s", "--warm-up=100ms", f"--plot={plot}")
    assert run.returncode == 0, run.stderr
    rows = {line.split()[0]: line.split()[1:] for line in run.stdout.splitlines() if line.startswith(KINDS)}
    assert set(rows) == set(KINDS)
    for row in rows.values():
        assert len(row) == 11 and all(float(number) > 0 for number in row)
    picture = matplotlib.image.imread(plot)
    assert picture.shape[:2] == (600, 1000)
    colours = {tuple(pixel) for line in picture[::3] for pixel in line[::3]}
    assert len(colours) > 20, "axes, names and two curves"
