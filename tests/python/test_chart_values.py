"""The Helm chart's values: what can't start, or opens more than was asked for, is refused by name; what is let through
starts, and its notes say what is true."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from certificates import Authority
from helm import CHART, NAMESPACE, Helm, flags_of
from test_chart import INSECURE, VALUES, check

SERVICE = f"shardmlp.{NAMESPACE}.svc.cluster.local"
PEERS = f"shardmlp-peers.{NAMESPACE}.svc.cluster.local"
TOKEN = "a-token-of-sixteen-or-more"
# Of what the chart sets, nothing else goes by these.
FREE = {"--restore", "--log-format"}


@pytest.fixture(scope="module")
def helm(tmp_path_factory):
    return Helm(tmp_path_factory.mktemp("helm"))


@pytest.fixture
def secrets(tmp_path):
    """What Kubernetes mounts, by path in the pod."""
    authority = Authority(tmp_path / "authority")
    issued = authority.issue(SERVICE, f"*.{PEERS}")
    token = tmp_path / "token"
    token.write_text(TOKEN)
    return {
        "/secrets/tls/tls.crt": issued.cert,
        "/secrets/tls/tls.key": issued.key,
        "/secrets/tls/ca.crt": authority.ca,
        "/secrets/client-ca/ca.crt": authority.ca,
        "/secrets/replica-ca/ca.crt": authority.ca,
        "/secrets/token/token": token,
    }


def refusal(helm, *arguments: str, release: str = "shardmlp") -> str:
    run = helm.run("template", release, CHART, "--namespace", NAMESPACE, *arguments)
    assert run.returncode != 0, run.stdout
    return run.stderr


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ("replicas=0", "replicas"),
        ("memory.planGiB=16Gi", "planGiB"),
        ("model.dtype=f8", "dtype"),
        ("model.layers=5-2", "model.layers: 5-2"),
        ("stashGiB=16", "stashGiB: 16"),
        ("drain.seconds=5", "drain"),
        ("seconds.exit=1", "exit"),
        ("seconds.drainCheckpoint=0", "drainCheckpoint"),
        ("seconds.replicaStart=5", "replicaStart"),
        ("extraFlags={threads}", "extraFlags"),
        ("tls.clientCaSecretName=ca", "tls.clientCaSecretName needs tls.secretName"),
        ("tls.replicaCaSecretName=ca", "tls.replicaCaSecretName needs tls.secretName"),
        ("podLabels.app\\.kubernetes\\.io/name=other", "podLabels: app.kubernetes.io/name"),
        ("podLabels.app\\.kubernetes\\.io/instance=other", "podLabels: app.kubernetes.io/instance"),
        ("prometheusRule.enabled=true,prometheusRule.for.Stalled=1h", "no alert Stalled"),
        ("prometheusRule.for.ShardmlpDown=soon", "ShardmlpDown"),
    ],
)
def test_wrong_values_are_refused_by_name(helm, wrong, named):
    assert named in refusal(helm, INSECURE, f"--set={wrong}")


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ("", ["tls.secretName", "tls.clientCaSecretName or tokenSecretName"]),
        ("replicas=2", ["tls.secretName", "tls.clientCaSecretName or tokenSecretName", "tls.replicaCaSecretName"]),
        ("tokenSecretName=t", ["tls.secretName"]),
        ("tls.secretName=t", ["tls.clientCaSecretName or tokenSecretName"]),
        ("replicas=2,tls.secretName=t,tls.clientCaSecretName=ca", ["tls.replicaCaSecretName"]),
    ],
)
def test_what_is_open_has_to_be_asked_for(helm, given, missing):
    arguments = [f"--set={given}"] if given else []
    assert re.findall(r"without ([\w. ]+) whoever", refusal(helm, *arguments)) == missing
    run = helm.run("install", "shardmlp", CHART, "--dry-run=client", *arguments, INSECURE)
    assert run.returncode == 0, run.stderr
    assert re.findall(r"WARNING: without ([\w. ]+) whoever", run.stdout) == missing


def test_what_is_secure_has_no_warning(helm):
    run = helm.run("install", "shardmlp", CHART, "--dry-run=client", *VALUES["tls"])
    assert run.returncode == 0 and "WARNING" not in run.stdout
    bare = helm.run("install", "shardmlp", CHART, "--dry-run=client", *VALUES["tls"], "--set=networkPolicy.enabled=false")
    assert "WARNING: no NetworkPolicy" in bare.stdout


def test_flags_that_the_chart_sets_are_refused_by_name(helm):
    bare = "--set-json=extraFlags=[]"
    own = {flag for values in VALUES.values() for flag in flags_of(helm.render(*values, bare))} - FREE
    assert {"--drain-timeout", "--listen", "--coordinator", "--replica-ca", "--stash-bytes", "--frozen"} <= own
    flags = [f"{flag}=x" for flag in sorted(own | {"--rank"})]
    said = refusal(helm, INSECURE, f"--set=extraFlags={{{','.join(flags)}}}")
    assert re.findall(r"extraFlags: (--[a-z-]+) ", said) == sorted(own | {"--rank"})
    assert flags_of(helm.render(INSECURE, "--set=extraFlags={--restore=NAME}"))["--restore"] == "NAME", "the last counts"


@pytest.mark.parametrize("name", VALUES)
def test_server_would_start(helm, folder, secrets, name):
    flags = flags_of(helm.render(*VALUES[name])) | {"--model": folder("llama")}
    if "--replicas" in flags:
        flags["--rank"] = "0"
    if "--layers" in flags:
        flags["--layers"] = "0-2"  # all that this model has
    arguments = [f"{flag}={secrets.get(value, value)}" if value else flag for flag, value in flags.items()]
    command = [os.environ["SHARDMLP_SERVER"], *arguments, "--check-config"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr


def test_notes_have_a_command_that_reaches_a_server_with_tls_and_tokens(helm, folder, serve, secrets):
    values = "--set=tls.secretName=t,tokenSecretName=t"
    run = helm.run("install", "shardmlp", CHART, "--namespace", NAMESPACE, "--dry-run=client", values)
    command = re.search(r"exec shardmlp-0 -- env (.+) shardmlpctl info", run.stdout)[1].split()
    environment = {name: str(secrets.get(value, value)) for name, _, value in (part.partition("=") for part in command)}
    flags = flags_of(helm.render(values))
    own = [f"{flag}={secrets[flags[flag]]}" for flag in ("--tls-cert", "--tls-key", "--token-file")]
    server = serve(folder("llama"), "--listen=127.0.0.1:0", *own)
    server.await_serving()
    target = re.findall(r"serving on unix:\S+, (\S+)", server.log.read_text())[-1]
    assert info(target, environment).returncode == 0
    assert info(target, environment | {"SHARDMLP_TLS_SERVER_NAME": f"shardmlp-0.{PEERS}"}).returncode == 0
    for lacks in environment:
        without = {name: value for name, value in environment.items() if name != lacks}
        assert info(target, without).returncode != 0, lacks


def info(target: str, environment: dict[str, str]) -> subprocess.CompletedProcess:
    program = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"
    command = [program, f"--target={target}", "--connect-timeout=2s", "info"]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def test_names_fit_whatever_the_release_is_called(helm):
    rendered = helm.render(INSECURE, release="production")
    assert ("StatefulSet", "production-shardmlp") in rendered
    for (_, name), resource in helm.render(INSECURE, release="r" * 53).items():
        assert len(name) <= 63 - len("-1234567890"), "a StatefulSet's pods have a hash of this length as a label"
        check(resource)

    for release in ("7b", "llama-3.1"):
        assert f"the release {release} would have Services of the name" in refusal(helm, INSECURE, release=release)


def test_trainers_are_told_what_to_name(helm):
    run = helm.run("install", "shardmlp", CHART, "--namespace", NAMESPACE, "--dry-run=client", INSECURE, "--set=replicas=2")
    assert run.returncode == 0, run.stderr
    for rank in range(2):
        assert f'"shardmlp-{rank}.shardmlp-peers.{NAMESPACE}.svc.cluster.local:50051"' in run.stdout
