"""The operator's walk in docs/operations.md, block by block in one shell, as a reader would type it; on free ports."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from networks import free_port

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
    python = Path(os.sys.executable).parent
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PATH": f"{python}:{os.environ['PATH']}"}
    shell = subprocess.Popen(
        ["bash", "-uo", "pipefail", "-c", script()],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        out, _ = shell.communicate(timeout=150)
    finally:
        # Whatever it left behind, where it did not come to its end.
        subprocess.run(["kill", "-9", "--", f"-{shell.pid}"], capture_output=True)
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
