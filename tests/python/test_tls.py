"""TLS with real certificates: who comes in, what those are told who do not, and certificates that are renewed while
calls go on."""

from __future__ import annotations

import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import grpc
import pytest
import torch
from certificates import Authority, Mounted
from grpc_health.v1 import health_pb2, health_pb2_grpc
from models import load_model, loss_of
from networks import free_port
from waiting import until

import shardmlp

SHORT = shardmlp.Timeouts(connect=2)
EXPIRY = "shardmlp_certificate_expiry_timestamp_seconds"


@pytest.fixture
def authority(tmp_path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def other(tmp_path) -> Authority:
    return Authority(tmp_path / "other")


@pytest.fixture
def serve_tls(serve, folder):
    """serve_tls(*flags) -> a server that listens on TCP too, and where."""

    def start(*flags: str):
        server = serve(folder("llama"), "--listen=127.0.0.1:0", *flags)
        server.await_serving()
        return server, re.findall(r"serving on unix:\S+, (\S+)", server.log.read_text())[-1]

    return start


def read_model(target: str, credentials: shardmlp.Credentials, timeouts: shardmlp.Timeouts = shardmlp.Timeouts()):
    """One rpc over a connection of its own."""
    return shardmlp.connection.Connection(target, 1, timeouts, credentials).model


def refusal(target: str, credentials: shardmlp.Credentials) -> str:
    with pytest.raises(shardmlp.Error) as raised:
        read_model(target, credentials, SHORT)
    assert raised.value.reason == "UNREACHABLE"
    return str(raised.value)


def shown(target: str) -> str:
    """The certificate that the server shows to a connection that is made now."""
    host, port = target.rsplit(":", 1)
    return ssl.get_server_certificate((host, int(port)))


def losses(folder, target: str, credentials: shardmlp.Credentials | None) -> list[float]:
    """Of a model that is trained there, and a checkpoint of it."""
    model = load_model(folder("llama"))
    with shardmlp.offload(model, target, credentials=credentials) as remote:
        optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
        found = []
        for step in range(3):
            loss = loss_of(model, step)
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        remote.save_checkpoint("trained")
        return found


def test_a_model_is_trained_over_tls_as_without(authority, serve_tls, folder):
    """With a certificate on both sides, and a name in the server's that is not the target's."""
    _, target = serve_tls(*authority.issue("mlps.example").flags(), f"--tls-client-ca={authority.ca}")
    own = authority.issue("trainer")
    credentials = shardmlp.Credentials(ca=authority.ca, cert=own.cert, key=own.key, server_name="mlps.example")
    plain, _ = serve_tls()
    assert losses(folder, target, credentials) == losses(folder, plain.target, None)


def test_what_is_wrong_with_the_servers_certificate_is_named(authority, other, serve_tls, tmp_path):
    mounted = Mounted(tmp_path / "mounted", **_files(authority.issue()))
    server, target = serve_tls(f"--tls-cert={mounted['crt']}", f"--tls-key={mounted['key']}")
    known = shardmlp.Credentials(ca=authority.ca)
    assert len(read_model(target, known).layers) == 3

    unknown = refusal(target, shardmlp.Credentials(ca=other.ca))
    assert "the server's certificate, for 127.0.0.1" in unknown and "unable to get local issuer certificate" in unknown
    assert str(other.ca) in unknown
    assert "speaks TLS, and no CA is given" in refusal(target, shardmlp.Credentials())

    for renewed, what in (
        (authority.issue("elsewhere.example"), "IP address mismatch"),
        (authority.issue(days=-1), "certificate has expired"),
    ):
        mounted.put(**_files(renewed))
        until(lambda: shown(target) == renewed.pem)
        assert what in refusal(target, known)
    until(lambda: "expired at" in server.log.read_text())
    mounted.put(**_files(authority.issue()))
    until(lambda: "certificates and tokens are in order again" in server.log.read_text())
    until(lambda: _comes_in(target, known))


def test_a_name_that_is_not_the_servers_is_named(authority, serve_tls):
    _, target = serve_tls(*authority.issue("elsewhere.example").flags())
    named = shardmlp.Credentials(ca=authority.ca, server_name="mlps.example")
    said = refusal(target, named)
    assert "for mlps.example" in said and "ostname mismatch" in said
    assert len(read_model(target, shardmlp.Credentials(ca=authority.ca, server_name="elsewhere.example")).layers) == 3


def test_clients_need_a_certificate_of_the_right_ca(authority, other, serve_tls):
    _, target = serve_tls(*authority.issue().flags(), f"--tls-client-ca={authority.ca}")
    own = authority.issue("trainer")
    assert len(read_model(target, _as(authority, own)).layers) == 3
    assert "wants a certificate, and none is given" in refusal(target, shardmlp.Credentials(ca=authority.ca))
    wrong, expired = other.issue("trainer"), authority.issue("trainer", days=-1)
    assert f"does not take our certificate in {wrong.cert}, which comes from /O=trustme" in refusal(
        target, _as(authority, wrong)
    )
    assert f"our certificate in {expired.cert} has expired" in refusal(target, _as(authority, expired))


def test_a_server_without_tls_is_told_from_a_wrong_certificate(authority, serve_tls):
    _, target = serve_tls()
    assert "does not shake hands as TLS does: wrong version number" in refusal(
        target, shardmlp.Credentials(ca=authority.ca)
    )


@pytest.mark.parametrize(
    "wrong, what",
    [
        (lambda own, other: dict(key=other.key), "is not that of the first certificate in"),
        (lambda own, other: dict(key=None), "a certificate goes with its key"),
        (lambda own, other: dict(ca=None), "with a CA"),
        (lambda own, other: dict(cert="/nowhere/c.pem"), "can't read /nowhere/c.pem: No such file"),
        (lambda own, other: dict(ca=own.key), "is not PEM of certificates"),
        (lambda own, other: dict(key=own.cert), "is not PEM of a private key"),
    ],
)
def test_a_clients_files_are_checked(authority, wrong, what):
    own = authority.issue("trainer")
    files = dict(ca=authority.ca, cert=own.cert, key=own.key)
    with pytest.raises(shardmlp.Error, match=re.escape(what)) as raised:
        read_model("127.0.0.1:1", shardmlp.Credentials(**{**files, **wrong(own, authority.issue())}))
    assert raised.value.reason == "INVALID_ARGUMENT"


def test_certificates_are_renewed_under_load_without_a_failed_call(authority, serve_tls, folder, tmp_path):
    """Training goes on over its connection, others come all the time, and each renewal is seen by who comes then: the
    server's certificate, the trainers' one, and the CA of both, in the order in which one renews a CA."""
    successor = Authority(tmp_path / "successor")
    both = tmp_path / "both.pem"
    both.write_text(authority.ca.read_text() + successor.ca.read_text())
    mounted = Mounted(tmp_path / "server", ca=authority.ca, **_files(authority.issue()))
    mine = Mounted(tmp_path / "trainer", ca=authority.ca, **_files(authority.issue("trainer")))
    server, target = serve_tls(
        f"--tls-cert={mounted['crt']}",
        f"--tls-key={mounted['key']}",
        f"--tls-client-ca={mounted['ca']}",
        "--metrics-address=127.0.0.1:0",
    )
    credentials = shardmlp.Credentials(ca=mine["ca"], cert=mine["crt"], key=mine["key"])
    model = load_model(folder("llama"))
    # No call may need a second try.
    remote = shardmlp.offload(model, target, credentials=credentials, timeouts=shardmlp.Timeouts(retry=0))
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.01))
    failures, done, came = [], threading.Event(), [0, 0]

    def train() -> None:
        while not done.is_set():
            loss_of(model, came[0]).backward()
            optimizer.step()
            optimizer.zero_grad()
            came[0] += 1

    def come() -> None:
        while not done.is_set():
            files = mine.read()
            own = grpc.ssl_channel_credentials(files["ca"], files["key"], files["crt"])
            with grpc.secure_channel(target, own) as channel:  # which tries once
                channel.unary_unary("/shardmlp.v1.Model/GetModel")(b"")
            came[1] += 1

    def guarded(run) -> None:
        try:
            run()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(run,)) for run in (train, come)]
    for thread in threads:
        thread.start()
    last = successor.issue(days=42)
    for place, ca, issued in (
        (mounted, authority.ca, authority.issue(days=40)),
        (mine, authority.ca, authority.issue("trainer")),
        (mounted, both, authority.issue(days=41)),
        (mine, both, successor.issue("trainer")),
        (mounted, successor.ca, last),
    ):
        place.put(ca=ca, **_files(issued))
        if place is mounted:
            until(lambda: shown(target) == issued.pem)
        before = list(came)
        until(lambda: failures or all(now >= then + 3 for now, then in zip(came, before)))
    done.set()
    for thread in threads:
        thread.join()
    assert not failures, failures
    remote.close()
    until(lambda: server.metric(EXPIRY) == last.end.timestamp())


