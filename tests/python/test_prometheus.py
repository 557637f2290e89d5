"""A real Prometheus scrapes a server under load, and what it stored is asked for as dashboards and alerts ask."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from cutting_proxy import CuttingProxy
from models import load_model, loss_of
from waiting import until

import shardmlp
from shardmlp.connection import Connection

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/lib/dashboard"))

from monitor import OWN_LABELS, Prometheus  # noqa: E402

# Name, type and labels of every series, as the page's table has them.
FAMILIES = {
    name: (kind, set(re.findall(r"`(\w+)`", labels)))
    for name, kind, labels in re.findall(
        r"^\| `(\w+)` \| (counter|gauge|histogram) \| [^|]+\| ([^|]*)\|",
        (ROOT / "docs/operations.md").read_text(),
        re.MULTILINE,
    )
}
for of_tls_or_tokens in ("shardmlp_certificate_expiry_timestamp_seconds", "shardmlp_files_in_order"):
    del FAMILIES[of_tls_or_tokens]

METHODS = "Forward|Backward|OpenSession|SealStep|CommitStep|DiscardStep|GetModel|SaveCheckpoint|RestoreCheckpoint"
USED = f'grpc_method=~"{METHODS}"'
# What the load moves, and how many series of each.
MOVING = {
    "shardmlp_stage_seconds_count": 2 * 6,  # passes, stages
    "shardmlp_rows_total": 2,
    "shardmlp_payload_bytes_total": 2,
    "shardmlp_gemm_flops_total": 2,
    "shardmlp_repeated_rows_total": 1,
    'shardmlp_stash_tickets_total{event!="missed"}': 2,
    "shardmlp_open_calls": 1,
    'shardmlp_sessions{role="train"}': 1,
    "shardmlp_step": 1,
    "shardmlp_attempt": 1,
    "shardmlp_steps_total": 3,
    "shardmlp_step_phase_seconds_count": 3,
    "shardmlp_non_finite_steps_total": 1,
    f"grpc_server_started_total{{{USED}}}": 9,
    f'grpc_server_handled_total{{{USED},grpc_code="OK"}}': 9,
    f"grpc_server_handling_seconds_count{{{USED}}}": 9,
    "shardmlp_stash_bytes": 1,
    'shardmlp_failures_total{reason="UNKNOWN_CHECKPOINT"}': 1,
    "process_cpu_seconds_total": 1,
}
# What stands still in it; test_dashboard has replicas, of which one is lost.
RESTING = {
    "shardmlp_queued_tiles",
    "shardmlp_planned_memory_bytes",
    "shardmlp_memory_bound_bytes",
    "shardmlp_replicas",
    "shardmlp_replica_members",
    "shardmlp_replica_generation",
    "shardmlp_replica_generations_lost_total",
    "shardmlp_synced_bytes_total",
    "process_resident_memory_bytes",
    "process_virtual_memory_bytes",
    "process_open_fds",
}


def await_all(prometheus: Prometheus, query: str, expected: int) -> None:
    """Until the query gives so many series and each is above 0."""
    values = {}

    def holds() -> bool:
        values.clear()
        values.update(prometheus.values(query))
        return len(values) == expected and all(value > 0 for value in values.values())

    try:
        until(holds)
    except AssertionError:
        pytest.fail(f"{query}: expected {expected} series above 0, got {values}")


@pytest.fixture
def prometheus(tmp_path):
    started = []

    def start(target: str) -> Prometheus:
        started.append(Prometheus([target], tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.stop()
        print(one.log.read_text())


def labels_of_families(monitor: Prometheus) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for labels in monitor.get("series", **{"match[]": '{job="shardmlp"}'}):
        name = re.sub(r"_(bucket|sum|count)$", "", labels["__name__"])
        if name in FAMILIES:
            found.setdefault(name, set()).update(labels.keys() - {*OWN_LABELS, "le"})
    return found


def load(model, remote, optimizer) -> None:
    """One of everything that is counted, but for connections that break."""
    for seed in range(3):
        loss_of(model, seed).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    (model.model.layers[1].mlp(torch.ones(3, 48)) * float("nan")).sum().backward()
    assert not torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).isfinite()
    optimizer.zero_grad()  # discards
    remote.save_checkpoint("here")
    loss_of(model, 4).backward()
    remote.restore("here")  # aborts
    with pytest.raises(shardmlp.Error):
        remote.restore("nowhere")


@pytest.mark.timeout(180)
def test_prometheus_sees_every_series_move(folder, serve, offload, prometheus):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0", "--workspace-bytes=16KiB", "--stash-bytes=8KiB")
    server.await_serving()
    monitor = prometheus(server.metrics_address)
    until(lambda: monitor.values("up") == {(): 1})
    until(lambda: monitor.values("shardmlp_step") == {(): 0})

    def connect() -> socket.socket:
        connected = socket.socket(socket.AF_UNIX)
        connected.connect(server.target.removeprefix("unix:"))
        return connected

    proxy = CuttingProxy(connect)
    model = load_model(folder("llama"))
    remote = offload(model, proxy)
    optimizer = remote.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    load(model, remote, optimizer)

    # A backward that is cut behind its first result is sent again; a forward that is held is seen to be open.
    mlp, x = model.model.layers[1].mlp, torch.ones(40, 48, requires_grad=True)
    y = mlp(x).sum()
    proxy.cut_at(4)  # header, rows, end; result
    y.backward()
    assert proxy.has_cut
    optimizer.zero_grad()
    with ThreadPoolExecutor(1) as pool:
        proxy.hold_at(2)
        held = pool.submit(mlp, x)
        until(lambda: monitor.values("shardmlp_open_calls") == {(): 1})
        proxy.release()
        held.result(timeout=30)
    until(lambda: monitor.values("shardmlp_open_calls") == {(): 0})

    metadata = {name: facts[0] for name, facts in monitor.get("metadata").items()}
    assert {name: facts["type"] for name, facts in metadata.items()} == {n: kind for n, (kind, _) in FAMILIES.items()}
    assert all(facts["help"] for facts in metadata.values())
    assert labels_of_families(monitor) == {name: labels for name, (_, labels) in FAMILIES.items()}
    assert {re.sub(r"({.*|_count)$", "", series.partition("{")[0]) for series in MOVING} | RESTING == FAMILIES.keys()
    for series, count in MOVING.items():
        await_all(monitor, f"max_over_time({series}[5m]) - min_over_time({series}[5m])", count)
    await_all(monitor, 'shardmlp_planned_memory_bytes{use!="master_weights"}', 7)
    await_all(monitor, "process_resident_memory_bytes < process_virtual_memory_bytes", 1)
    await_all(monitor, "process_open_fds", 1)
    planned = "sum by (instance) (shardmlp_planned_memory_bytes)"
    await_all(monitor, f"shardmlp_memory_bound_bytes > on (instance) {planned}", 1)
    await_all(monitor, "shardmlp_replicas == shardmlp_replica_members", 1)
    assert monitor.values("shardmlp_queued_tiles").keys() == {()}
    # As a dashboard asks.
    quantiles = "histogram_quantile(0.9, sum by (pass, stage, le) (rate(shardmlp_stage_seconds_bucket[1m])))"
    await_all(monitor, quantiles, 2 * 6)
    await_all(monitor, "sum(rate(shardmlp_gemm_flops_total[1m]))", 1)
    restores = 'grpc_server_handled_total{grpc_method="RestoreCheckpoint"}'
    await_all(monitor, f"sum by (grpc_code) (rate({restores}[1m])) > 0", 2)  # one worked, one failed
    proxy.close()


def test_sessions_bring_no_series(folder, serve):
    """Thousands of them, and calls that fail for each of many reasons."""
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0", "--max-sessions=64")
    server.await_serving()
    client = Connection(server.target, 1, shardmlp.Timeouts()).client

    def series() -> set[str]:
        return set(server.metrics())

    before = series()
    for number in range(2000):
        session = client.open_session(run_id=f"run-{number}", train=True, trainer_count=1, trainer_rank=0)
        session.close()
        if number % 100 == 0:
            with pytest.raises(shardmlp.Error):
                client.restore_checkpoint(f"none-{number}")
    assert series() == before
    opened = 'grpc_method="OpenSession",grpc_service="shardmlp.v1.Training",grpc_type="unary"'
    assert server.metric(f"grpc_server_started_total{{{opened}}}") == 2000
    assert server.metric('shardmlp_failures_total{reason="UNKNOWN_CHECKPOINT"}') == 20


def test_names_and_types_are_as_prometheus_wants_them(folder, serve):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0")
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as answer:
        text = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
