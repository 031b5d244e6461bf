"""Rules and dashboard queries on a real Prometheus, which scrapes a real daemon with traffic."""

from __future__ import annotations

import functools
import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import prometheus_server
import pytest
import yaml
from each_row import each_row
from observed_traffic import Traffic
from ports import free_ports
from prometheus_server import PrometheusServer
from small_pool import SMALL_POOL

from kvservice.launch import Daemon

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
UNIT_TESTS = Path(__file__).parent / "alerts_test.yml"
RULES = {
    rule.get("alert") or rule["record"]: rule
    for path in sorted((DEPLOY / "prometheus" / "rules").glob("*.yml"))
    for group in yaml.safe_load(path.read_text())["groups"]
    for rule in group["rules"]
}
ALERTS = {name: rule for name, rule in RULES.items() if "alert" in rule}
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "kvservice.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
# Values that Grafana substitutes for its variables.
GRAFANA = {"$__rate_interval": "5m", "$job": ".*", "$instance": ".*", "$method": ".*"}
# Matches recorded or scraped metrics, with their label matchers.
SELECTOR = re.compile(r"\b(?:kvservice_|process_|instance\w*:kvservice_|up\b)\w*(?::\w+)*(?:\{[^}]*\})?")
# Selectors that match nothing on a healthy daemon: an alert queries a status that a healthy daemon does not return, or
# what a daemon with tenants has.
QUIET = {'kvservice_rpc_duration_seconds_count{status="INTERNAL"}', "kvservice_tenant_refused_calls_total"}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def filled_in(query: str) -> str:
    """Substitute the variables in a query, as Grafana does."""
    for variable, value in GRAFANA.items():
        query = query.replace(variable, value)
    return query


def dashboard_queries() -> dict[str, str]:
    """Return the PromQL queries of panels and annotations, by their location."""
    found = {
        f"{panel['id']} {panel['title']} {target['refId']}": filled_in(target["expr"])
        for panel in PANELS
        for target in panel["targets"]
    }
    annotations = [one for one in DASHBOARD["annotations"]["list"] if not one.get("builtIn")]
    return found | {f"annotation {one['name']}": filled_in(one["expr"]) for one in annotations}


def variable_selectors() -> dict[str, str]:
    """Return the selectors whose label values the dashboard's variables list."""
    variables = [one for one in DASHBOARD["templating"]["list"] if one["type"] == "query"]
    return {one["name"]: filled_in(re.sub(r"label_values\((.*), \w+\)", r"\1", one["definition"])) for one in variables}


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PrometheusServer]:
    """A Prometheus that has scraped a daemon with traffic at least twice, so that rates exist."""
    prometheus_server.require()
    own, target = (f"127.0.0.1:{port}" for port in free_ports(2))
    directory = tmp_path_factory.mktemp("prometheus")
    options = {"http_address": target, "disk": directory / "disk", "disk_gib": 1 / 4}
    options |= {"tcp_address": "127.0.0.1:0", "transfer_address": "127.0.0.1"}
    with (
        Daemon(**SMALL_POOL | options) as daemon,
        PrometheusServer(directory, own, target) as server,
        Traffic(daemon.address).open() as traffic,
    ):
        server.wait_for("a first scrape", lambda: server.values('up{job="kvservice"} == 1'))
        for _ in range(3):
            traffic.lose_session()
        traffic.play()
        rounds = 'kvservice_sessions_closed_total{reason="closed"}'
        server.wait_for("the first round is seen", lambda: server.values(f"{rounds} >= 1"))
        traffic.play()
        server.wait_for("the second round is seen", lambda: server.values(f"{rounds} >= 2"))
        server.wait_for("lost sessions", lambda: server.values('ALERTS{alertname="KVServiceSessionsLost"}'))
        # The recorded metrics of the second round appear at the next evaluation of the rules.
        for selector in sorted({found for rule in RULES.values() for found in SELECTOR.findall(rule["expr"])} - QUIET):
            server.wait_for(selector, functools.partial(server.values, selector))
        yield server


def test_every_query_of_the_dashboard_finds_something(prometheus: PrometheusServer) -> None:
    queries = dashboard_queries()
    assert not [place for place, query in queries.items() if "$" in query]
    assert not {place: query for place, query in queries.items() if not prometheus.values(query)}


def test_every_variable_of_the_dashboard_has_values(prometheus: PrometheusServer) -> None:
    assert not [name for name, selector in variable_selectors().items() if not prometheus.values(selector)]


def test_every_rule_is_about_series_that_exist(prometheus: PrometheusServer) -> None:
    with each_row() as row:
        for name, rule in RULES.items():
            with row(name):
                prometheus.ask("query", query=rule["expr"])
                selectors = SELECTOR.findall(rule["expr"])
                assert selectors
                assert not [each for each in selectors if not (prometheus.values(each) or each in QUIET)]


def test_every_recording_rule_has_recorded(prometheus: PrometheusServer) -> None:
    missing = [name for name in RULES.keys() - ALERTS.keys() if not prometheus.values(name)]
    assert not missing


def test_rules_are_evaluated_without_errors_and_texts_are_filled_in(prometheus: PrometheusServer) -> None:
    rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert {rule["name"] for rule in rules} == RULES.keys()
    assert {rule["health"] for rule in rules} == {"ok"}
    firing = {alert["labels"]["alertname"]: alert for alert in prometheus.ask("alerts")["alerts"]}
    assert re.match(r"[345] sessions at 127\.0\.0\.1:", firing["KVServiceSessionsLost"]["annotations"]["summary"])
    for alert in firing.values():
        assert not re.search(r"\{\{|<no value>|error", alert["annotations"]["summary"])


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    prometheus_server.require()
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_configuration_and_rules_are_valid() -> None:
    done = promtool("check", "config", DEPLOY / "prometheus" / "prometheus.yml")
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_where_they_should_and_nowhere_else() -> None:
    done = promtool("test", "rules", UNIT_TESTS)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("expression", "differs"), [("vector(1)", "got"), ("vector(1) < 0", "exp")], ids=["always", "never"]
)
def test_the_unit_tests_notice_each_alert_that_fires_wrongly(expression: str, differs: str, tmp_path: Path) -> None:
    """If all alerts fire always, the healthy daemon's case gets each without expecting it. If none ever fires, each is
    missed by another case."""
    rules = []
    for path in (DEPLOY / "prometheus" / "rules").glob("*.yml"):
        content = yaml.safe_load(path.read_text())
        for rule in (rule for group in content["groups"] for rule in group["rules"]):
            if "alert" in rule:
                rule["expr"] = expression
        rules.append(str(tmp_path / path.name))
        Path(rules[-1]).write_text(yaml.safe_dump(content))
    tests: dict[str, Any] = yaml.safe_load(UNIT_TESTS.read_text()) | {"rule_files": rules}
    healthy, *others = tests["tests"]
    about = [healthy] if expression == "vector(1)" else others
    (tmp_path / "tests.yml").write_text(yaml.safe_dump(tests | {"tests": about}))
    done = promtool("test", "rules", tmp_path / "tests.yml")
    assert done.returncode != 0
    lines = "".join(re.findall(rf"{differs}: (.*)", done.stdout + done.stderr))
    assert set(re.findall(r'alertname="(\w+)"', lines)) == ALERTS.keys()
