"""A real server for each test that asks for one: the program that SHARDMLP_SERVER names, on a Unix socket."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import tempfile
import urllib.request
from pathlib import Path

import pytest
import torch
from models import FAMILIES, save_model
from twins import Twins
from waiting import until

import shardmlp

QUICK = shardmlp.Timeouts(connect=20, retry=20)


class Server:
    """A server process on a socket of its own, which can be killed and started again."""

    def __init__(self, model: Path, scratch: Path, flags: tuple[str, ...], prefix: tuple[str, ...] = ()) -> None:
        self.target = f"unix:{scratch}/s"
        self.log = scratch / "log"
        self.checkpoints = scratch / "checkpoints"
        self._command = [
            *prefix,
            os.environ["SHARDMLP_SERVER"],
            f"--model={model}",
            f"--listen={self.target}",
            f"--checkpoint-dir={self.checkpoints}",
            "--metrics-address=",
            *flags,
        ]
        self.start()

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self) -> None:
        """As power loss does: no warning."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def freeze(self) -> None:
        """It keeps its connections and answers nothing, until thawed."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)  # all of its threads stand

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def terminate(self) -> None:
        self._process.terminate()

    def wait(self) -> int:
        """The exit status, within half a minute."""
        return self._process.wait(timeout=30)

    def stop(self) -> int:
        self.terminate()
        return self.wait()

    def await_serving(self, times: int = 1) -> None:
        """For clients that do not wait by themselves: until it serves for the n-th time."""
        until(lambda: self.log.read_text().count("serving on") >= times)

    @property
    def metrics_address(self) -> str:
        """Where /metrics is, of a server with --metrics-address=127.0.0.1:0."""
        return until(lambda: re.findall(r"metrics on http://(\S+)/metrics", self.log.read_text()))[-1]

    def metrics(self) -> dict[str, float]:
        """The value of each series as /metrics writes them."""
        with urllib.request.urlopen(f"http://{self.metrics_address}/metrics", timeout=30) as answer:
            lines = [line.rsplit(" ", 1) for line in answer.read().decode().splitlines() if line[0] != "#"]
        return {series: float(value) for series, value in lines}

    def metric(self, series: str) -> float:
        """0 where there is none."""
        return self.metrics().get(series, 0)


@pytest.fixture(autouse=True)
def one_thread():
    """Each test begins with one, as it leaves the cores to its server. What a test uses, such as a launcher, may have
    set another number, and torch's own threads would be missing in a child that the next one forks."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws at random does not depend on the tests before it."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """folder(family) -> the path of its model, made once."""
    made: dict[str, Path] = {}

    def of(family: str, dtype: torch.dtype = torch.float32) -> Path:
        key = f"{family}-{dtype}".replace("torch.", "")
        if key not in made:
            with torch.random.fork_rng():
                made[key] = save_model(family, tmp_path_factory.mktemp(key), dtype)
        return made[key]

    return of


@pytest.fixture
def serve():
    """serve(model folder, *flags) -> Server. Stopped after the test, whose log is shown where the test failed."""
    servers: list[Server] = []
    with tempfile.TemporaryDirectory(prefix="shardmlp-") as scratch:

        def start(model: Path, *flags: str) -> Server:
            own = Path(scratch) / str(len(servers))
            own.mkdir()
            servers.append(Server(model, own, flags))
            return servers[-1]

        yield start
        for server in servers:
            server.stop()
            print(server.log.read_text())


@pytest.fixture(params=list(FAMILIES))
def family(request) -> str:
    return request.param


@pytest.fixture
def offload():
    """shardmlp.offload whose session is closed after the test."""
    remotes: list[shardmlp.Remote] = []

    def call(model: torch.nn.Module, server: Server, **options) -> shardmlp.Remote:
        remotes.append(shardmlp.offload(model, server.target, **{"timeouts": QUICK, **options}))
        return remotes[-1]

    yield call
    for remote in remotes:
        remote.close()


@pytest.fixture
def twins(folder, serve, offload):
    return Twins(folder, serve, offload)
