"""Exposed generation is averaged over the last steps, and the advice fits its cause."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.run_files import a_run
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.observe.exposure import RECENT_STEPS, measure_exposure
from specrl.formats.reports import PhaseSeconds, StepReport
from specrl.spec import RunSpec, parse_spec


def a_step(step: int = 1, acceptance: float | None = None, **phases: float) -> StepReport:
    exposed = phases.get("generation", 0.0)
    by_cause = {"bufferWait": phases.get("generation", 0.0)}
    return a_report(step).model_copy(
        update={
            "phases": PhaseSeconds(**phases),
            "exposed_generation": exposed,
            "exposed_by_cause": by_cause,
            "generation_under_way": exposed + phases.get("train", 0.0),
            "hidden_generation": phases.get("train", 0.0),
            "acceptance_length": acceptance,
        }
    )


def a_spec(lag: int) -> RunSpec:
    schedule = {"steps": 9, "promptsPerStep": 2, "groupSize": 2, "maxPolicyLag": lag}
    return parse_spec(a_run(Path("/none"), schedule=schedule))


def test_share_and_seconds_are_means_of_the_last_steps() -> None:
    old = [a_step(n, generation=90.0, train=10.0) for n in range(1, 5)]
    found = measure_exposure([*old, *(a_step(n, generation=1.0, train=3.0) for n in range(RECENT_STEPS))], a_spec(1), 2)
    assert (found.steps, found.share, found.step_seconds) == (RECENT_STEPS, 0.25, 4.0)
    assert found.seconds == {"bufferWait": 1.0, "syncDrain": 0.0, "grading": 0.0}
    assert (found.generation_under_way, found.hidden_generation) == (4.0, 3.0)


@pytest.mark.parametrize(
    ("step", "lag", "words"),
    [
        (a_step(generation=0.1, train=9.9), 1, "Nothing needs to be done"),
        (a_step(generation=5.0, train=5.0), 0, "schedule.maxPolicyLag is 0"),
        (a_step(generation=1.0, validation=4.0, train=5.0), 1, "validation.everySteps"),
        (a_step(generation=5.0, train=5.0, acceptance=1.1), 1, "1.10 tokens, which hardly pays"),
        (a_step(generation=5.0, train=5.0, acceptance=2.5), 1, "About 4 replicas instead of 2"),
        (a_step(generation=1.0, train=9.0), 1, "About 3 replicas instead of 2"),
    ],
)
def test_the_advice_fits_the_cause(step: StepReport, lag: int, words: str) -> None:
    assert words in measure_exposure([step], a_spec(lag), 2).advice


def test_the_advice_names_joining_replicas_if_the_trainer_waits_for_them() -> None:
    step = a_step(generation=5.0, train=5.0).model_copy(
        update={"exposed_by_cause": {"bufferWait": 1.0, "syncDrain": 4.0}}
    )
    found = measure_exposure([step], a_spec(1), 2)
    assert found.seconds == {"bufferWait": 1.0, "syncDrain": 4.0, "grading": 0.0}
    assert "just joined" in found.advice


@pytest.mark.parametrize("lag", [0, 1])
def test_the_advice_names_verifiers_if_the_trainer_waits_for_them(lag: int) -> None:
    """A verifier that hung came with the advice to start more replicas."""
    step = a_step(generation=5.0, train=5.0).model_copy(
        update={"exposed_by_cause": {"bufferWait": 1.0, "grading": 4.0}}
    )
    assert "rewardPool.timeoutS" in measure_exposure([step], a_spec(lag), 2).advice


def test_there_is_no_advice_before_the_first_step() -> None:
    assert measure_exposure([], a_spec(1), 0).advice == "No step is trained yet."


def test_a_run_without_any_training_time_still_gets_advice() -> None:
    assert "bottleneck" in measure_exposure([a_step(generation=5.0)], a_spec(1), 2).advice
