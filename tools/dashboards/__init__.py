"""The source of the chart's Grafana dashboards. `make gen` writes the JSON files, which are never edited.

Each dashboard has a module. `model` has its data classes, `expressions` writes PromQL, `grafana` JSON. Tests check that
the code exports each metric, and evaluate each expression in a Prometheus that scrapes a real run.
"""

from __future__ import annotations

from tools.dashboards.model import Dashboard
from tools.dashboards.operator import OPERATOR
from tools.dashboards.overview import OVERVIEW
from tools.dashboards.speculation import SPECULATION
from tools.dashboards.trainer_health import TRAINER_HEALTH
from tools.dashboards.weight_sync import WEIGHT_SYNC

DASHBOARDS: dict[str, Dashboard] = {
    "overview.json": OVERVIEW,
    "speculation.json": SPECULATION,
    "weight-sync.json": WEIGHT_SYNC,
    "trainer-health.json": TRAINER_HEALTH,
    "operator.json": OPERATOR,
}
