"""A Grafana dashboard's panels, as a program reads them."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path

from monitor import Prometheus


@dataclass
class Curve:
    legend: str
    times: list[float]
    values: list[float]


@dataclass
class Panel:
    title: str
    kind: str  # "timeseries", "stat" or "row"
    unit: str
    place: dict[str, int]  # x, y, w and h of 24 columns
    stacked: bool
    queries: list[tuple[str, str]]  # expression and legend
    curves: list[Curve] = field(default_factory=list)

    def ask(self, prometheus: Prometheus, begin: float, end: float, step: float) -> list[str]:
        """Fills ``curves``; returns what was wrong: queries that are none, or that give nothing."""
        wrong = []
        self.curves = []
        for expression, legend in self.queries:
            try:
                answer = prometheus.range(expression, begin, end, step)
            except ValueError as error:
                wrong.append(f"{self.title}: {expression}: {error}")
                continue
            if not answer:
                wrong.append(f"{self.title}: {expression}: nothing")
            self.curves += [Curve(label(legend, labels), times, values) for labels, times, values in answer]
        return wrong


def label(legend: str, labels: dict[str, str]) -> str:
    """As Grafana writes it: {{pass}} stands for the label's value."""
    return re.sub(r"{{\s*(\w+)\s*}}", lambda name: labels.get(name[1], ""), legend)


def read_panels(dashboard: Path, rate_interval: str) -> list[Panel]:
    """With every variable at All, which Grafana fills in as the variable's allValue."""
    read = json.loads(dashboard.read_text())
    values = {v["name"]: v["allValue"] for v in read["templating"]["list"] if v.get("includeAll")}
    values["__rate_interval"] = rate_interval

    def fill(expression: str) -> str:
        return re.sub(r"\$(\w+)", lambda name: values[name[1]], expression)

    panels = []
    for panel in read["panels"]:
        defaults = panel.get("fieldConfig", {}).get("defaults", {})
        panels.append(
            Panel(
                title=panel["title"],
                kind=panel["type"],
                unit=defaults.get("unit", ""),
                place=panel["gridPos"],
                stacked=defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
                queries=[(fill(target["expr"]), target["legendFormat"]) for target in panel.get("targets", [])],
            )
        )
    return panels
