"""The dashboard and the rules against a real Prometheus that watches servers under load."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from waiting import until

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/lib/dashboard"))

from load import Load, Servers  # noqa: E402
from monitor import Prometheus  # noqa: E402
from panels import Panel, label, read_panels  # noqa: E402
from render import render, written  # noqa: E402
from rules import alerts, check_rules  # noqa: E402

DASHBOARD = ROOT / "deploy/grafana/shardmlp.json"
RULES = ROOT / "deploy/prometheus/shardmlp.rules.yaml"
PANELS = read_panels(DASHBOARD, rate_interval="3s")
SERIES = re.findall(r"^\| `(shardmlp_\w+)`", (ROOT / "docs/operations.md").read_text(), re.MULTILINE)
# Of those, what neither a panel nor an alert shows.
FOR_SEARCHES_ALONE = {"shardmlp_attempt"}
SELECTOR = re.compile(r"\b(?:shardmlp|grpc_server|process)_\w+{[^}]*}")


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    """A Prometheus that has watched servers under load for some seconds, from ``begin`` to ``end``."""
    scratch = tmp_path_factory.mktemp("watched")
    servers = Servers(scratch)
    prometheus = Prometheus(servers.metrics, scratch, RULES)
    try:
        prometheus.await_ready()
        load = Load(servers)
        load.run(3)
        begin = time.time()
        load.run(3)
        yield SimpleNamespace(prometheus=prometheus, servers=servers, load=load, begin=begin, end=time.time())
        load.stop()
    finally:
        prometheus.stop()
        servers.stop()


def ask(panel: Panel, watched) -> list[str]:
    return panel.ask(watched.prometheus, watched.begin, watched.end, 0.25)


@pytest.mark.timeout(180)
def test_every_panel_has_data_and_the_picture_shows_it(watched, tmp_path):
    wrong = [line for panel in PANELS for line in ask(panel, watched)]
    assert not wrong, "\n".join(wrong)
    render(PANELS, watched.begin, "shardmlp", tmp_path / "dashboard.png")
    assert (tmp_path / "dashboard.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_every_rule_finds_what_it_looks_at(watched):
    assert check_rules(watched.prometheus) == []
    assert watched.prometheus.values("count(shardmlp:message_memory:ratio < 0.9)") == {(): 2}, "of servers at work"


@pytest.mark.parametrize("expression", ['shardmlp_step{instance="nobody"}', "rate(shardmlp_step)", "shardmlp_stap"])
def test_a_query_that_is_wrong_or_finds_nothing_is_seen(watched, expression):
    panel = Panel("Planted", "timeseries", "", {}, False, [("shardmlp_step", ""), (expression, "")])
    (wrong,) = ask(panel, watched)
    assert wrong.startswith(f"Planted: {expression}: ")


def test_the_series_of_replicas_move_as_they_work_together_and_when_one_dies(watched):
    ask = watched.prometheus.values
    assert ask("shardmlp_replicas == shardmlp_replica_members") == {(): 2}
    assert ask("min(shardmlp_synced_bytes_total)")[()] > 0
    watched.load.stop()
    watched.servers.kill(1)
    lost = "shardmlp_replica_generations_lost_total == 1 and shardmlp_replica_members == 0"
    until(lambda: ask(lost) == {(): 1})
    until(lambda: {"ShardmlpDown", "ShardmlpReplicaAway"} <= set(alerts(watched.prometheus)))


def test_each_query_is_of_the_chosen_namespace_and_replica():
    for panel in json.loads(DASHBOARD.read_text())["panels"]:
        for target in panel.get("targets", []):
            selectors = SELECTOR.findall(target["expr"])
            names = re.findall(r"\b(?:shardmlp|grpc_server|process)_", target["expr"])
            assert selectors and len(selectors) == len(names)
            for selector in selectors:
                assert 'namespace=~"$namespace", instance=~"$replica"' in selector, panel["title"]


@pytest.mark.parametrize("title", ["Attempts by outcome", "Gradients that are not finite"])
def test_a_slow_run_is_seen_beside_a_fast_one(tmp_path, title):
    (panel,) = [panel for panel in PANELS if panel.title == title]
    ((expression, legend),) = panel.queries
    series = re.search(r"shardmlp_\w+", expression)[0]
    outcome = {"outcome": "committed"} if "outcome" in legend else {}
    speeds = {"layers-0-15": 10, "layers-16-31": 10, "slow": 1}
    samples = [
        {"labels": written_labels({"namespace": "n", "instance": name} | outcome), "value": speed}
        for name, speed in speeds.items()
    ]
    story = {
        "interval": "1s",
        "input_series": [
            {"series": series + sample["labels"], "values": f"0+{sample['value']}x60"} for sample in samples
        ],
        "promql_expr_test": [{"expr": expression, "eval_time": "1m", "exp_samples": samples}],
    }
    (tmp_path / "panel.test.yaml").write_text(json.dumps({"evaluation_interval": "1s", "tests": [story]}))
    command = ["promtool", "test", "rules", tmp_path / "panel.test.yaml"]
    tested = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    assert "{{instance}}" in legend


def written_labels(labels: dict[str, str]) -> str:
    return "{%s}" % ", ".join(f'{name}="{value}"' for name, value in labels.items())


def test_panels_have_places_of_their_own():
    places = [panel.place for panel in PANELS]
    for a, b in itertools.combinations(places, 2):
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (a, b)
    assert all(place["x"] + place["w"] <= 24 for place in places)


def test_every_series_of_ours_is_shown():
    shown = DASHBOARD.read_text() + RULES.read_text()
    missing = {name for name in SERIES if not re.search(rf"\b{name}(_bucket|_count|_sum)?\b", shown)}
    assert missing == FOR_SEARCHES_ALONE


def test_labels_and_values_are_written_as_people_read_them():
    assert label("{{pass}} of {{ stage }}", {"pass": "forward", "stage": "send"}) == "forward of send"
    assert [written(0.123, "percentunit"), written(2.5e9, "flops"), written(0.002, "s"), written(0, "none")] == [
        "12.3 %",
        "2.5 GFLOP/s",
        "2 ms",
        "0",
    ]
