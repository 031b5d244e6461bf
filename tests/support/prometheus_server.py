"""A real Prometheus with the rules of deploy/, which scrapes one daemon every half second."""

from __future__ import annotations

import json
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import debian_packages
import outliving
import pytest
import yaml

DEPLOY = Path(__file__).parents[2] / "deploy" / "prometheus"
PROGRAMS = {"prometheus": "prometheus", "promtool": "prometheus"}


def require() -> None:
    debian_packages.require(PROGRAMS)


class PrometheusServer:
    """A context manager. `address` is Prometheus's address, `target` the daemon's."""

    def __init__(self, directory: Path, address: str, target: str) -> None:
        self._directory = directory
        self._address = address
        self._config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
        self._config["global"] = dict.fromkeys(("scrape_interval", "scrape_timeout", "evaluation_interval"), "500ms")
        (job,) = [job for job in self._config["scrape_configs"] if job["job_name"] == "kvservice"]
        job["static_configs"] = [{"targets": [target]}]
        self._config["scrape_configs"] = [job]

    def _write_config(self) -> Path:
        """Write the configuration. Alerts have no delay, so they fire immediately."""
        rules = self._directory / "rules"
        rules.mkdir()
        for path in (DEPLOY / "rules").glob("*.yml"):
            content = yaml.safe_load(path.read_text())
            for rule in (rule for group in content["groups"] for rule in group["rules"]):
                rule.pop("for", None)
            (rules / path.name).write_text(yaml.safe_dump(content))
        config = self._directory / "prometheus.yml"
        config.write_text(yaml.safe_dump(self._config))
        return config

    def __enter__(self) -> PrometheusServer:
        command = [
            "prometheus",
            f"--config.file={self._write_config()}",
            f"--storage.tsdb.path={self._directory / 'data'}",
            f"--web.listen-address={self._address}",
        ]
        outliving.watch()
        with (self._directory / "log").open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self.wait_for("it answers", self._answers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(30)

    def _answers(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail((self._directory / "log").read_text()[-3000:])
        try:
            with urllib.request.urlopen(f"http://{self._address}/-/ready", timeout=10):
                return True
        except OSError:  # it also answers 503 for a while
            return False

    def wait_for(self, what: str, ready: Callable[[], Any], timeout_s: float = 60) -> Any:
        """Poll `ready` and return its first true value."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := ready():
                return value
            time.sleep(0.25)
        pytest.fail(f"Prometheus: {what}: not within {timeout_s} s")

    def ask(self, path: str, **parameters: str) -> Any:
        """Call the API and return `data` of the answer. If Prometheus rejects the query, the test fails with its
        error."""
        body = urllib.parse.urlencode(parameters).encode() or None
        try:
            with urllib.request.urlopen(f"http://{self._address}/api/v1/{path}", data=body, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            with error:
                pytest.fail(f"{parameters}: {error.read().decode()}")

    def values(self, query: str) -> list[float]:
        """Return the current value of each series that a query finds, without NaN, which is the result of 0 / 0."""
        found = [float(series["value"][1]) for series in self.ask("query", query=query)["result"]]
        return [value for value in found if value == value]
