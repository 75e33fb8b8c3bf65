"""calibration.json holds what the steps had, after every one of them, and is not needed for a run to go on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.run_files import a_run
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.calibration import WARM_UP_STEPS, Calibration, CalibrationFile
from specrl.coordinator.report import StageSeconds
from specrl.records import FinishReason, Group, Prompt, Reward, Rollout, StepCost, VersionSpan
from specrl.spec.load import parse_spec


def a_group(*lengths: int) -> Group:
    rollouts = tuple(
        Rollout(
            rollout_id=f"r{sample}",
            group_id="g",
            sample_index=sample,
            token_ids_T=np.zeros(length, np.int32),
            sampler_logprobs_T=np.zeros(length, np.float32),
            versions=(VersionSpan(0, 0, length),),
            finish_reason=FinishReason.STOP,
            replica_id="a",
            text="",
            seconds=1.0,
        )
        for sample, length in enumerate(lengths)
    )
    return Group("g", Prompt("p", 0, (1, 2, 3), "", ""), 1, rollouts, (Reward(1.0),) * len(lengths))


def a_file(folder: Path) -> CalibrationFile:
    return CalibrationFile(parse_spec(a_run(folder)), folder)


def written(folder: Path) -> Calibration:
    return Calibration.model_validate_json((folder / "calibration.json").read_text())


def test_lengths_acceptance_stages_and_costs_of_all_steps_are_there(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    costs = {"a": [StepCost(3, 10, 80, 1000, 0.5)]}
    first = a_report(1).model_copy(update={"accepted_per_position": [0.8, 0.4], "tokens": 30, "rollouts": 4})
    file.step_ended(first, [a_group(5, 5), a_group(10, 10)], costs, 1, (1.5, 1.0))
    costs = {"a": [StepCost(3, 30, 240, 3000, 1.5)]}
    file.step_ended(a_report(2), [a_group(5, 10), a_group(5, 10)], costs, 1, (1.5, 1.0))
    found = written(tmp_path)
    assert found.acceptance == pytest.approx((0.8, 0.5))
    assert found.groups == ((5, 5), (10, 10), (5, 10), (5, 10))
    assert found.prompt_tokens == 3
    assert [step.step for step in found.steps] == [1, 2]
    assert [(step.live, step.context, step.seconds) for step in found.engine_steps] == [(8, 100, 0.05)]


@pytest.mark.parametrize(("lag", "expected"), [(0, 0.05), (1, None)])
def test_what_of_generation_is_no_decoding_is_known_where_nothing_else_goes_on(
    tmp_path: Path, lag: int, expected: float | None
) -> None:
    """Two replicas with 8 of 16 rollouts each; what they counted up to the first step may be of before a restart.

    An engine computes with one thread; all cores of the machine that are busy are 2.5 while they generate, in a later
    step 2.7, and one while the trainer trains.
    """
    run = a_run(tmp_path)
    file = CalibrationFile(parse_spec(run | {"schedule": run["schedule"] | {"maxPolicyLag": lag}}), tmp_path)
    for step, decoded_s in ((1, 7.0), (2, 8.6), (3, 10.2)):
        seen = {"rollouts": 16, "tokens": 600, "stages": StageSeconds(generation=2.0)}
        report = a_report(step).model_copy(update=seen)
        costs = [StepCost(3, 10 * step, 80 * step, 1000 * step, decoded_s)]
        file.step_ended(report, [a_group(5, 5)], {"a": costs, "b": costs}, 2, (2.1 + step / 5, 1.0))
    found = written(tmp_path)
    assert [one.starting_seconds for one in found.alone] == ([] if expected is None else [pytest.approx(expected)])
    assert all(one.core_seconds == pytest.approx(0.002) and one.cores_training == 1 for one in found.alone)
    assert [(step.steps, step.live, step.seconds) for step in found.engine_steps] == [(40, 8, pytest.approx(0.16))]


def test_the_first_steps_count_until_there_are_others(tmp_path: Path) -> None:
    """Every step is 16 rollouts, 10 engine steps and 2 s of generation; those of the first five take twice as long."""
    run = a_run(tmp_path)
    file = CalibrationFile(parse_spec(run | {"schedule": run["schedule"] | {"maxPolicyLag": 0}}), tmp_path)
    decoded_s, seen = 0.0, []
    for step in range(1, 9):
        decoded_s += 1.6 if step <= WARM_UP_STEPS else 0.8
        report = a_report(step).model_copy(
            update={"rollouts": 16, "tokens": 600, "stages": StageSeconds(generation=2.0)}
        )
        file.step_ended(
            report,
            [a_group(step, step)],
            {"a": [StepCost(3, 10 * step, 80 * step, 1000 * step, decoded_s)]},
            1,
            (1.5, 1.0),
        )
        found = written(tmp_path)
        seen.append(([one.step for one in found.steps], [round(one.seconds, 3) for one in found.engine_steps]))
    assert seen[4:] == [([1, 2, 3, 4, 5], [0.16]), ([6], [0.08]), ([6, 7], [0.08]), ([6, 7, 8], [0.08])]
    assert [one.starting_seconds for one in found.alone] == [pytest.approx((2.0 - 0.8) / 16)]
    assert found.groups == tuple((step, step) for step in range(1, 9))


def test_what_an_engine_decoded_counts_when_it_is_gone_and_its_replica_has_another(tmp_path: Path) -> None:
    """The second engine took fewer seconds for its steps than the first had by the step after which both count."""
    run = a_run(tmp_path)
    file = CalibrationFile(parse_spec(run | {"schedule": run["schedule"] | {"maxPolicyLag": 0}}), tmp_path)
    gone = StepCost(3, 20, 160, 2000, 8.0)
    for step, first, second in ((1, StepCost(3, 10, 80, 1000, 7.0), []), (2, gone, [StepCost(3, 30, 240, 3000, 0.6)])):
        report = a_report(step).model_copy(update={"rollouts": 16, "stages": StageSeconds(generation=2.0)})
        file.step_ended(report, [a_group(5, 5)], {"first": [first], "second": second}, 1, (1.5, 1.0))
    found = written(tmp_path)
    assert [(one.steps, one.seconds) for one in found.engine_steps] == [(40, pytest.approx(1.6 / 40))]
    assert [one.starting_seconds for one in found.alone] == [pytest.approx(0.4 / 16)]


def test_steps_that_took_no_time_or_had_no_rollouts_are_left_out(tmp_path: Path) -> None:
    costs = [StepCost(3, 10, 80, 1000, 0.0), StepCost(0, 10, 0, 1000, 0.5), StepCost(1, 10, 80, 1000, 0.5)]
    a_file(tmp_path).step_ended(a_report(1), [a_group(5, 5)], {"a": costs}, 1, (None, None))
    assert [step.draft_tokens for step in written(tmp_path).engine_steps] == [1]


def test_a_disk_that_refuses_stops_nothing(tmp_path: Path) -> None:
    (tmp_path / "calibration.json" / "in the way").mkdir(parents=True)
    a_file(tmp_path).step_ended(a_report(1), [a_group(5, 5)], {}, 0, (None, None))
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]
