"""The run's Prometheus metrics follow from its events and its status."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY
from tests.integration.coordinator.small_run import a_spec
from tests.unit.report.runs import a_step

from specrl.coordinator.observe.prometheus import MAX_SERIES, RunMetrics
from specrl.coordinator.reports import MAX_ERRORS, count_errors, split_exposed_seconds
from specrl.coordinator.run_events import StepServed, VersionValidated
from specrl.coordinator.stopwatch import Lap
from specrl.formats.reports import PhaseSeconds, ValidationReport

seconds = st.floats(0, 1e6)


@given(exposed_s=seconds, catching_up_s=seconds, grading_s=seconds)
def test_causes_sum_to_the_exposed_generation(exposed_s: float, catching_up_s: float, grading_s: float) -> None:
    found = split_exposed_seconds(Lap(PhaseSeconds(generation=exposed_s), grading_s=grading_s), catching_up_s)
    assert sum(found.values()) == pytest.approx(exposed_s)
    assert min(found.values()) >= 0
    assert found["syncDrain"] <= catching_up_s
    assert found["grading"] <= grading_s


def test_counters_that_alerts_use_exist_from_the_start(tmp_path: Path) -> None:
    RunMetrics(a_spec(tmp_path).model_copy(update={"name": "fresh"}))

    def at_start(name: str, **labels: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"rljob": "fresh", **labels})

    assert at_start("specrl_coordinator_checkpoints_failed_total") == 0
    assert at_start("specrl_coordinator_trainer_recoveries_total") == 0
    assert at_start("specrl_sampler_canaries_total", outcome="disagreed") == 0
    assert at_start("specrl_coordinator_rollouts_total", outcome="ungraded") == 0
    assert at_start("specrl_coordinator_replica_transitions_total", before="serving", after="dead") == 0
    assert at_start("specrl_coordinator_replica_transitions_total", before="dead", after="serving") is None
    assert at_start("specrl_coordinator_policy_lag_bound_steps") == 1


def test_a_verifier_with_many_kinds_of_errors_has_few_series(tmp_path: Path) -> None:
    """Exception type and place are label values, and the policy's answers may influence them."""
    exported = RunMetrics(a_spec(tmp_path).model_copy(update={"name": "new-errors"}))
    for step in range(1, 5):
        errors = count_errors([f"Error{number} at my_rewards.py:{step}" for number in range(50)])
        assert len(errors) == MAX_ERRORS
        assert sum(errors.values()) == 50
        exported.handle_event(StepServed(a_step(step, verdicts=60, verifier_errors=errors), [], [], (None, None)))
    found = [
        sample
        for metric in REGISTRY.collect()
        for sample in metric.samples
        if sample.name == "specrl_coordinator_verifier_errors_total" and sample.labels["rljob"] == "new-errors"
    ]
    assert len(found) <= MAX_SERIES + 1
    assert sum(sample.value for sample in found) == 200
    assert REGISTRY.get_sample_value("specrl_coordinator_verifier_error_share", {"rljob": "new-errors"}) == 50 / 60


def test_each_reward_has_a_series(tmp_path: Path) -> None:
    exported = RunMetrics(a_spec(tmp_path).model_copy(update={"name": "several-rewards"}))
    exported.handle_event(StepServed(a_step(1, rewards={"answer": 0.5, "tags": 0.25}), [], [], (None, None)))
    validation = ValidationReport(policy_version=1, reward=0.5, rewards={"tags": 0.75}, problems=4, seconds=1.0)
    exported.handle_event(VersionValidated(validation))

    def read(name: str, reward: str) -> float | None:
        return REGISTRY.get_sample_value(name, {"rljob": "several-rewards", "reward": reward})

    assert read("specrl_coordinator_named_reward_mean", "answer") == 0.5
    assert read("specrl_coordinator_named_reward_mean", "tags") == 0.25
    assert read("specrl_coordinator_validation_named_reward_mean", "tags") == 0.75
    assert read("specrl_coordinator_validation_named_reward_mean", "answer") is None
