"""What a run's metrics are made of."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from tests.integration.coordinator.small_run import a_spec
from tests.unit.report.runs import a_step

from specrl.coordinator.board import MOST_ERRORS, count_errors
from specrl.coordinator.exported import MOST_SERIES, Exported, by_cause

seconds = st.floats(0, 1e6)


@given(exposed_s=seconds, catching_up_s=seconds)
def test_causes_sum_to_what_was_exposed(exposed_s: float, catching_up_s: float) -> None:
    found = by_cause(exposed_s, catching_up_s)
    assert sum(found.values()) == pytest.approx(exposed_s)
    assert min(found.values()) >= 0
    assert found["sync_drain"] <= catching_up_s


def test_counters_that_alerts_ask_for_are_there_before_anything_happens(tmp_path: Path) -> None:
    Exported(a_spec(tmp_path).model_copy(update={"name": "fresh"}))

    def at_start(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"rljob": "fresh", **labels})

    assert at_start("specrl_coordinator_checkpoints_failed_total") == 0
    assert at_start("specrl_coordinator_trainer_recoveries_total") == 0
    assert at_start("specrl_sampler_canaries_total", outcome="disagreed") == 0
    assert at_start("specrl_coordinator_rollouts_total", outcome="ungraded") == 0
    assert at_start("specrl_coordinator_replica_transitions_total", before="serving", after="dead") == 0
    assert at_start("specrl_coordinator_replica_transitions_total", before="dead", after="serving") is None
    assert at_start("specrl_coordinator_replicas_minimum") == 1
    assert at_start("specrl_coordinator_policy_lag_bound_steps") == 1


def test_a_verifier_with_ever_new_errors_has_few_series_and_none_is_lost(tmp_path: Path) -> None:
    """An exception's type and place label a metric, and an answer may choose them, step after step."""
    exported = Exported(a_spec(tmp_path).model_copy(update={"name": "new-errors"}))
    for step in range(1, 5):
        errors = count_errors([f"Error{number} at my_rewards.py:{step}" for number in range(50)])
        assert len(errors) == MOST_ERRORS
        assert sum(errors.values()) == 50
        exported.step(a_step(step, verdicts=60, verifier_errors=errors), [])
    found = [
        sample
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "specrl_coordinator_verifier_errors_total" and sample.labels["rljob"] == "new-errors"
    ]
    assert len(found) <= MOST_SERIES + 1
    assert sum(sample.value for sample in found) == 200
    assert REGISTRY.get_sample_value("specrl_coordinator_verifier_error_share", {"rljob": "new-errors"}) == 50 / 60
