"""A Prometheus of one's own, and what it is asked."""

from __future__ import annotations

import json
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path

OWN_LABELS = ("__name__", "instance", "job", "namespace")


class Prometheus:
    """Scrapes addresses, four times a second, and evaluates the rules of a file as often."""

    def __init__(self, targets: list[str], scratch: Path, rules: Path | None = None) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._address = "127.0.0.1:%d" % free.getsockname()[1]
        config = {
            "global": {"scrape_interval": "250ms", "scrape_timeout": "250ms", "evaluation_interval": "250ms"},
            "scrape_configs": [
                {
                    "job_name": "shardmlp",
                    "static_configs": [{"targets": targets, "labels": {"namespace": "default"}}],
                }
            ],
        }
        if rules is not None:
            config["rule_files"] = [str(rules)]
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

    def await_ready(self, seconds: float = 30) -> None:
        deadline = time.monotonic() + seconds
        while self.get("query", query="vector(1)") is None:
            if time.monotonic() > deadline or self._process.poll() is not None:
                raise TimeoutError(f"Prometheus does not answer; {self.log}: {self.log.read_text()[-2000:]}")
            time.sleep(0.05)

    def get(self, path: str, **parameters: str):
        """The data of an answer of its HTTP API; None where it is not ready yet. ValueError, with what it says, for a
        query that is none."""
        url = f"http://{self._address}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == 503:
                return None
            raise ValueError(json.load(error)["error"]) from error
        except urllib.error.URLError:
            return None

    def values(self, query: str) -> dict[tuple, float]:
        """Of an instant query, by labels other than those that Prometheus and its configuration add."""
        answer = self.get("query", query=query)
        values = {}
        for series in answer["result"] if answer else []:
            labels = {name: value for name, value in series["metric"].items() if name not in OWN_LABELS}
            values[tuple(sorted(labels.items()))] = float(series["value"][1])
        return values

    def range(self, query: str, begin: float, end: float, step: float) -> list[tuple[dict[str, str], list, list]]:
        """Labels, times and values of each series that the query gives between two times, NaN left out."""
        answer = self.get("query_range", query=query, start=str(begin), end=str(end), step=str(step))
        found = []
        for series in answer["result"] if answer else []:
            points = [(at, float(value)) for at, value in series["values"] if value != "NaN"]
            if points:
                found.append((series["metric"], [at for at, _ in points], [value for _, value in points]))
        return found
