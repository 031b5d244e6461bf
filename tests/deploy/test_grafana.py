"""The structure of the dashboard and of its provisioning. test_rules.py tests the results of the queries."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from each_row import each_row

DEPLOY = Path(__file__).parents[2] / "deploy"
PROVISIONING = DEPLOY / "grafana" / "provisioning"
DASHBOARD = json.loads((DEPLOY / "grafana" / "dashboards" / "kvservice.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
ALERTS = {
    rule["alert"]: rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "rules" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
}
GRID_COLUMNS = 24
# Panel types of Grafana 12, which has removed graph, singlestat and table-old.
PANEL_TYPES = {"heatmap", "stat", "table", "timeseries"}


@pytest.fixture
def compose() -> Any:
    return yaml.safe_load((DEPLOY / "docker-compose.yml").read_text())["services"]


def cells(panel: Any) -> set[tuple[int, int]]:
    place = panel["gridPos"]
    columns = range(place["x"], place["x"] + place["w"])
    return set(itertools.product(columns, range(place["y"], place["y"] + place["h"])))


def test_panels_lie_side_by_side() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        assert not taken & cells(panel), panel["title"]
        taken |= cells(panel)
    assert {column for column, _ in taken} == set(range(GRID_COLUMNS))
    identities = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(identities) == len(set(identities))


def test_panels_are_of_kinds_that_exist_and_say_what_they_measure() -> None:
    with each_row() as row:
        for panel in PANELS:
            with row(f"{panel['id']} {panel['title']}"):
                assert panel["type"] in PANEL_TYPES
                assert panel["title"]
                assert panel["datasource"]["uid"] == "${datasource}"
                assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
                if panel["type"] in ("stat", "timeseries"):
                    assert panel["fieldConfig"]["defaults"]["unit"]


def test_what_is_chosen_above_holds_for_every_query() -> None:
    variables = {variable["name"] for variable in DASHBOARD["templating"]["list"]}
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    for query in queries:
        # Every selector filters by the selected job and instance.
        assert query.count("{") == query.count('{job=~"$job", instance=~"$instance"') > 0, query
    used = {name for query in queries for name in re.findall(r"\$(\w+)", query)} - {"__rate_interval"}
    assert variables == used | {"datasource"}


def test_alerts_are_shown_and_name_a_section_of_the_operators_manual() -> None:
    (annotation,) = [one for one in DASHBOARD["annotations"]["list"] if one["name"] == "Alerts"]
    (pattern,) = re.findall(r'alertname=~"([^"]*)"', annotation["expr"])
    sections = re.findall(r"(?m)^#+ (.*)$", (DEPLOY / "ALERTS.md").read_text())
    for name, rule in ALERTS.items():
        assert re.fullmatch(pattern, name)
        assert rule["labels"]["severity"] in ("warning", "critical")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"deploy/ALERTS.md#{name.lower()}"
        assert name in sections


def test_grafana_is_given_its_data_source_and_the_dashboards(compose: Any) -> None:
    mounted = dict(volume.split(":")[:2] for volume in compose["grafana"]["volumes"])
    assert mounted["./grafana/provisioning"] == "/etc/grafana/provisioning", "where its image looks"
    (source,) = yaml.safe_load((PROVISIONING / "datasources" / "prometheus.yml").read_text())["datasources"]
    (port,) = [port.split(":")[-1] for port in compose["prometheus"]["ports"]]
    assert source["url"] == f"http://prometheus:{port}"
    assert source["isDefault"], "what the dashboard chooses first"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["global"]["scrape_interval"]
    assert source["jsonData"]["timeInterval"] == scraped
    (provider,) = yaml.safe_load((PROVISIONING / "dashboards" / "kvservice.yml").read_text())["providers"]
    assert mounted["./grafana/dashboards"] == provider["options"]["path"]
    home = compose["grafana"]["environment"]["GF_DASHBOARDS_DEFAULT_HOME_DASHBOARD_PATH"]
    assert home == f"{provider['options']['path']}/kvservice.json"


def test_nobody_can_log_in_to_grafana(compose: Any) -> None:
    environment = compose["grafana"]["environment"]
    assert environment["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert environment["GF_AUTH_DISABLE_LOGIN_FORM"] == "true"
    assert environment["GF_AUTH_BASIC_ENABLED"] == "false"
