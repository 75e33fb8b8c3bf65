"""Every metric that the programs export, with its labels: what rules and dashboards may ask for."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.metrics import MetricWrapperBase

from specrl.telemetry import metrics
from specrl_operator import telemetry

SCRAPED = {"namespace", "pod", "component", "replica"}
"""Labels that Prometheus adds to what it scrapes from a pod, by the chart's PodMonitor."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> dict[str, set[str]]:
    """Series names, and the labels of each."""
    found: dict[str, set[str]] = {}
    for metric in (*vars(metrics).values(), *vars(telemetry).values()):
        if isinstance(metric, MetricWrapperBase):
            labels = set(metric._labelnames) | SCRAPED | {"rljob"}
            for suffix in SUFFIXES[metric._type]:
                found[metric._name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    for name in _names_in_vllm():
        # Its counters are exported with _total; which names are counters is seen nowhere but in a running engine.
        for series in (name, f"{name}_total"):
            found[series] = SCRAPED | {"rljob", "engine", "model_name", "position"}
    return found


def _names_in_vllm() -> Iterator[str]:
    """Names of metrics in the sources of the installed vLLM, which is not imported: that takes a while."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    (root,) = spec.submodule_search_locations
    for path in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"):
        yield from re.findall(r'"(vllm:[a-z0-9_]+)"', (Path(root) / path).read_text())
