"""Puts servers under load, watches them with a Prometheus that has deploy/prometheus' rules, asks every query of
deploy/grafana's dashboard and of the rules, and draws the dashboard from the answers.

Fails, naming them, where a query is none or finds nothing.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from load import Load, Servers
from monitor import Prometheus
from panels import read_panels
from render import render
from rules import check_rules

ROOT = Path(__file__).resolve().parents[3]
RATE_INTERVAL = 3.0  # seconds; 12 scrapes
POINTS = 180


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/dashboard", description=__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="how long the load lasts at least (default: 60)")
    parser.add_argument("--out", type=Path, help="where the picture goes, a .png (default: none is drawn)")
    parser.add_argument("--dashboard", type=Path, default=ROOT / "deploy/grafana/shardmlp.json")
    parser.add_argument("--rules", type=Path, default=ROOT / "deploy/prometheus/shardmlp.rules.yaml")
    arguments = parser.parse_args()

    panels = read_panels(arguments.dashboard, rate_interval=f"{RATE_INTERVAL:.0f}s")
    with tempfile.TemporaryDirectory(prefix="shardmlp-dashboard-") as folder:
        scratch = Path(folder)
        servers = Servers(scratch)
        try:
            prometheus = Prometheus(servers.metrics, scratch, arguments.rules)
            try:
                prometheus.await_ready()
                wrong = watch(prometheus, servers, arguments, panels)
            finally:
                prometheus.stop()
        finally:
            servers.stop()
    for line in wrong:
        print(line, file=sys.stderr)
    queries = sum(len(panel.queries) for panel in panels)
    print(f"{len(panels)} panels, {queries} queries, {len(wrong)} of them and of the rules wrong")
    return 1 if wrong else 0


def watch(prometheus: Prometheus, servers: Servers, arguments, panels) -> list[str]:
    load = Load(servers)
    load.run(RATE_INTERVAL)  # rates have something to go by from here on
    begin = time.time()
    load.run(arguments.seconds)
    end = time.time()
    wrong = check_rules(prometheus)
    load.stop()
    for panel in panels:
        wrong += panel.ask(prometheus, begin, end, max((end - begin) / POINTS, 0.25))
    if arguments.out is not None:
        render(panels, begin, "shardmlp", arguments.out)
    return wrong


sys.exit(main())
