"""Rules as a Prometheus that has loaded them says they are."""

from __future__ import annotations

import re

from monitor import Prometheus

SELECTOR = re.compile(r"\b((?:shardmlp[_:]|grpc_server_|process_)[a-z0-9_:]+)(?:{[^}]*})?")
# Series that a server has only where it is told to have what they are of.
OPTIONAL = (
    "shardmlp_certificate_expiry_timestamp_seconds",
    "shardmlp:certificate_left:seconds",
    "shardmlp_files_in_order",
)


def check_rules(prometheus: Prometheus) -> list[str]:
    """What is wrong: a rule that fails, and a selector in one that finds no series. An alert's own answer is empty where
    all is well, so what it looks at is asked for instead."""
    wrong = []
    for group in prometheus.get("rules")["groups"]:
        for rule in group["rules"]:
            if rule["health"] != "ok":
                wrong.append(f"{rule['name']}: {rule['health']} {rule.get('lastError', '')}")
            for selector in SELECTOR.finditer(rule["query"]):
                if selector[1] not in OPTIONAL and not prometheus.values(selector[0]):
                    wrong.append(f"{rule['name']}: {selector[0]}: nothing")
    return wrong


def alerts(prometheus: Prometheus) -> list[str]:
    """Those that are pending or fire."""
    return sorted(alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"])
