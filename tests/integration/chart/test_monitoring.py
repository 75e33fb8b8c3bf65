"""Rules and dashboards use exported metrics and valid PromQL, and alerts fire when they should."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from tests.e2e.binaries import find
from tests.integration.chart.exported_metrics import SUFFIXES, exported
from tests.integration.chart.promql_sources import RULES, alerts, panels, rules, variables
from tests.integration.chart.rendering import CHART, ROOT, of_kind, render, the
from tests.requirements import PROMTOOL
from tools.dashboards import DASHBOARDS
from tools.dashboards.grafana import render_dashboard
from tools.metrics_page import metrics_of

from specrl.telemetry import metrics
from specrl_operator import telemetry
from specrl_operator.children.autoscaler import METRIC

RULES_TEST = Path(__file__).parent / "rules_test.yaml"


def promtool(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    PROMTOOL.require()
    return subprocess.run([find("promtool"), *arguments], capture_output=True, text=True, timeout=300, check=False)


VALUES = {"namespace": ".*", "rljob": ".*", "operator": ".*", "__rate_interval": "5m"}


def expressions() -> dict[str, str]:
    return (
        panels(VALUES)
        | variables(VALUES)
        | {str(rule.get("alert") or rule.get("record")): str(rule["expr"]) for rule in rules()}
    )


def asked_for(expression: str) -> dict[str, set[str]]:
    """Return the series in an expression and the labels that select them."""
    found: dict[str, set[str]] = {}
    for name, selector in re.findall(r"\b((?:specrl|vllm)[_:][a-z0-9_:]+)(?:\{([^}]*)\})?", expression):
        found.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector))
    return found


@pytest.mark.parametrize("name", expressions())
def test_every_expression_uses_exported_metrics(name: str) -> None:
    known = exported()
    expression = expressions()[name]
    recorded = {str(rule["record"]) for rule in rules() if "record" in rule}
    wanted = asked_for(expression)
    assert wanted
    for series, labels in wanted.items():
        if series not in recorded:
            assert series in known, f"{series} is exported by no program"
            assert labels <= known[series], f"{series} has no label {labels - known[series]}"
    grouped = {label for by in re.findall(r"\bby \(([^)]*)\)", expression) for label in re.split(r",\s*", by)}
    assert grouped <= set().union(*(known.get(series, {"namespace", "rljob"}) for series in wanted))


def test_the_adapter_serves_the_metric_that_autoscalers_follow() -> None:
    """The rule was a snippet in the docs, for a metric that nothing exported. rules_test.yaml evaluates its query."""
    values = "monitoring.metricsAdapter.enabled=true,monitoring.metricsAdapter.namespace=monitoring"
    found = the(render("--set", values), "ConfigMap", "specrl-adapter-rules")
    assert found["metadata"]["namespace"] == "monitoring"
    (rule,) = yaml.safe_load(found["data"]["config.yaml"])["externalRules"]
    assert asked_for(rule["seriesQuery"]) == {METRIC: {"namespace", "rljob"}}
    assert "name" not in rule, "the external metric has the series' name"
    assert METRIC in exported()
    filled = rule["metricsQuery"].replace("<<.Series>>", METRIC)
    filled = filled.replace("<<.LabelMatchers>>", 'namespace="rl",rljob="good"')
    tests = yaml.safe_load(RULES_TEST.read_text())["tests"]
    assert filled in [case["expr"] for test in tests for case in test.get("promql_expr_test", [])]
    assert "specrl-adapter-rules" not in {it["metadata"]["name"] for it in of_kind(render(), "ConfigMap")}


def test_every_exported_metric_is_in_a_panel_or_a_rule() -> None:
    """Eleven were in neither, so that nobody saw them."""
    asked = set().union(*(asked_for(expression) for expression in expressions().values()))
    ours = (metric for module in (metrics, telemetry) for metric in metrics_of(module))
    unseen = {it._name for it in ours if not asked & {it._name + suffix for suffix in SUFFIXES[it._type]}}
    assert not unseen, "add a panel in tools/dashboards/ or a rule, or remove the metric"


def test_a_misspelt_metric_would_be_found() -> None:
    wanted = asked_for('sum by (rljob) (rate(specrl_coordinator_stepp_seconds_sum{fase="x"}[5m]))')
    assert wanted == {"specrl_coordinator_stepp_seconds_sum": {"fase"}}
    assert not wanted.keys() & exported().keys()


def test_every_panel_is_promql(tmp_path: Path) -> None:
    records = [
        {"record": f"panel_{number}", "expr": expression}
        for number, expression in enumerate((panels(VALUES) | variables(VALUES)).values())
    ]
    assert len(records) > 20
    file = tmp_path / "panels.yaml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": records}]}))
    done = promtool("check", "rules", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_rules_are_promql() -> None:
    done = promtool("check", "rules", "--lint-fatal", RULES)
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_fire_exactly_when_they_should() -> None:
    done = promtool("test", "rules", RULES_TEST)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_in_a_test_and_has_a_runbook() -> None:
    cases = [
        case for test in yaml.safe_load(RULES_TEST.read_text())["tests"] for case in test.get("alert_rule_test", [])
    ]
    assert {case["alertname"] for case in cases if case["exp_alerts"]} == set(alerts())
    headings = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert headings == alerts()
    for rule in rules():
        if "alert" in rule:
            annotations = rule["annotations"]
            assert isinstance(annotations, dict)
            assert annotations["runbook_url"] == f"docs/alerts.md#{str(rule['alert']).lower()}"


def test_the_committed_dashboards_are_the_generated_ones() -> None:
    for name, dashboard in DASHBOARDS.items():
        committed = json.loads((CHART / "files" / "dashboards" / name).read_text())
        assert committed == render_dashboard(dashboard), "run `make gen`"
    assert {path.name for path in (CHART / "files" / "dashboards").iterdir()} == set(DASHBOARDS)


def test_panels_do_not_overlap_and_have_descriptions() -> None:
    for dashboard in map(render_dashboard, DASHBOARDS.values()):
        corners = [(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in dashboard["panels"]]
        assert len(set(corners)) == len(corners)
        assert len({panel["title"] for panel in dashboard["panels"]}) == len(corners)
        assert all(panel["description"].endswith(".") for panel in dashboard["panels"])
        assert all(panel["fieldConfig"]["defaults"]["unit"] for panel in dashboard["panels"])
        named = {variable["name"] for variable in dashboard["templating"]["list"]} - {"datasource"}
        asked = {word for panel in dashboard["panels"] for word in re.findall(r"\$([a-z]+)", str(panel["targets"]))}
        assert asked == named
