"""``shardmlpctl plan``: of a model on disk, against the server's own plan of it; of a server, against a load of it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"
RATES = ("--server-tflops=1", "--trainer-tflops=0.5", "--link-gbps=10")


def plan(*arguments: str) -> str:
    run = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.parametrize("family, flags", [("llama", ()), ("gpt2", ("--dtype=bf16", "--max-calls=3"))])
def test_memory_is_what_the_server_plans(folder, serve, tmp_path, family, flags):
    flags = (*flags, "--workspace-bytes=256KiB", "--stash-bytes=1MiB")
    server = serve(folder(family), *flags)
    server.await_serving()
    config_alone = tmp_path / "config_alone"
    config_alone.mkdir()
    shutil.copy(folder(family) / "config.json", config_alone)
    printed = plan("plan", f"--model={config_alone}", *RATES, *flags)
    lines = server.log.read_text().splitlines()
    begin = lines.index("memory plan")
    own = lines[begin : begin + 11]
    assert "total" in own[-2] and "tiles of" in own[-1]
    assert "\n".join(own) in printed
    # And what it says of itself, to the byte.
    info = json.loads(plan(f"--target={server.target}", "info", "--json"))["memory"]
    memory = json.loads(plan("plan", f"--model={config_alone}", *RATES, *flags, "--json"))["servers"][0]["memory"]
    assert {use: memory[use] for use in info} == info


def test_a_plan_as_json(folder):
    report = json.loads(plan("plan", f"--model={folder('llama')}", *RATES, "--servers=3", "--rows=100", "--json"))
    assert [(server["first_layer"], server["last_layer"]) for server in report["servers"]] == [(0, 0), (1, 1), (2, 2)]
    # Three layers of 48 to 80 to 48: 6 H I forward and 16 H I backward; x, x and dy, y and dx in f32.
    assert report["token"]["forward_flops"] == 3 * 6 * 48 * 80
    assert report["token"]["backward_flops"] == 3 * 16 * 48 * 80
    assert report["token"]["sent_bytes"] == 3 * 3 * 48 * 4
    assert report["token"]["received_bytes"] == 3 * 2 * 48 * 4
    assert report["recommendation"] == "local", "a layer this small is not worth a round trip"
    assert "round trips" in report["bound"]


def test_a_server_that_is_there(folder, serve):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0")
    server.await_serving()
    arguments = ["plan", "--rows=4096", "--layers=0", "--duration=400ms"]
    report = json.loads(plan(f"--target={server.target}", *arguments, "--json"))
    assert all(rate > 0 for rate in report["measured"].values())
    assert report["predicted_tokens_per_second"] > 0 and report["loaded_tokens_per_second"] > 0
    assert report["ratio"] == pytest.approx(
        report["loaded_tokens_per_second"] / report["predicted_tokens_per_second"]
    )
    assert report["loaded_tokens_per_second"] == report["load"]["tokens_per_second"]
    assert report["load"]["load"]["rows"] == 4096 and report["load"]["failed_calls"] == 0
    for varied, values in (("shard_bytes", [0, 256 << 10, 1 << 20, 4 << 20]), ("connections", [1, 2])):
        assert [tried["value"] for tried in report[varied]["tried"]] == values
        assert report[varied]["best"] in values
    assert server.metric('grpc_server_handled_total{grpc_method="CommitStep",grpc_code="OK"}') == 0
    table = plan(f"--target={server.target}", *arguments)
    for line in ("measured     round trip", "predicted    ", "loaded       ", "shards      ", "connections "):
        assert line in table


@pytest.mark.parametrize(
    "arguments, code, message",
    [
        (["--model=nowhere", *RATES], 3, "nowhere is not a folder"),
        (["--model=nowhere"], 2, "--server-tflops, --trainer-tflops and --link-gbps"),
        (["--link-gbps=0"], 2, "--link-gbps"),
        (["--target=unix:nowhere", "--connect-timeout=50ms"], 3, "UNREACHABLE"),
    ],
)
def test_what_can_not_be_planned(arguments, code, message):
    run = subprocess.run([PROGRAM, "plan", *arguments], capture_output=True, text=True, timeout=60)
    assert run.returncode == code
    assert message in run.stderr
