"""What a dashboard consists of."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """How a panel shows its series: as Grafana's plugins are named."""

    LINES = "timeseries"
    HEATMAP = "heatmap"
    """Of a histogram's buckets."""
    BARS = "bargauge"
    """The newest value of each series."""


@dataclass(frozen=True)
class Panel:
    """One graph. queries: pairs of (expression, legend). unit: one of Grafana's names of units."""

    title: str
    description: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    kind: Kind = Kind.LINES
    stacked: bool = False
    maximum: float | None = None
    minimum: float | None = 0


@dataclass(frozen=True)
class Variable:
    """What the user chooses at the top: values of a label of a metric, several at once, all by default."""

    name: str
    label: str
    metric: str


@dataclass(frozen=True)
class Dashboard:
    """One dashboard. uid: part of its address in Grafana, so it never changes."""

    uid: str
    title: str
    description: str
    variables: tuple[Variable, ...]
    panels: tuple[Panel, ...]


OF_A_RUN = (
    Variable("namespace", "namespace", "specrl_coordinator_policy_version{}"),
    Variable("rljob", "rljob", 'specrl_coordinator_policy_version{namespace=~"$namespace"}'),
)
"""The variables of every dashboard about runs."""