def test_the_series_of_the_certificate_is_there_with_one_alone(authority, serve_tls):
    issued = authority.issue(days=5)
    server, _ = serve_tls(*issued.flags(), "--metrics-address=127.0.0.1:0")
    assert server.metric(EXPIRY) == issued.end.timestamp()
    server, _ = serve_tls("--metrics-address=127.0.0.1:0")
    assert server.metric(EXPIRY) == 0


def test_probes_that_know_no_tls_have_a_port_of_their_own(authority, serve_tls):
    server, target = serve_tls(
        *authority.issue().flags(), f"--tls-client-ca={authority.ca}", "--health-listen=127.0.0.1:0"
    )
    address = re.findall(r"health on (\S+)", server.log.read_text())[-1]
    for service in ("", "shardmlp.v1.Compute"):
        assert check(grpc.insecure_channel(address), service) == health_pb2.HealthCheckResponse.SERVING
    # Over TLS it answers too, as everything else does there.
    own = authority.issue("probe")
    credentials = grpc.ssl_channel_credentials(*(file.read_bytes() for file in (authority.ca, own.key, own.cert)))
    assert check(grpc.secure_channel(target, credentials)) == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.RpcError) as raised:
        check(grpc.insecure_channel(target))
    assert raised.value.code() == grpc.StatusCode.UNAVAILABLE


