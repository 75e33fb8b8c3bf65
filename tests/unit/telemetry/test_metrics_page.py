"""docs/metrics.md lists all metrics, and its table of aliases names only metrics that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase
from tools import metrics_page

from specrl.telemetry import metrics
from specrl_operator import telemetry

PAGE = (Path(__file__).parents[3] / "docs" / "metrics.md").read_text(encoding="utf-8")


def declared() -> list[MetricWrapperBase]:
    return [*metrics_page.metrics_of(metrics), *metrics_page.metrics_of(telemetry)]


def test_the_page_lists_every_declared_metric() -> None:
    assert metrics_page.replace_table(PAGE) == PAGE, "run `make gen`"
    listed = re.findall(r"^\| `(specrl_\w+)` \|", PAGE.partition(metrics_page.HEADING)[2], re.MULTILINE)
    assert len(listed) == len(declared())


def test_every_metric_has_a_sentence_and_only_bounded_labels() -> None:
    for metric in declared():
        assert metric._documentation.endswith("."), metric._name
        assert not {"rollout", "prompt", "group", "step", "pod", "id"} & set(metric._labelnames), metric._name


def test_every_metric_that_has_an_alias_exists() -> None:
    aliases = PAGE.partition("## What others call it")[2].partition(metrics_page.HEADING)[0]
    ours = re.findall(r"^\| `(specrl_\w+)", aliases, re.MULTILINE)
    assert len(ours) > 10
    names = {metric._name + ("_total" if metric._type == "counter" else "") for metric in declared()}
    assert set(ours) <= names


def test_a_page_without_the_heading_is_refused() -> None:
    with pytest.raises(ValueError, match="add it at the end"):
        metrics_page.replace_table("# Metrics\n")
