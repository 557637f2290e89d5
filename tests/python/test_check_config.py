"""--check-config: what is wrong with flags and files is all said before anything starts."""

from __future__ import annotations

import os
import subprocess

import pytest
from certificates import Authority


def check(model, *flags: str) -> subprocess.CompletedProcess:
    command = [os.environ["SHARDMLP_SERVER"], f"--model={model}", "--check-config", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_flags_and_files_that_are_in_order(folder, tmp_path):
    authority = Authority(tmp_path)
    tokens = tmp_path / "tokens"
    tokens.write_text("a-token-of-sixteen-or-more")
    secure = (*authority.issue().flags(), f"--tls-client-ca={authority.ca}", f"--token-file={tokens}")
    run = check(folder("llama"), *secure, "--listen=0.0.0.0:50051", "--health-listen=0.0.0.0:50052")
    assert (run.returncode, run.stdout, run.stderr) == (0, "the configuration is in order\n", "")


def test_warnings_are_no_failure(folder):
    run = check(folder("llama"), "--listen=0.0.0.0:50051", "--insecure-listen-anywhere", "--drain-timeout=5m")
    assert run.returncode == 0
    assert "warning: INSECURE: --listen=0.0.0.0:50051 has no TLS" in run.stdout
    assert "warning: --drain-timeout=5m is not below a client's retry budget, 1m" in run.stdout


def test_all_flags_that_contradict_each_other_are_named(folder):
    run = check(folder("llama"), "--lease=8m", "--restore=latest", "--tls-cert=c")
    assert run.returncode == 2
    for what in ("--seal-timeout=5m is below --lease=8m", "--restore=latest needs", "--tls-cert=c needs --tls-key"):
        assert what in run.stderr


def test_all_files_that_are_wrong_are_named(tmp_path):
    authority = Authority(tmp_path)
    issued, expired = authority.issue(), authority.issue(days=-2)
    tokens = tmp_path / "tokens"
    tokens.write_text("short")
    mismatched = (f"--tls-cert={issued.cert}", f"--tls-key={expired.key}")
    run = check(tmp_path / "no-model", *mismatched, f"--token-file={tokens}")
    assert run.returncode == 2
    for what in (
        f"the key in {expired.key} is not that of the first certificate in {issued.cert}",
        f"{tokens}, line 1: got 5 characters",
        str(tmp_path / "no-model"),
    ):
        assert what in run.stderr
    assert f"the certificate in {expired.cert} expired at {expired.end:%Y-%m-%dT%H:%M:%SZ}" in check(
        tmp_path, *expired.flags()
    ).stderr


def test_files_are_looked_at_where_flags_contradict_each_other_too(folder, tmp_path):
    authority = Authority(tmp_path)
    secure = (*authority.issue().flags(), f"--tls-client-ca={authority.ca}", "--token-file=/nowhere/tokens")
    checkpoints = tmp_path / "checkpoints"
    checkpoints.mkdir()
    (checkpoints / "drain").write_text("no checkpoint")
    saves = (f"--checkpoint-dir={checkpoints}", "--drain-checkpoint=drain")
    replicas = ("--replicas=2", "--rank=0", "--coordinator=host0:50050")
    run = check(folder("llama"), *secure, *saves, *replicas)
    assert run.returncode == 2
    for what in (
        "--coordinator=host0:50050 has no --replica-ca: whoever reaches it could join as a replica",
        "/nowhere/tokens: No such file",
        f"--drain-checkpoint: {checkpoints}/drain is no checkpoint",
    ):
        assert what in run.stderr
    assert [file.name for file in checkpoints.iterdir()] == ["drain"]


@pytest.mark.parametrize("days, what", [(-2, "expired at"), (200, "is valid from")])
def test_a_start_finds_the_same(folder, serve, tmp_path, days, what):
    server = serve(folder("llama"), "--listen=127.0.0.1:0", *Authority(tmp_path).issue(days=days).flags())
    assert server.wait() == 1
    assert what in server.log.read_text()
