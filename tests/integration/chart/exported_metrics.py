"""Every metric that the programs export, with its labels. Rules and dashboards may use no others."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

from tools.metrics_page import metrics_of

from specrl.telemetry import metrics
from specrl_operator import telemetry

SCRAPED = {"namespace", "pod", "component", "replica"}
"""Labels that the chart's PodMonitor makes Prometheus add to the series of a pod."""
SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count"), "gauge": ("",)}


def exported() -> dict[str, set[str]]:
    """Return the labels of each series, by name."""
    found: dict[str, set[str]] = {}
    for metric in (*metrics_of(metrics), *metrics_of(telemetry)):
        labels = set(metric._labelnames) | SCRAPED | {"rljob"}
        for suffix in SUFFIXES[metric._type]:
            found[metric._name + suffix] = labels | ({"le"} if suffix == "_bucket" else set())
    for name in _names_in_vllm():
        # vLLM's counters are exported with the suffix _total. Only a running engine shows which names are counters.
        for series in (name, f"{name}_total"):
            found[series] = SCRAPED | {"rljob", "engine", "model_name", "position"}
    return found


def _names_in_vllm() -> Iterator[str]:
    """Find metric names in the sources of the installed vLLM. Importing it would take long."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.submodule_search_locations
    (root,) = spec.submodule_search_locations
    for path in ("v1/metrics/loggers.py", "v1/spec_decode/metrics.py"):
        yield from re.findall(r'"(vllm:[a-z0-9_]+)"', (Path(root) / path).read_text())
