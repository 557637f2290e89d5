"""One server under clients that come, go, stall in mid-message and die: do its memory, descriptors, threads and
sessions stay where they are?

The rule, for each of them: over the second half of the run, the straight line through its samples (least squares) rises
by no more than what is allowed; and once everyone is gone it is back, within what is allowed, where it was before the
crowd came, after one visit of each kind. Memory is not asked to come back, since the allocator keeps what it was given,
but to rise no more. Then the server still computes rightly, and drains with status 0.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import linear_regression, median

from conftest import Server
from ctl import CTL
from links import connect
from models import save_model
from waiting import until

EXAMPLE = CTL.parents[1] / "cpp/example_train_step"
STALL = 2.0  # seconds
HOLD = 1.5 * STALL  # that a client stands still: the server ends it, or it goes by itself just before
FLAGS = (
    "--lease=3s",
    f"--stall-timeout={STALL:g}s",
    "--max-sessions=32",
    "--stash-bytes=256KiB",
    "--threads=1",
    "--metrics-address=127.0.0.1:0",
    "--log-level=error",
)
KINDS = ("verify", "train", "look", "kill", "freeze", "stall", "idle")
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
MIB = 1 << 20


@dataclass(frozen=True)
class Sample:
    seconds: float  # since the crowd came
    resident_mib: float
    descriptors: float
    threads: float
    sessions: float


@dataclass(frozen=True)
class Bound:
    rise: float  # over the second half
    share: float  # or of what it is there, where that is more
    back: float  # above what it was before, once everyone is gone


BOUNDS = {
    "resident_mib": Bound(rise=4, share=0.03, back=float("inf")),
    "descriptors": Bound(rise=6, share=0, back=4),
    "threads": Bound(rise=3, share=0, back=6),  # gRPC keeps as many as were busy at once
    "sessions": Bound(rise=4, share=0, back=0),
}


@dataclass(frozen=True)
class Verdict:
    name: str
    before: float
    quarters: tuple[float, ...]  # medians
    rise: float
    allowed: float
    after: float
    allowed_after: float

    @property
    def plateau(self) -> bool:
        return self.rise <= self.allowed

    @property
    def back(self) -> bool:
        return self.after <= self.allowed_after


def judge(name: str, before: Sample, samples: list[Sample], after: Sample) -> Verdict:
    bound = BOUNDS[name]
    times = [sample.seconds for sample in samples]
    values = [getattr(sample, name) for sample in samples]
    half = len(samples) // 2
    slope = linear_regression(times[half:], values[half:]).slope
    quarters = [values[len(values) * n // 4 : len(values) * (n + 1) // 4] for n in range(4)]
    start = getattr(before, name)
    return Verdict(
        name=name,
        before=start,
        quarters=tuple(median(quarter) for quarter in quarters),
        rise=slope * (times[-1] - times[half]),
        allowed=max(bound.rise, bound.share * median(values[half:])),
        after=getattr(after, name),
        allowed_after=start + bound.back,
    )


class Watched:
    """A server, and what it has at a time."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self._began = time.monotonic()

    def begin(self) -> None:
        self._began = time.monotonic()

    def sample(self) -> Sample:
        proc = Path(f"/proc/{self.server.pid}")
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines())
        metrics = self.server.metrics()
        return Sample(
            seconds=time.monotonic() - self._began,
            resident_mib=int(status["VmRSS"].split()[0]) / 1024,
            descriptors=len(list((proc / "fd").iterdir())),
            threads=int(status["Threads"]),
            sessions=sum(metrics[f'shardmlp_sessions{{role="{role}"}}'] for role in ("train", "read")),
        )

    def at_rest(self) -> Sample:
        """Once nobody has a session, a call or a connection, or after half a minute."""

        def quiet() -> bool:
            return self.sample().sessions == 0 and self.server.metric("shardmlp_open_calls") == 0

        with contextlib.suppress(AssertionError):
            until(quiet)
        lowest = self.sample()
        for _ in range(20):  # sockets are closed a little later than calls
            time.sleep(0.05)
            lowest = min(lowest, self.sample(), key=lambda sample: sample.descriptors)
        return lowest


