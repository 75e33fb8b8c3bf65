"""Every panel, variable, rule and alert has data in a real run, and the phases of a step sum to its wall time."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.integration.chart.promql_sources import panels, rules, variables
from tests.integration.observability.real_run import NAME, STEPS, VALIDATED, Observed
from tests.integration.observability.scraping import CLUSTER, LOCAL, OPERATORS

SHOWN_SECONDS: dict[str, Callable[[dict[str, Any]], float]] = {
    "exposed_generation_seconds_total": lambda report: report["exposedGeneration"],
    "hidden_generation_seconds_total": lambda report: report["hiddenGeneration"],
    "generation_under_way_seconds_total": lambda report: report["generationUnderWay"],
    'step_seconds_sum{namespace=~"': lambda report: report["phases"]["prepare"],
}
"""The curves of the overview's panel of generation: the metric that a curve reads, and the same of a step's report."""

SERIES_OF_A_REPLICA = 1500
SERIES_OF_A_TRAINER = 200
"""Most series per process. Most of a replica's are vLLM's histograms."""


def values(namespace: str) -> dict[str, str]:
    """Replace Grafana's variables: one chosen run, and an interval of at least four scrapes, as Grafana chooses it."""
    return {"namespace": namespace, "rljob": NAME, "operator": OPERATORS, "__rate_interval": "10s"}


RARE = {
    "specrl_coordinator_tool_calls_total",
    "specrl_coordinator_verifier_errors_total",
    "specrl_coordinator_sink_step",
    "specrl_coordinator_sink_failures_total",
    "specrl_files_skipped_total",
}
"""Series that this run lacks: it has no tools and no sinks, and nothing in it fails."""
OF_STARTED_JOBS = ("specrl:rljob:running", "specrl_rljob_scheduling_seconds", "specrl_rljob_startup_seconds")
"""What the operator of this run has no data of: its RLJob has no pods, so it does not start. Alerts on these are tested
with promtool (tests/integration/chart/test_monitoring.py)."""
OF_ENDED_JOBS = "specrl:rljob:complete"
"""A recorded rule that has no data for the same reason. Alerts that leave out its jobs have data."""


def needs_started_job(expression: str) -> bool:
    return any(series in expression for series in OF_STARTED_JOBS)


def of_runs(namespace: str) -> dict[str, str]:
    found = panels(values(namespace)) | variables(values(namespace))
    return {
        name: expression
        for name, expression in found.items()
        if not name.startswith("operator.json") and not any(series in expression for series in RARE)
    }


def of_the_operator() -> dict[str, str]:
    found = panels(values("rl")) | variables(values("rl"))
    return {
        name: expression
        for name, expression in found.items()
        if name.startswith("operator.json") and not needs_started_job(expression)
    }


def rules_with_data() -> list[dict[str, str]]:
    found = [rule for rule in rules() if rule.get("record") != OF_ENDED_JOBS]
    return [rule for rule in found if not needs_started_job(rule.get("record", "") + rule["expr"])]


def always(expression: str) -> str:
    """Change an alert's comparisons to return 0 or 1, so that it has a series whether or not it fires."""
    found = re.sub(r"(?<=\s)(==|!=|>=|<=|>|<)(?=\s)", r"\1 bool", expression)
    return found.replace("offset 1h", "offset 3s")


@pytest.mark.parametrize("namespace", [CLUSTER, LOCAL])
@pytest.mark.parametrize("name", of_runs(""))
def test_panel_and_variable_have_data(observed: Observed, name: str, namespace: str) -> None:
    expression = of_runs(namespace)[name]
    assert observed.prometheus.over(expression, observed.began, observed.ended), expression


@pytest.mark.parametrize("name", of_the_operator())
def test_panel_and_variable_of_the_operator_have_data(observed: Observed, name: str) -> None:
    expression = of_the_operator()[name]
    assert observed.prometheus.over(expression, observed.began, observed.ended), expression


@pytest.mark.parametrize("rule", rules_with_data(), ids=lambda rule: rule.get("alert") or rule["record"])
def test_rule_and_alert_have_data(observed: Observed, rule: dict[str, str]) -> None:
    expression = rule["record"] if "record" in rule else always(rule["expr"])
    if expression.startswith("absent("):
        metric = expression.removeprefix("absent(").removesuffix(")")
        assert observed.prometheus.over(metric, observed.began, observed.ended), expression
        return
    found = observed.prometheus.over(expression, observed.began, observed.ended)
    assert found, expression
    of_the_run = {series["namespace"] for series in found} & {CLUSTER, LOCAL}
    assert of_the_run in ({CLUSTER, LOCAL}, set()), "both ways of scraping, or a rule about the operator"


@pytest.mark.parametrize("series", sorted(RARE))
def test_series_that_are_not_looked_for_are_not_there(observed: Observed, series: str) -> None:
    assert not observed.prometheus.over(series, observed.began, observed.ended)


