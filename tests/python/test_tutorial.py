"""docs/tutorial.md, block by block, as a reader would run it."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import matplotlib.image
import pytest

TUTORIAL = Path(__file__).parents[2] / "docs/tutorial.md"


@pytest.fixture
def terminal():
    """terminal(command): runs it beside the test, and ends it with the test. The server's program is on the PATH."""
    processes = []
    folder = Path(os.environ["SHARDMLP_SERVER"]).parent

    def run(command: str) -> None:
        environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
        processes.append(subprocess.Popen(["sh", "-c", f"exec {command}"], env=environment))

    yield run
    for process in processes:
        process.terminate()
        assert process.wait(timeout=30) == 0


def test_tutorial(terminal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = re.findall(r"^```(\w+)\n(.*?)^```$", TUTORIAL.read_text(), re.MULTILINE | re.DOTALL)
    assert {language for language, _ in blocks} == {"python", "sh"}
    for language, text in blocks:
        if language == "sh":
            terminal(text.strip())
        else:
            exec(compile(text, str(TUTORIAL), "exec"), names)

    losses = names["losses"]
    assert len(losses) == 60
    assert losses[0] > 4 and losses[-1] < 1, losses
    assert names["resumed"] == losses[30:]
    assert names["ids"][0].tolist() == list(range(7, 18))
    picture = matplotlib.image.imread("tutorial/loss.png")  # [height, width, RGBA]
    assert picture.shape[0] > 300 and picture.shape[1] > 600
    assert picture[..., :3].min() < 0.1 and picture[..., :3].max() == 1  # something is drawn
