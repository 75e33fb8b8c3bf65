"""The chart's Grafana dashboards, in code; `make gen` writes them. Never edit the JSON; edit the page of its topic.

`model` is what a dashboard consists of, `expressions` writes the PromQL, `grafana` the JSON. Tests look each metric up
in the code that exports it, and evaluate each expression against a Prometheus that scrapes a real run.
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
