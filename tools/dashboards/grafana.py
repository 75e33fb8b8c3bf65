"""Convert dashboards to Grafana's JSON model."""

from __future__ import annotations

from typing import Any

from tools.dashboards.model import Dashboard, Panel, PanelKind, Variable

PANEL_WIDTH = 12  # of a grid of 24 columns: two panels in a row
PANEL_HEIGHT = 8
SCHEMA_VERSION = 39  # Grafana 11; later ones migrate it when they load it
PROMETHEUS = {"type": "prometheus", "uid": "${datasource}"}


def render_dashboard(dashboard: Dashboard) -> dict[str, Any]:
    """Convert a dashboard to Grafana's JSON model."""
    datasource = {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
    return {
        "uid": dashboard.uid,
        "title": dashboard.title,
        "description": dashboard.description,
        "tags": ["specrl"],
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,  # one crosshair over all panels
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
        "templating": {"list": [datasource, *map(_render_variable, dashboard.variables)]},
        "panels": [_render_panel(number, panel) for number, panel in enumerate(dashboard.panels)],
    }


def _render_variable(variable: Variable) -> dict[str, Any]:
    query = f"label_values({variable.metric}, {variable.label})"
    return {
        "name": variable.name,
        "label": variable.name,
        "type": "query",
        "datasource": PROMETHEUS,
        "query": {"query": query, "refId": variable.name},
        "refresh": 2,  # when the time range changes
        "sort": 1,  # alphabetically
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
    }


def _render_panel(number: int, panel: Panel) -> dict[str, Any]:
    column = number % 2
    row = number // 2
    return {
        "id": number + 1,
        "title": panel.title,
        "description": panel.description,
        "type": panel.kind.value,
        "datasource": PROMETHEUS,
        "gridPos": {"x": PANEL_WIDTH * column, "y": PANEL_HEIGHT * row, "w": PANEL_WIDTH, "h": PANEL_HEIGHT},
        "fieldConfig": {"defaults": _render_defaults(panel), "overrides": []},
        "options": _render_options(panel),
        "targets": [
            {"refId": chr(ord("A") + index), "expr": expression, "legendFormat": legend, **_render_target(panel.kind)}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _render_defaults(panel: Panel) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit}
    if panel.minimum is not None:
        defaults["min"] = panel.minimum
    if panel.maximum is not None:
        defaults["max"] = panel.maximum
    if panel.stacked:
        defaults["custom"] = {"stacking": {"mode": "normal"}, "fillOpacity": 40}
    return defaults


def _render_options(panel: Panel) -> dict[str, Any]:
    if panel.kind is PanelKind.HEATMAP:
        return {"calculate": False, "yAxis": {"unit": panel.unit}, "color": {"mode": "scheme", "scheme": "Oranges"}}
    if panel.kind is PanelKind.BARS:
        return {"orientation": "horizontal", "displayMode": "basic", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return {"legend": {"displayMode": "list", "placement": "bottom"}}


def _render_target(kind: PanelKind) -> dict[str, Any]:
    if kind is PanelKind.HEATMAP:
        return {"format": "heatmap"}
    return {"instant": True} if kind is PanelKind.BARS else {}