def test_a_misspelt_expression_has_no_data(observed: Observed) -> None:
    assert not observed.prometheus.over("specrl_coordinator_policy_versionn", observed.began, observed.ended)
    assert not observed.prometheus.over("1 / (up > 2)", observed.began, observed.ended)


def test_every_target_answers_and_pods_without_metrics_are_omitted(observed: Observed) -> None:
    assert [target["health"] for target in observed.scraped] == ["up"] * 7, observed.scraped
    assert {target["labels"]["job"] for target in observed.scraped} == {
        "pods/http",
        "pods/metrics",
        "specrl",
        "operator",
    }


@pytest.mark.parametrize("namespace", [CLUSTER, LOCAL])
def test_series_of_vllm_join_with_the_coordinators_by_run_and_replica(observed: Observed, namespace: str) -> None:
    ours = f'specrl_coordinator_replica_policy_version{{namespace="{namespace}"}}'
    joined = f"vllm:generation_tokens_total * on (namespace, rljob, replica) {ours}"
    (found,) = observed.prometheus.over(joined, observed.began, observed.ended)
    assert found == {"namespace": namespace, "rljob": NAME, "replica": "gen-0"}


def test_phases_sum_to_the_wall_time_of_the_steps(observed: Observed) -> None:
    """Compares with the times at which reports appear. The report of a validated step waits for the validation."""
    first = 2
    last = STEPS - 1
    assert first % VALIDATED
    assert last % VALIDATED
    of_phases = sum(sum(observed.reports[step]["phases"].values()) for step in range(first + 1, last + 1))
    seen = observed.arrivals[last] - observed.arrivals[first]
    assert of_phases == pytest.approx(seen, rel=0.02)
    for phase in ("data", "prepare", "generation", "logprob", "train"):
        assert all(report["phases"][phase] > 0 for report in observed.reports.values()), phase


def test_metrics_and_reports_agree_on_phases_and_causes(observed: Observed) -> None:
    page = observed.pages["coordinator"]
    phases = sums(page, "specrl_coordinator_step_seconds_sum", "phase")
    counted = int(sums(page, "specrl_coordinator_step_seconds_count", "phase")["train"])
    assert 0 < counted <= STEPS
    for phase, seconds in phases.items():
        told = sum(observed.reports[step]["phases"][phase] for step in range(1, counted + 1))
        assert seconds == pytest.approx(told, rel=1e-6), phase
    causes = sums(page, "specrl_coordinator_exposed_generation_seconds_total", "cause")
    assert causes.keys() == {"buffer_wait", "sync_drain", "grading"}
    assert sum(causes.values()) == pytest.approx(phases["generation"], rel=1e-6)


def test_metrics_and_reports_agree_on_generation_under_way_and_hidden_generation(observed: Observed) -> None:
    page = observed.pages["coordinator"]
    counted = int(sums(page, "specrl_coordinator_step_seconds_count", "phase")["train"])
    reports = [observed.reports[step] for step in range(1, counted + 1)]
    for metric, field in (("generation_under_way", "generationUnderWay"), ("hidden_generation", "hiddenGeneration")):
        (seconds,) = sums(page, f"specrl_coordinator_{metric}_seconds_total", "rljob").values()
        assert seconds == pytest.approx(sum(report[field] for report in reports), rel=1e-6), field
    for report in reports:
        phases = report["phases"]
        assert 0 <= report["hiddenGeneration"] <= report["generationUnderWay"] <= sum(phases.values())
        assert report["generationUnderWay"] - report["hiddenGeneration"] <= phases["generation"]
    assert sum(report["hiddenGeneration"] for report in reports) > 0, "the policy lag is 1"


@pytest.mark.parametrize("namespace", [CLUSTER, LOCAL])
def test_dashboard_shows_the_seconds_of_the_reports(observed: Observed, namespace: str) -> None:
    """A curve's last value is a mean over steps, so it lies within the range of the steps' reports."""
    curves = [text for name, text in panels(values(namespace)).items() if "Exposed and hidden generation" in name]
    assert len(curves) == len(SHOWN_SECONDS)
    for metric, read in SHOWN_SECONDS.items():
        (expression,) = (text for text in curves if f"rate(specrl_coordinator_{metric}" in text)
        ((_, samples),) = observed.prometheus.values(expression, observed.began, observed.ended, 1)
        shown = [value for _, value in samples if math.isfinite(value)]
        seconds = [read(report) for report in observed.reports.values()]
        assert min(seconds) - 1e-6 <= shown[-1] <= max(seconds) + 1e-6, expression


def test_the_number_of_series_per_process_is_bounded(observed: Observed) -> None:
    for component, most in (("generation", SERIES_OF_A_REPLICA), ("trainer", SERIES_OF_A_TRAINER)):
        lines = [line for line in observed.pages[component].splitlines() if line and not line.startswith("#")]
        assert 20 < len(lines) <= most, component


def sums(page: str, name: str, label: str) -> dict[str, float]:
    """Read the values of a metric by one label."""
    return {
        sample.labels[label]: sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == name
    }