class Visit:
    """Of one client to the server, of a kind."""

    def __init__(self, server: Server, dice: random.Random) -> None:
        self._target = server.target
        self._dice = dice

    def pay(self, kind: str) -> str:
        """What became of the client."""
        return getattr(self, f"_{kind}")()

    def _spawn(self, *command: object) -> subprocess.Popen:
        return subprocess.Popen([*map(str, command)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _ctl(self, target: str, *arguments: object) -> subprocess.Popen:
        return self._spawn(CTL, f"--target={target}", "--connect-timeout=2s", *arguments)

    def _some(self) -> subprocess.Popen:
        """A reader, or a trainer."""
        if self._dice.random() < 0.5:
            return self._ctl(self._target, "verify", f"--rows={self._dice.randint(1, 2048)}")
        return self._spawn(EXAMPLE, self._target)

    def _ended(self, process: subprocess.Popen) -> str:
        try:
            return f"status {process.wait(timeout=20)}"
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return "was ended after 20 s"

    def _verify(self) -> str:
        return self._ended(self._ctl(self._target, "verify", f"--rows={self._dice.randint(1, 64)}"))

    def _train(self) -> str:
        return self._ended(self._spawn(EXAMPLE, self._target))

    def _look(self) -> str:
        return self._ended(self._ctl(self._target, "top", "--json", "--count=2", "--interval=50ms"))

    def _kill(self) -> str:
        process = self._some()
        time.sleep(self._dice.uniform(0, 0.08))
        process.kill()
        process.wait()
        return "was killed"

    def _freeze(self) -> str:
        process = self._some()
        time.sleep(self._dice.uniform(0, 0.08))
        process.send_signal(signal.SIGSTOP)
        time.sleep(HOLD)
        process.kill()
        process.wait()
        return "was killed, having stood still"

    def _stall(self) -> str:
        """What it sends is cut at a byte, and the connection stays."""
        with contextlib.closing(Stop(self._target, self._dice.randint(1, 200_000))) as stop:
            process = self._ctl(stop.address, "verify", "--rows=1024")
            time.sleep(HOLD)
            process.kill()
            process.wait()
        return "stood still in mid-message" if stop.held else "was done before"

    def _idle(self) -> str:
        """A connection that says nothing, or not all of the first word."""
        with contextlib.closing(connect(self._target)) as connection:
            with contextlib.suppress(OSError):
                connection.sendall(PREFACE[: self._dice.choice((0, 10, len(PREFACE)))])
            time.sleep(self._dice.uniform(0, HOLD))
        return "went away"


class Stop:
    """A way to the server for one connection: passes ``count`` bytes of what the client sends, and holds the rest."""

    def __init__(self, server: str, count: int) -> None:
        self._server = server
        self._left = count
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(10)
        self._ends: list[socket.socket] = []
        self.address = "127.0.0.1:%d" % self._listener.getsockname()[1]
        self.held = False
        threading.Thread(target=self._open, daemon=True).start()

    def close(self) -> None:
        self._listener.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def _open(self) -> None:
        with contextlib.suppress(OSError):
            client, _ = self._listener.accept()
            self._ends += [client, connect(self._server)]
            threading.Thread(target=self._pass, args=(self._ends[1], client), daemon=True).start()
            self._pass(client, self._ends[1])

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                if source is self._ends[0]:
                    data, self._left = data[: self._left], self._left - len(data[: self._left])
                    self.held = self._left == 0
                sink.sendall(data)
                if source is self._ends[0] and self.held:
                    return


class Crowd:
    """Clients that visit one after the other, ``clients`` of them at a time, until told to stop."""

    def __init__(self, server: Server, clients: int, pause: float, seed: int) -> None:
        self.visits: Counter[tuple[str, str]] = Counter()
        self._server = server
        self._pause = pause
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._come, args=(random.Random(f"{seed} {number}"),), daemon=True)
            for number in range(clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60)

    def _come(self, dice: random.Random) -> None:
        visit = Visit(self._server, dice)
        while not self._over.is_set():
            kind = dice.choice(KINDS)
            self.visits[kind, visit.pay(kind)] += 1
            self._over.wait(dice.uniform(0, 2 * self._pause))


@dataclass(frozen=True)
class Outcome:
    seconds: float
    verdicts: list[Verdict]
    visits: dict[str, int]
    samples: list[Sample]
    right: bool  # it computed rightly when all was over
    status: int  # it then ended with

    @property
    def well(self) -> bool:
        return self.right and self.status == 0 and all(verdict.plateau and verdict.back for verdict in self.verdicts)


def play(server: Server, seconds: float, clients: int, pause: float, seed: int, log=lambda line: None) -> Outcome:
    server.await_serving()
    watched = Watched(server)
    first = Visit(server, random.Random(seed))
    for kind in KINDS:
        log(f"first visit: {kind}, which {first.pay(kind)}")
    before = watched.at_rest()
    log(f"before: {before}")
    samples = []
    every = min(1.0, seconds / 80)
    watched.begin()
    crowd = Crowd(server, clients, pause, seed)
    while not samples or samples[-1].seconds < seconds:
        time.sleep(every)
        samples.append(watched.sample())
        if len(samples) % 60 == 0:
            log(f"{sum(crowd.visits.values())} visits; {samples[-1]}")
    crowd.stop()
    after = watched.at_rest()
    log(f"after: {after}")
    right = subprocess.run([CTL, f"--target={server.target}", "verify"], capture_output=True).returncode == 0
    return Outcome(
        seconds=samples[-1].seconds,
        verdicts=[judge(name, before, samples, after) for name in BOUNDS],
        visits={f"{kind} {what}": count for (kind, what), count in sorted(crowd.visits.items())},
        samples=samples,
        right=right,
        status=server.stop(),
    )


def table(outcome: Outcome) -> str:
    lines = [
        f"{'':12}{'before':>9}{'medians of the quarters':>40}{'rise':>8}{'allowed':>9}{'after':>9}{'allowed':>9}",
    ]
    for verdict in outcome.verdicts:
        quarters = "".join(f"{quarter:10.1f}" for quarter in verdict.quarters)
        lines.append(
            f"{verdict.name:12}{verdict.before:9.1f}{quarters}{verdict.rise:8.2f}{verdict.allowed:9.1f}"
            f"{verdict.after:9.1f}{verdict.allowed_after:9.1f}  "
            + ("plateau" if verdict.plateau else "RISES")
            + ("" if verdict.back else ", NOT BACK")
        )
    lines += [f"{count:6} {what}" for what, count in outcome.visits.items()]
    lines.append(
        f"{sum(outcome.visits.values())} visits in {outcome.seconds:.0f} s; then the server's results were "
        f"{'right' if outcome.right else 'WRONG'}, and it ended with status {outcome.status}"
    )
    return "\n".join(lines)


def draw(outcome: Outcome, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, rows = pyplot.subplots(len(BOUNDS), 1, sharex=True, figsize=(9, 8), layout="constrained")
    minutes = [sample.seconds / 60 for sample in outcome.samples]
    for axes, verdict in zip(rows, outcome.verdicts):
        axes.plot(minutes, [getattr(sample, verdict.name) for sample in outcome.samples], linewidth=0.8)
        axes.axhline(verdict.before, color="grey", linestyle=":", linewidth=0.8)
        axes.set_ylabel(verdict.name)
        axes.set_ylim(bottom=0)
    rows[-1].set_xlabel("minutes")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=1200, help="1200, 20 minutes, by default")
    parser.add_argument("--clients", type=int, default=3, help="at a time; 3 by default")
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between a client's visits; 0.5 by default")
    parser.add_argument("--seed", type=int, default=1, help="who comes, and when it dies")
    parser.add_argument("--json", type=Path, help="where all samples and verdicts go")
    parser.add_argument("--plot", type=Path, help="where a picture goes, a .png")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="shardmlp-soak-") as scratch:
        server = Server(save_model("llama", Path(scratch) / "model"), Path(scratch), FLAGS)
        try:
            outcome = play(
                server,
                options.seconds,
                options.clients,
                options.pause,
                options.seed,
                lambda line: print(line, file=sys.stderr, flush=True),
            )
        finally:
            server.stop()
    if options.json is not None:
        options.json.write_text(json.dumps({**asdict(outcome), "well": outcome.well}, indent=1))
    if options.plot is not None:
        draw(outcome, options.plot)
    print(table(outcome))
    return 0 if outcome.well else 1


if __name__ == "__main__":
    sys.exit(main())
