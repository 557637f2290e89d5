"""A real Prometheus scrapes a server under load, and what it stored is asked for as dashboards and alerts ask."""

from __future__ import annotations

import json
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from cutting_proxy import CuttingProxy
from models import load_model, loss_of
from waiting import until

import shardmlp

FAMILIES = {
    "shardmlp_stage_seconds": "histogram",
    "shardmlp_rows_total": "counter",
    "shardmlp_payload_bytes_total": "counter",
    "shardmlp_gemm_flops_total": "counter",
    "shardmlp_repeated_rows_total": "counter",
    "shardmlp_stash_bytes": "gauge",
    "shardmlp_stash_tickets_total": "counter",
    "shardmlp_queued_tiles": "gauge",
    "shardmlp_open_calls": "gauge",
    "shardmlp_sessions": "gauge",
    "shardmlp_planned_memory_bytes": "gauge",
    "shardmlp_step": "gauge",
    "shardmlp_attempt": "gauge",
    "shardmlp_steps_total": "counter",
    "shardmlp_step_phase_seconds": "histogram",
    "shardmlp_non_finite_steps_total": "counter",
    "shardmlp_replica_generation": "gauge",
    "shardmlp_replica_members": "gauge",
    "shardmlp_replica_generations_lost_total": "counter",
    "shardmlp_synced_bytes_total": "counter",
    "shardmlp_failures_total": "counter",
    "grpc_server_started_total": "counter",
    "grpc_server_handled_total": "counter",
    "grpc_server_handling_seconds": "histogram",
    "process_cpu_seconds_total": "counter",
    "process_resident_memory_bytes": "gauge",
    "process_virtual_memory_bytes": "gauge",
    "process_open_fds": "gauge",
}

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
    "process_cpu_seconds_total": 1,
}


OWN_LABELS = ("__name__", "instance", "job")


class Prometheus:
    """Scrapes one address, four times a second."""

    def __init__(self, target: str, scratch) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = "127.0.0.1:%d" % free.getsockname()[1]
        config = {"scrape_configs": [{"job_name": "shardmlp", "static_configs": [{"targets": [target]}]}]}
        config["global"] = {"scrape_interval": "250ms", "scrape_timeout": "250ms"}
        (scratch / "prometheus.yml").write_text(json.dumps(config))  # JSON is YAML
        self.log = scratch / "log"
        with open(self.log, "wb") as log:
            self._process = subprocess.Popen(
                [
                    "prometheus",
                    f"--config.file={scratch}/prometheus.yml",
                    f"--storage.tsdb.path={scratch}/data",
                    f"--web.listen-address={self._address}",
                ],
                stdout=log,
                stderr=log,
            )

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=30)

    def get(self, path: str, **parameters: str):
        """The data of an answer of its HTTP API; None where it is not ready yet."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.URLError as error:
            if getattr(error, "code", 503) != 503:
                raise
            return None

    def values(self, query: str) -> dict[tuple, float]:
        """Of an instant query, by labels other than those that Prometheus adds."""
        answer = self.get("query", query=query)
        values = {}
        for series in answer["result"] if answer else []:
            labels = {name: value for name, value in series["metric"].items() if name not in OWN_LABELS}
            values[tuple(sorted(labels.items()))] = float(series["value"][1])
        return values

    def await_all(self, query: str, expected: int) -> None:
        """Until the query gives so many series and each is above 0."""
        values = {}

        def holds() -> bool:
            values.update(self.values(query))
            return len(values) == expected and all(value > 0 for value in values.values())

        try:
            until(holds)
        except AssertionError:
            pytest.fail(f"{query}: expected {expected} series above 0, got {values}")


@pytest.fixture
def prometheus(tmp_path):
    started = []

    def start(target: str) -> Prometheus:
        started.append(Prometheus(target, tmp_path))
        return started[-1]

    yield start
    for one in started:
        one.stop()
        print(one.log.read_text())


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

    families = {name: facts[0] for name, facts in monitor.get("metadata").items()}
    ours = {name: facts["type"] for name, facts in families.items() if not name.startswith("exposer_")}  # the library's
    assert ours == FAMILIES
    assert all(facts["help"] for facts in families.values())
    for series, count in MOVING.items():
        monitor.await_all(f"max_over_time({series}[5m]) - min_over_time({series}[5m])", count)
    monitor.await_all('shardmlp_failures_total{reason="UNKNOWN_CHECKPOINT"}', 1)
    monitor.await_all('shardmlp_planned_memory_bytes{use!="master_weights"}', 7)
    monitor.await_all("process_resident_memory_bytes < process_virtual_memory_bytes", 1)
    monitor.await_all("process_open_fds", 1)
    monitor.await_all("shardmlp_replica_members", 1)
    assert monitor.values("shardmlp_synced_bytes_total") == {(): 0}, "there is no other replica"
    assert monitor.values("shardmlp_queued_tiles").keys() == {()}
    # As a dashboard asks.
    monitor.await_all(
        "histogram_quantile(0.9, sum by (pass, stage, le) (rate(shardmlp_stage_seconds_bucket[1m])))", 2 * 6
    )
    monitor.await_all("sum(rate(shardmlp_gemm_flops_total[1m]))", 1)
    restores = 'grpc_server_handled_total{grpc_method="RestoreCheckpoint"}'
    monitor.await_all(f"sum by (grpc_code) (rate({restores}[1m])) > 0", 2)  # one worked, one failed
    proxy.close()


def test_names_and_types_are_as_prometheus_wants_them(folder, serve):
    server = serve(folder("llama"), "--metrics-address=127.0.0.1:0")
    with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=30) as answer:
        text = answer.read()
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, timeout=60)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")
