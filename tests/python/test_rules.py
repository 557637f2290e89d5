"""Alert rules: promtool makes each fire and clear, and would see it if one did not."""

from __future__ import annotations

import copy
import itertools
import re
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/shardmlp.rules.yaml"
TESTS = sorted(RULES.parent.glob("*.test.yaml"))
PAGE = (ROOT / "docs/operations.md").read_text()

READ = yaml.safe_load(RULES.read_text())
ALERTS = {rule["alert"]: rule for group in READ["groups"] for rule in group["rules"] if "alert" in rule}


def promtool(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_rules_are_rules():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def minutes(time: str) -> int:
    return int(time[:-1]) * {"m": 1, "h": 60}[time[-1]]


def test_every_alert_fires_and_clears():
    tested = promtool("test", "rules", *TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    stories = {name: [] for name in ALERTS}
    for test in itertools.chain(*(yaml.safe_load(file.read_text())["tests"] for file in TESTS)):
        cases = sorted(test["alert_rule_test"], key=lambda case: minutes(case["eval_time"]))
        for name in {case["alertname"] for case in cases}:
            fires = [bool(case["exp_alerts"]) for case in cases if case["alertname"] == name]
            stories[name].append([fired for fired, _ in itertools.groupby(fires)])
    for name, seen in stories.items():
        assert [False, True, False] in seen, f"{name} is quiet, fires and clears; got {seen}"


@pytest.mark.parametrize("name", ALERTS)
@pytest.mark.parametrize("change", [{"expr": "vector(1) > 2"}, {"for": "10h"}, {"labels": {}}], ids=str)
def test_an_alert_that_is_wrong_is_seen(tmp_path, name, change):
    wrong = copy.deepcopy(READ)
    for group in wrong["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule.update(change)
    (tmp_path / RULES.name).write_text(yaml.safe_dump(wrong))
    for file in TESTS:
        stories = yaml.safe_load(file.read_text())
        stories["tests"] = [test for test in stories["tests"] if f"'{name}'" in str(test)]
        (tmp_path / file.name).write_text(yaml.safe_dump(stories))
    tested = promtool("test", "rules", *tmp_path.glob("*.test.yaml"))
    assert tested.returncode != 0 and name in tested.stdout + tested.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_the_alert(name):
    page, _, anchor = ALERTS[name]["annotations"]["runbook_url"].partition("#")
    assert (ROOT / page).samefile(ROOT / "docs/operations.md")
    headings = [re.sub(r"\W+", "-", heading.lower()) for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)]
    assert anchor == name.lower() and anchor in headings
