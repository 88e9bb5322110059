"""docs/metrics.md, deploy/prometheus and deploy/grafana against the metrics that there are."""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from typing import Any

import metrics_catalogue as catalogue
import pytest
import yaml
from debian_tools import program
from metrics_catalogue import ROOT

DASHBOARDS = catalogue.dashboards()
PANELS = [
    pytest.param(name, panel, id=f"{name}-{panel['title']}")
    for name, dashboard in DASHBOARDS.items()
    for panel in catalogue.panels(dashboard)
]
EXPRESSIONS = [
    *(t["expr"] for d in DASHBOARDS.values() for p in catalogue.panels(d) for t in p["targets"]),
    *(rule["expr"] for rule in catalogue.rules()),
]
SERVICES = ("gateway", "target", "draft")


# ---- the documentation ----------------------------------------------------------------------


def test_documented_metrics_are_those_of_the_registries() -> None:
    there, told = catalogue.registered(), catalogue.documented()
    assert {name: shape for name, shape in told.items() if there.get(name) != shape} == {}
    assert sorted(there.keys() - told.keys()) == [], "not in docs/metrics.md"


def test_rules_and_alerts_are_documented() -> None:
    text = (ROOT / "docs/metrics.md").read_text()
    for name in (*catalogue.recording_rules(), *(alert["alert"] for alert in catalogue.alerts())):
        assert f"`{name}`" in text, name
    told = set(re.findall(r"`(SpecBridge\w+|specbridge:[\w:]+)`", text))
    assert told == {*catalogue.recording_rules(), *(a["alert"] for a in catalogue.alerts())}


# ---- expressions ----------------------------------------------------------------------------


@pytest.mark.parametrize("expr", dict.fromkeys(EXPRESSIONS))
def test_expressions_read_series_and_labels_that_exist(expr: str) -> None:
    known = catalogue.series()
    reads = catalogue.reads(expr)
    assert not reads.unknown and reads.names
    for name, label in reads.selectors:
        assert label in {*known[name], *catalogue.SCRAPED}, f"{name} has no label {label}"
    labels = {label for name in reads.names for label in known[name]}
    assert catalogue.grouped_labels(expr) <= labels | catalogue.SCRAPED


@pytest.mark.parametrize(
    ("expr", "unknown"),
    [
        ("sum(rate(specbridge_gateway_rounds_total[5m]))", set()),
        ("sum(rate(specbridge_gateway_rounds[5m]))", {"specbridge_gateway_rounds"}),
        ('sum by (le) (specbridge_gateway_round_seconds{le="x_y"})', {"specbridge_gateway_round_seconds"}),
        ("specbridge:no_such_rule:ratio5m > 0.5", {"specbridge:no_such_rule:ratio5m"}),
        ("1e3 * up", set()),
    ],
)
def test_the_reader_of_expressions_sees_names_that_do_not_exist(expr: str, unknown: set[str]) -> None:
    assert catalogue.reads(expr).unknown == unknown


# ---- Prometheus -----------------------------------------------------------------------------


def test_prometheus_loads_the_rules_and_scrapes_under_the_names_they_know() -> None:
    config = yaml.safe_load((ROOT / "deploy/prometheus/prometheus.yml").read_text())
    assert config["rule_files"] == ["rules/*.yml"] and catalogue.RULES
    assert {job["job_name"] for job in config["scrape_configs"]} == set(SERVICES)
    jobs = {
        job
        for expr in EXPRESSIONS
        for found in re.findall(r'job=~?"([^"]*)"', expr)
        for job in found.split("|")
    }
    assert jobs == set(SERVICES)


def test_every_alert_says_how_bad_it_is_and_what_it_means() -> None:
    for alert in catalogue.alerts():
        assert alert["labels"]["severity"] in ("page", "warn"), alert["alert"]
        assert alert["annotations"]["summary"], alert["alert"]


def test_every_alert_has_a_unit_test_in_which_it_fires() -> None:
    text = (ROOT / "deploy/prometheus/rules/tests/alerts.yml").read_text()
    cases = [case for test in yaml.safe_load(text)["tests"] for case in test.get("alert_rule_test", ())]
    fires = {case["alertname"] for case in cases if case["exp_alerts"]}
    assert fires == {alert["alert"] for alert in catalogue.alerts()}


@pytest.mark.parametrize(
    "command",
    [
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("test", "rules", "deploy/prometheus/rules/tests/alerts.yml"),
    ],
    ids=" ".join,
)
def test_promtool_is_content(command: tuple[str, ...]) -> None:
    promtool = program("promtool", package="prometheus")
    done = subprocess.run([promtool, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


# ---- Grafana --------------------------------------------------------------------------------


def test_provisioning_and_dashboards_name_the_same_data_source() -> None:
    folder = ROOT / "deploy/grafana/provisioning"
    [source] = yaml.safe_load((folder / "datasources/prometheus.yml").read_text())["datasources"]
    [provider] = yaml.safe_load((folder / "dashboards/specbridge.yml").read_text())["providers"]
    assert source["type"] == "prometheus" and provider["type"] == "file"
    assert provider["allowUiUpdates"] is False
    texts = "".join(path.read_text() for path in catalogue.DASHBOARDS)
    assert set(re.findall(r'"datasource": \{[^}]*"uid": "([^"]+)"\}', texts)) == {source["uid"]}
    assert "${DS_" not in texts and "__inputs" not in texts  # resolve on manual import only


@pytest.mark.parametrize("name", DASHBOARDS)
def test_a_dashboard_can_be_provisioned(name: str) -> None:
    dashboard = DASHBOARDS[name]
    assert dashboard["id"] is None and dashboard["uid"] == f"specbridge-{name}" and dashboard["title"]
    ids = Counter(panel["id"] for panel in dashboard["panels"])
    titles = Counter(panel["title"] for panel in dashboard["panels"])
    assert max(ids.values()) == 1 and max(titles.values()) == 1
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    text = (ROOT / f"deploy/grafana/dashboards/{name}.json").read_text()
    used = set(re.findall(r"\$(\w+)", text)) - {"__rate_interval", "__range", "__all"}
    assert used == variables
    for variable in dashboard["templating"]["list"]:
        metric, label = re.findall(r"label_values\((\w+), (\w+)\)", variable["definition"])[0]
        assert metric in catalogue.series() and label == "instance" and variable["allValue"] == ".*"


@pytest.mark.parametrize("name", DASHBOARDS)
def test_panels_do_not_overlap(name: str) -> None:
    taken: dict[tuple[int, int], str] = {}
    for panel in DASHBOARDS[name]["panels"]:
        at = panel["gridPos"]
        assert at["x"] + at["w"] <= 24
        for x in range(at["x"], at["x"] + at["w"]):
            for y in range(at["y"], at["y"] + at["h"]):
                assert (x, y) not in taken, (panel["title"], taken.get((x, y)))
                taken[x, y] = panel["title"]


@pytest.mark.parametrize(("name", "panel"), PANELS)
def test_a_panel_explains_itself(name: str, panel: dict[str, Any]) -> None:
    assert len(panel["description"]) > 10
    defaults = panel["fieldConfig"]["defaults"]
    assert defaults["unit"] and defaults["thresholds"]["steps"][0]["value"] is None
    refs = [target["refId"] for target in panel["targets"]]
    assert refs and len(set(refs)) == len(refs)
    if len(refs) > 1:
        assert all(target["legendFormat"] for target in panel["targets"])
    for target in panel["targets"]:
        labels = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
        # What a legend shows has to survive the aggregation.
        assert labels <= catalogue.grouped_labels(target["expr"])
