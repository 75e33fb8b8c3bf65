"""Dashboards as Grafana's JSON model."""

from __future__ import annotations

from typing import Any

from tools.dashboards.model import Dashboard, Kind, Panel, Variable

PANEL_WIDTH, PANEL_HEIGHT = 12, 8  # of a grid of 24 columns: two panels in a row
SCHEMA_VERSION = 39  # Grafana 11; later ones migrate it when they load it
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


def as_grafana(dashboard: Dashboard) -> dict[str, Any]:
    """The dashboard as Grafana's JSON model."""
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["specrl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-3h", "to": "now"},
        "links": [
            {
                "type": "dashboards",
                "title": "specrl",
                "tags": ["specrl"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [datasource, *map(_variable, dashboard.variables)]},
        "panels": [_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.name,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    column, row = number % 2, number // 2
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind.value,
        "datasource": PROMETHEUS,
        "gridPos": {"x": PANEL_WIDTH * column, "y": PANEL_HEIGHT * row, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, **_target(panel.kind)}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return defaults


def _options(panel: Panel) -> dict[str, Any]:
    if panel.kind is Kind.HEATMAP:
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    if panel.kind is Kind.BARS:
        return {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}}


def _target(kind: Kind) -> dict[str, Any]:
    if kind is Kind.HEATMAP:
        return {"format": "heatmap"}
    return {"instant": True} if kind is Kind.BARS else {}
