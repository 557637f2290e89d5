"""shardmlpctl top against real servers: its numbers are those that a real Prometheus gives for the dashboard's queries
over the same time, and it outlives its server and its terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
import torch
from ctl import CTL, ctl, finish, objects, start
from models import load_model, train
from waiting import until

import shardmlp
from shardmlp.connection import Connection

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/lib/dashboard"))

from monitor import Prometheus  # noqa: E402
from panels import read_panels  # noqa: E402

# With rates over more than a test takes: so over all that a Prometheus has seen.
PANELS = {panel.title: panel for panel in read_panels(ROOT / "deploy/grafana/shardmlp.json", rate_interval="5m")}
STAGES = ("receive", "queue", "copy_in", "compute", "copy_out", "send")
METHODS = ("Forward", "Backward", "SealStep", "CommitStep")  # of the trainer; top itself calls others
ENTER, LEAVE = "\x1b[?1049h", "\x1b[?1049l"


def handled(server, method: str) -> float:
    labels = f'grpc_code="OK",grpc_method="{method}"'
    return sum(value for series, value in server.metrics().items() if f"handled_total{{{labels}" in series)


def asleep_after_its_first_look(server) -> subprocess.Popen:
    """A top that has looked once, and does not look again until it is woken by SIGCONT."""
    while True:
        looks, models = handled(server, "GetMetrics"), handled(server, "GetModel")
        top = start(server.target, "top", "--json", "--count=1", "--interval=2s")
        until(lambda: handled(server, "GetModel") == models + 2)  # when it connects, and when it looks
        top.send_signal(signal.SIGSTOP)
        if handled(server, "GetMetrics") == looks + 1:
            return top
        top.kill()
        top.communicate()


def train_on(server, folder, offload) -> None:
    model = load_model(folder("llama"))
    remote = offload(model, server)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    train(model, optimizer, range(6))


def answers(prometheus: Prometheus, title: str, legend: str | None = None) -> dict:
    """What the panel's query gives, by the values of its labels."""
    queries = [expression for expression, name in PANELS[title].queries if legend in (None, name)]
    assert len(queries) == 1
    found = prometheus.values(queries[0])
    return {tuple(value for _, value in labels): number for labels, number in found.items() if number == number}


@pytest.mark.timeout(180)
def test_its_numbers_are_those_of_the_dashboards_queries(folder, serve, offload, tmp_path):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0", "--workspace-bytes=16KiB", "--stash-bytes=8KiB")
    server.await_serving()
    prometheus = Prometheus([server.metrics_address], tmp_path)
    try:
        until(lambda: prometheus.values("shardmlp_step") == {(): 0})
        top = asleep_after_its_first_look(server)
        before = server.metrics()
        train_on(server, folder, offload)
        after = server.metrics()
        top.send_signal(signal.SIGCONT)
        (report,) = objects(finish(top))
        committed = 'grpc_server_handled_total{grpc_method="CommitStep",grpc_code="OK"}'
        until(lambda: prometheus.values(f"sum({committed})") == {(): 6})
        assert report["reached"] and report["step"] == 6

        def grown(series: str) -> float:
            return (after[series] - before[series]) / report["seconds"]

        rate = pytest.approx
        for kind in ("forward", "backward"):
            assert report["rows_per_second"][kind] == rate(grown(f'shardmlp_rows_total{{pass="{kind}"}}'))
        for kind in ("received", "sent"):
            series = f'shardmlp_payload_bytes_total{{direction="{kind}"}}'
            assert report["payload_bytes_per_second"][kind] == rate(grown(series))
        for kind in ("useful", "recomputed"):
            assert report["flops_per_second"][kind] == rate(grown(f'shardmlp_gemm_flops_total{{kind="{kind}"}}'))
        computing = _sum(after, "shardmlp_stage_seconds_sum", 'stage="compute"')
        assert report["busy_ratio"] == rate(computing / report["seconds"])
        assert report["attempts_per_second"]["committed"] * report["seconds"] == rate(6)

        times = report["stages"]
        same = {
            ("Stages of a forward, p99", None): {(s,): times["forward"][s]["p99_seconds"] for s in STAGES},
            ("Stages of a backward, p99", None): {(s,): times["backward"][s]["p99_seconds"] for s in STAGES},
            ("Stages, median", None): {(p, s): times[p][s]["p50_seconds"] for p in times for s in STAGES},
            ("Rows a tile", None): {(p,): rows for p, rows in report["tile_rows"].items()},
            ("Recomputed", None): {(): report["recomputed_ratio"]},
            ("Phases of a step, p90", None): {(p,): t for p, t in report["phase_p90_seconds"].items()},
            ("Stash", "{{instance}} found"): {(): report["stash"]["found_ratio"]},
            ("Stash", "{{instance}} full"): {(): report["stash"]["full_ratio"]},
        }
        for (title, legend), shown in same.items():
            assert shown == pytest.approx(answers(prometheus, title, legend), rel=1e-9), title
        rpcs = answers(prometheus, "Rpcs, p99")
        for method in METHODS:
            assert report["rpcs"][method]["p99_seconds"] == pytest.approx(rpcs[method,], rel=1e-9), method
        assert 0 < report["recomputed_ratio"] < 1 and 0 < report["stash"]["found_ratio"] <= 1
        assert report["memory"]["planned_bytes"] == pytest.approx(
            {use: after[f'shardmlp_planned_memory_bytes{{use="{use}"}}'] for use in report["memory"]["planned_bytes"]}
        )
    finally:
        prometheus.stop()