def check(channel: grpc.Channel, service: str = "") -> int:
    """As a client that knows nothing of ours asks."""
    with channel:
        request = health_pb2.HealthCheckRequest(service=service)
        return health_pb2_grpc.HealthStub(channel).Check(request, timeout=20).status


def test_replicas_meet_over_tls_and_nobody_else_does(authority, other, folder, serve):
    """The second one's certificate is first of another CA, and then of theirs."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        coordinator = f"--coordinator=127.0.0.1:{held.getsockname()[1]}"
    flags = ("--replicas=2", coordinator, "--threads=1", f"--replica-ca={authority.ca}")
    quick = ("--replica-heartbeat=100ms", "--replica-timeout=2s")
    first = serve(folder("llama"), *flags, *quick, "--rank=0", *authority.issue().flags())
    stranger = serve(
        folder("llama"), *flags, *quick, "--rank=1", *other.issue().flags(), "--replica-start-timeout=3s"
    )
    assert stranger.wait() == 1
    assert "rank 0 at 127.0.0.1" in stranger.log.read_text()
    assert "serving on" not in first.log.read_text()
    second = serve(folder("llama"), *flags, *quick, "--rank=1", *authority.issue().flags())
    for server in (first, second):
        server.await_serving()


def test_the_replicas_ca_is_watched(authority, folder, serve, tmp_path):
    ca = tmp_path / "replicas-ca.crt"
    shutil.copy(authority.ca, ca)
    coordinator = f"--coordinator=127.0.0.1:{free_port()}"
    flags = ("--replicas=2", coordinator, f"--replica-ca={ca}", *authority.issue().flags())
    flags += ("--metrics-address=127.0.0.1:0",)
    servers = [serve(folder("llama"), *flags, f"--rank={rank}") for rank in range(2)]
    for server in servers:
        server.await_serving()

    def in_order() -> list[float]:
        return [server.metrics()['shardmlp_files_in_order{file="replica_ca"}'] for server in servers]

    assert in_order() == [1, 1]
    ca.rename(tmp_path / "aside")
    until(lambda: in_order() == [0, 0])
    assert f"{ca}: No such file" in servers[0].log.read_text()
    (tmp_path / "aside").rename(ca)
    until(lambda: in_order() == [1, 1])


def test_the_command_line_takes_flags_or_the_environment(authority, serve_tls):
    _, target = serve_tls(*authority.issue().flags(), f"--tls-client-ca={authority.ca}")
    own = authority.issue("operator")
    program = Path(os.environ["SHARDMLP_SERVER"]).parents[1] / "client/cli/shardmlpctl"
    command = [program, f"--target={target}", "--connect-timeout=2s", "info"]
    files = {"ca": authority.ca, "cert": own.cert, "key": own.key}

    def run(flags=(), environment=()):
        return subprocess.run(
            [*command, *flags], env={**os.environ, **dict(environment)}, capture_output=True, text=True
        )

    by_flags = run(flags=[f"--tls-{name}={file}" for name, file in files.items()])
    by_environment = run(environment={f"SHARDMLP_TLS_{name.upper()}": str(file) for name, file in files.items()})
    assert by_flags.returncode == 0 and "model     llama" in by_flags.stdout, by_flags.stderr
    assert by_environment.stdout == by_flags.stdout, by_environment.stderr
    refused = run()
    assert refused.returncode == 3 and "no CA is given" in refused.stderr


def _files(issued) -> dict[str, Path]:
    return {"crt": issued.cert, "key": issued.key}


def _as(authority: Authority, own) -> shardmlp.Credentials:
    return shardmlp.Credentials(ca=authority.ca, cert=own.cert, key=own.key)


def _comes_in(target: str, credentials: shardmlp.Credentials) -> bool:
    try:
        read_model(target, credentials)
    except shardmlp.Error:
        return False
    return True
