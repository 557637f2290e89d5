"""shardmlpctl as a process, beside the server's program."""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

CTL = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"


@dataclass(frozen=True)
class Outcome:
    code: int
    out: str
    said: str  # on stderr


def start(target: str, *arguments: object, **options) -> subprocess.Popen:
    command = [CTL, f"--target={target}", *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


def finish(process: subprocess.Popen, seconds: float = 60) -> Outcome:
    out, said = process.communicate(timeout=seconds)
    return Outcome(process.returncode, out, said)


def ctl(target: str, *arguments: object) -> Outcome:
    """Runs it to its end."""
    return finish(start(target, *arguments))


def objects(outcome: Outcome) -> list[dict]:
    """What it has written as JSON, an object a line."""
    return [json.loads(line) for line in outcome.out.splitlines()]