def _sum(metrics: dict[str, float], name: str, label: str = "") -> float:
    return sum(value for series, value in metrics.items() if series.startswith(f"{name}{{") and label in series)


def test_who_has_sealed_and_who_has_not_is_shown(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    client = Connection(server.target, 1, shardmlp.Timeouts()).client
    session = client.open_session(run_id="mine", train=True, trainer_count=2, trainer_rank=1)
    (report,) = objects(ctl(server.target, "top", "--json", "--count=1", "--interval=10ms"))
    assert report["trainers"] == [{"run_id": "mine", "trainer_rank": 1, "trainer_count": 2, "sealed": False}]
    assert report["sessions"] == {"read": 0, "train": 1}
    session.close()


def test_a_server_that_dies_and_comes_back_is_shown_so(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    top = start(server.target, "top", "--json", "--interval=50ms")

    def until_it_says(reached: bool) -> dict:
        while (report := json.loads(top.stdout.readline()))["reached"] != reached:
            pass
        return report

    until_it_says(True)
    server.kill()
    gone = until_it_says(False)
    assert gone["reason"] == "UNREACHABLE" and server.target in gone["error"]
    server.start()
    back = until_it_says(True)
    assert back["away_seconds"] > 0 and back["seconds"] >= back["away_seconds"]
    assert back["step"] == 0
    top.send_signal(signal.SIGINT)
    assert finish(top).code == 0


class Terminal:
    """Of 100 columns and 30 rows, in which top runs."""

    def __init__(self, *arguments: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(slave)
        self._slave = slave  # kept open: what is read is there after the process has ended
        self.process = subprocess.Popen([CTL, *arguments], stdin=slave, stdout=slave, stderr=slave, preexec_fn=_lead)
        self.written = ""

    def read_until(self, text: str) -> None:
        def there() -> bool:
            with contextlib.suppress(BlockingIOError):
                self.written += os.read(self._master, 1 << 16).decode()
            return text in self.written

        os.set_blocking(self._master, False)
        until(there)

    def press(self, keys: str) -> None:
        os.write(self._master, keys.encode())

    def attributes(self) -> list:
        return termios.tcgetattr(self._slave)

    def close(self) -> None:
        os.close(self._master)
        os.close(self._slave)


def _lead() -> None:
    """The terminal is the process's own, so that Ctrl-C reaches it."""
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def test_on_a_terminal_it_draws_screens_and_ctrl_c_gives_the_terminal_back(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    client = Connection(server.target, 1, shardmlp.Timeouts()).client
    session = client.open_session(run_id="\x1b]0;owned\x07", train=True, trainer_count=1, trainer_rank=0)
    terminal = Terminal(f"--target={server.target}", "top", "--interval=20ms")
    terminal.read_until("rank 0 of 1")
    terminal.read_until("forward/s")
    terminal.press("\x03")
    assert terminal.process.wait(timeout=30) == 0
    terminal.read_until(LEAVE)
    assert terminal.written.startswith(ENTER) and terminal.written.rstrip().endswith(LEAVE)
    assert terminal.attributes() == terminal.before
    assert "\x1b]0;owned" not in terminal.written, "a client's text is no control sequence"
    frames = re.split("\x1b\\[H", terminal.written.partition(LEAVE)[0])[1:]
    assert frames and all(frame.count("\n") < 30 for frame in frames)
    widest = max(len(re.sub("\x1b\\[[0-9?]*[a-zA-Z]", "", line)) for frame in frames for line in frame.split("\r\n"))
    assert widest <= 100
    terminal.close()
    session.close()


def test_ctrl_z_gives_the_terminal_back_and_fg_takes_it_again(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    terminal = Terminal(f"--target={server.target}", "top", "--interval=20ms")
    terminal.read_until("forward/s")
    terminal.press("\x1a")
    until(lambda: Path(f"/proc/{terminal.process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    terminal.read_until(LEAVE)
    terminal.written = ""
    terminal.process.send_signal(signal.SIGCONT)
    terminal.read_until(ENTER)
    terminal.read_until("forward/s")
    terminal.process.terminate()
    assert terminal.process.wait(timeout=30) == 0
    terminal.close()


def test_one_that_is_asked_to_end_gives_the_terminal_back_too(folder, serve):
    server = serve(folder("llama"))
    server.await_serving()
    terminal = Terminal(f"--target={server.target}", "top", "--interval=1h")
    terminal.read_until(ENTER)
    terminal.process.terminate()
    assert terminal.process.wait(timeout=30) == 0
    terminal.read_until(LEAVE)
    terminal.close()


def test_a_server_that_is_not_there_at_first_is_a_failure(tmp_path):
    outcome = ctl(f"unix:{tmp_path}/none", "--connect-timeout=100ms", "top")
    assert outcome.code == 3 and "UNREACHABLE" in outcome.said
