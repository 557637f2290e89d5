"""Alert rules: promtool makes each fire and clear, and would see it if one did not."""

from __future__ import annotations

import copy
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/shardmlp.rules.yaml"
TESTS = ROOT / "deploy/prometheus/shardmlp.rules.test.yaml"
PAGE = (ROOT / "docs/operations.md").read_text()

READ = yaml.safe_load(RULES.read_text())
ALERTS = {rule["alert"]: rule for group in READ["groups"] for rule in group["rules"] if "alert" in rule}


def promtool(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=60)


def test_the_rules_are_rules():
    checked = promtool("check", "rules", RULES)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_every_alert_fires_and_clears():
    tested = promtool("test", "rules", TESTS)
    assert tested.returncode == 0, tested.stdout + tested.stderr
    seen = {name: [] for name in ALERTS}
    for test in yaml.safe_load(TESTS.read_text())["tests"]:
        for case in sorted(test["alert_rule_test"], key=lambda case: int(case["eval_time"].rstrip("m"))):
            seen[case["alertname"]].append(bool(case["exp_alerts"]))
    for name, fired in seen.items():
        assert fired[:1] + fired[-2:] == [False, True, False], f"{name} is quiet, fires and clears; got {fired}"


@pytest.mark.parametrize("name", ALERTS)
@pytest.mark.parametrize("change", [{"expr": "vector(1) > 2"}, {"for": "10h"}, {"labels": {}}], ids=str)
def test_an_alert_that_is_wrong_is_seen(tmp_path, name, change):
    wrong = copy.deepcopy(READ)
    for group in wrong["groups"]:
        for rule in group["rules"]:
            if rule.get("alert") == name:
                rule.update(change)
    (tmp_path / RULES.name).write_text(yaml.safe_dump(wrong))
    shutil.copy(TESTS, tmp_path)
    tested = promtool("test", "rules", tmp_path / TESTS.name)
    assert tested.returncode != 0 and name in tested.stdout + tested.stderr


@pytest.mark.parametrize("name", ALERTS)
def test_the_runbook_has_the_alert(name):
    page, _, anchor = ALERTS[name]["annotations"]["runbook_url"].partition("#")
    assert (ROOT / page).samefile(ROOT / "docs/operations.md")
    headings = [re.sub(r"\W+", "-", heading.lower()) for heading in re.findall(r"^#+ (.+)$", PAGE, re.MULTILINE)]
    assert anchor == name.lower() and anchor in headings
