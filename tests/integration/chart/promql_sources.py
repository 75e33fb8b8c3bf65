"""The PromQL of dashboards, recording rules and alerts, read from the files that the chart installs."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import Any

import yaml
from tests.integration.chart.rendering import CHART

RULES = CHART / "files" / "rules.yaml"
DASHBOARDS = CHART / "files" / "dashboards"
LABEL_VALUES = re.compile(r"label_values\((?P<series>.+), (?P<label>\w+)\)")


def panels(values: Mapping[str, str]) -> dict[str, str]:
    """Return the expressions of all panels by dashboard, title and letter. `values` replace Grafana's variables."""
    return {
        f"{name}: {panel['title']} {target['refId']}": _filled(target["expr"], values)
        for name, dashboard in _dashboards().items()
        for panel in dashboard["panels"]
        for target in panel["targets"]
    }


def variables(values: Mapping[str, str]) -> dict[str, str]:
    """Return an expression for each variable that has one series per value of the variable."""
    found = {}
    for name, dashboard in _dashboards().items():
        for variable in dashboard["templating"]["list"]:
            if variable["type"] != "datasource":
                match = LABEL_VALUES.fullmatch(variable["query"]["query"])
                assert match is not None, variable
                expression = f"count by ({match['label']}) ({_filled(match['series'], values)})"
                found[f"{name}: variable {variable['name']}"] = expression
    return found


def groups() -> list[dict[str, Any]]:
    """Return the groups of rules."""
    found: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"]
    return found


def rules() -> list[dict[str, Any]]:
    """Return the recording rules and alerts in the order of the file."""
    return [rule for group in groups() for rule in group["rules"]]


def alerts() -> list[str]:
    """Return the names of the alerts."""
    return [rule["alert"] for rule in rules() if "alert" in rule]


@cache
def _dashboards() -> dict[str, dict[str, Any]]:
    return {path.name: json.loads(path.read_text()) for path in sorted(DASHBOARDS.glob("*.json"))}


def _filled(expression: str, values: Mapping[str, str]) -> str:
    """Replace the variables of an expression. Raises KeyError for a variable without a value."""
    return re.sub(r"\$(\w+)", lambda match: values[match[1]], expression)
