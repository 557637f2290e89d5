"""The wheel of scripts/wheel, in an environment of its own: whole, and with all that it needs inside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from auditwheel.architecture import Architecture
from auditwheel.libc import Libc
from auditwheel.policy import WheelPolicies
from models import load_model

ROOT = Path(__file__).parents[2]

IDS = [[1, 2, 3, 4]]

# Prints the libraries that are loaded for the package: what torch has loaded already does not count.
PROGRAM = """
    import json, os, sys
    import torch, transformers

    def mapped():
        return {os.path.realpath(line.split()[-1]) for line in open("/proc/self/maps") if ".so" in line}

    before = mapped()
    import shardmlp

    folder, target = sys.argv[1:]
    model, remote = shardmlp.from_pretrained(folder, target)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    ids = torch.tensor(json.load(sys.stdin))
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    optimizer.step()
    after = mapped()
    result = {"loss": loss.item(), "step": remote.step, "package": shardmlp.__file__, "libraries": sorted(after - before)}
    remote.close()
    print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    environment = {**os.environ, "SHARDMLP_VENV": sys.prefix}
    command = [ROOT / "scripts/wheel", tmp_path_factory.mktemp("wheel")]
    return Path(subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip())


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A new environment that has the wheel, and this one's torch and transformers."""
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    python = folder / "bin/python"
    install = [sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, env=_environment())
    packages = next(folder.glob("lib/python3*/site-packages"))
    own = [path for path in sys.path if path.endswith("-packages")]
    (packages / "torch.pth").write_text("\n".join(own))
    return folder


def _environment() -> dict[str, str]:
    """Without the package that is tested elsewhere."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


def test_wheel_says_where_it_runs_and_has_types(wheel, environment):
    assert "manylinux" in wheel.name
    package = next(environment.glob("lib/python3*/site-packages/shardmlp"))
    for name in ("py.typed", "_native.pyi", "pretrained.py"):
        assert (package / name).exists()


def test_wheel_trains_without_the_systems_libraries(wheel, environment, folder, serve):
    server = serve(folder("llama"))
    run = subprocess.run(
        [environment / "bin/python", "-c", textwrap.dedent(PROGRAM), folder("llama"), server.target],
        input=json.dumps(IDS),
        env=_environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    result = json.loads(run.stdout)
    assert Path(result["package"]).is_relative_to(environment)
    assert result["step"] == 1
    ids = torch.tensor(IDS)
    assert result["loss"] == pytest.approx(load_model(folder("llama"))(input_ids=ids, labels=ids).loss.item(), rel=1e-5)

    libraries = [Path(path) for path in result["libraries"]]
    assert any(path.name.startswith("libgrpc-") and path.is_relative_to(environment) for path in libraries)
    policies = WheelPolicies(libc=Libc.GLIBC, arch=Architecture.detect())
    everywhere = policies.get_policy_by_name(wheel.stem.split("-")[-1]).whitelist
    systems = [path for path in libraries if not any("python" in part for part in path.parts)]
    assert [path for path in systems if not path.name.startswith(tuple(everywhere))] == []
