"""The operator's walk in docs/operations.md, block by block in one shell, as a reader would type it; on free ports."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from networks import free_port
from process_group import process_group

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/operations.md").read_text()
BUILD = Path(os.environ["SHARDMLP_SERVER"]).parents[1]
MARK = "== the end of block"


def blocks() -> list[str]:
    """Of the walk, as a shell takes them."""
    (walk,) = re.findall(r"^## A walk.*?\n(.*?)^## ", PAGE, re.MULTILINE | re.DOTALL)
    found = re.findall(r"^```(sh|python)\n(.*?)^```$", walk, re.MULTILINE | re.DOTALL)
    return [text if language == "sh" else f"python3 - <<'END'\n{text}END\n" for language, text in found]


def script() -> str:
    text = "".join(f"{block}echo '{MARK}'\n" for block in blocks())
    for port in re.findall(r"127\.0\.0\.1:(\d+)", text):
        text = text.replace(f":{port}", f":{free_port()}")
    return text.replace("$TREE/build/release", str(BUILD))


@pytest.mark.timeout(180)
def test_the_walk_goes_as_it_is_written(tmp_path):
    python = Path(sys.executable).parent
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PATH": f"{python}:{os.environ['PATH']}"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with process_group(["bash", "-uo", "pipefail", "-c", script()], **options) as shell:
        out, _ = shell.communicate(timeout=150)
    print(out)
    assert shell.returncode == 0
    setting, model, start, load, top, watch, query, save, drain, restart, end = out.split(MARK)[:-1]
    assert setting.strip() == "" and "Error" not in model
    assert "llama, computed in f32" in start and "step      0" in start
    assert load.strip() == ""
    lines = top.strip().splitlines()
    assert len(lines) == 4 and lines[0].split()[:2] == ["time", "step"]
    assert all(line.split()[7] != "0" for line in lines[1:]), "it was at work"
    assert watch.strip() == ""
    asked = [line for line in query.splitlines() if "=>" in line]
    assert len(asked) >= 3 and all(float(line.split("=>")[1].split("@")[0]) > 0 for line in asked)
    assert re.search(r"^saved by-hand: step \d+, \d+ bytes$", save, re.MULTILINE)
    (drained,) = re.findall(r"^drained at step (\d+), and gone$", drain, re.MULTILINE)
    assert f"saved drain: step {drained}," in drain and "ended with status 0" in drain
    assert int(drained) > 0
    assert f"restored checkpoint drain, step {drained}" in restart
    assert "by-hand" in restart and "drain" in restart
    assert "Error" not in end


def test_what_a_walk_started_ends_with_whoever_walks():
    """As where pytest is killed in the middle of it."""
    walk = """
from process_group import process_group
with process_group(["sh", "-c", "sleep 1000 & echo $!; wait"]) as shell:
    shell.wait()
"""
    walker = subprocess.Popen([sys.executable, "-c", walk], cwd=Path(__file__).parent, stdout=subprocess.PIPE, text=True)
    pid = int(walker.stdout.readline())
    assert Path(f"/proc/{pid}").exists()
    walker.kill()
    walker.communicate(timeout=30)  # until nobody has its standard output any more
    assert not Path(f"/proc/{pid}/exe").exists(), "it is gone, or waits for somebody to notice"
