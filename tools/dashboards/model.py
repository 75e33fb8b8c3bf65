"""Data classes of dashboards: panels and variables. `grafana.py` converts them to JSON."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class PanelKind(StrEnum):
    """Type of a panel, with the name of Grafana's plugin."""

    LINES = "timeseries"
    HEATMAP = "heatmap"
    """Shows a histogram's buckets over time."""
    BARS = "bargauge"
    """Shows the newest value of each series."""


@dataclass(frozen=True)
class Panel:
    """One graph. queries: pairs of (expression, legend). unit: Grafana's name of a unit."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: PanelKind = PanelKind.LINES
    stacked: bool = False
    maximum: float | None = None
    minimum: float | None = 0


@dataclass(frozen=True)
class Variable:
    """A choice at the top of a dashboard: values of a metric's label, several at once, all by default."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. uid: part of its URL in Grafana, so it must never change."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]


RUN_VARIABLES = (
    Variable("namespace", "namespace", "specrl_coordinator_policy_version{}"),
    Variable("rljob", "rljob", 'specrl_coordinator_policy_version{namespace=~"$namespace"}'),
)
"""The variables of every dashboard about runs."""
