"""calibration.json is rewritten after every step, and a run continues if it cannot be written."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.run_files import a_run
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.observe.calibration_file import CalibrationFile
from specrl.formats.calibration import WARM_UP_STEPS, RunCalibration
from specrl.formats.reports import PhaseSeconds
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


def written(folder: Path) -> RunCalibration:
    return RunCalibration.model_validate_json((folder / "calibration.json").read_text())


def test_the_file_has_lengths_acceptance_phases_and_costs_of_all_steps(tmp_path: Path) -> None:
    file = a_file(tmp_path)
    costs = {"a": [StepCost(3, 10, 80, 1000, 0.5)]}
    first = a_report(1).model_copy(update={"accepted_per_position": [0.8, 0.4], "tokens": 30, "rollouts": 4})
    file.add_step(first, [a_group(5, 5), a_group(10, 10)], costs, 1, (1.5, 1.0))
    costs = {"a": [StepCost(3, 30, 240, 3000, 1.5)]}
    file.add_step(a_report(2), [a_group(5, 10), a_group(5, 10)], costs, 1, (1.5, 1.0))
    found = written(tmp_path)
    assert found.acceptance == pytest.approx((0.8, 0.5))
    assert found.groups == ((5, 5), (10, 10), (5, 10), (5, 10))
    assert found.prompt_tokens == 3
    assert [step.step for step in found.steps] == [1, 2]
    assert [(step.live, step.context, step.seconds) for step in found.engine_steps] == [(8, 100, 0.05)]


@pytest.mark.parametrize(("lag", "ranks", "expected"), [(0, 1, 0.05), (0, 2, 0.05), (1, 1, None)])
def test_time_without_decoding_is_known_if_generation_runs_alone(
    tmp_path: Path, lag: int, ranks: int, expected: float | None
) -> None:
    """Two replicas have 8 of 16 rollouts each. Their costs up to the first step may be from before a restart.

    Each rank of an engine uses one thread. With one rank each, 2.5 cores are busy during generation in one step and 2.7
    in a later one. During training one core is busy.
    """
    run = a_run(tmp_path)
    run["schedule"] |= {"maxPolicyLag": lag}
    run["generation"] |= {"tensorParallel": ranks}
    file = CalibrationFile(parse_spec(run), tmp_path)
    for step, decoded_s in ((1, 7.0), (2, 8.6), (3, 10.2)):
        seen = {"rollouts": 16, "tokens": 600, "phases": PhaseSeconds(generation=2.0)}
        report = a_report(step).model_copy(update=seen)
        costs = [StepCost(3, 10 * step, 80 * step, 1000 * step, decoded_s)]
        file.add_step(report, [a_group(5, 5)], {"a": costs, "b": costs}, 2, (2 * ranks + 0.1 + step / 5, 1.0))
    found = written(tmp_path)
    assert all(one.threads == ranks for one in found.alone)
    assert [one.starting_seconds for one in found.alone] == ([] if expected is None else [pytest.approx(expected)])
    assert all(one.core_seconds == pytest.approx(0.002) and one.cores_training == 1 for one in found.alone)
    assert [(step.steps, step.live, step.seconds) for step in found.engine_steps] == [(40, 8, pytest.approx(0.16))]


def test_warm_up_steps_count_only_until_there_are_later_ones(tmp_path: Path) -> None:
    """Every step has 16 rollouts, 10 engine steps and 2 s of generation. The first five steps take twice as long."""
    run = a_run(tmp_path)
    file = CalibrationFile(parse_spec(run | {"schedule": run["schedule"] | {"maxPolicyLag": 0}}), tmp_path)
    decoded_s = 0.0
    seen = []
    for step in range(1, 9):
        decoded_s += 1.6 if step <= WARM_UP_STEPS else 0.8
        report = a_report(step).model_copy(
            update={"rollouts": 16, "tokens": 600, "phases": PhaseSeconds(generation=2.0)}
        )
        file.add_step(
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


def test_costs_of_an_engine_still_count_after_its_replacement(tmp_path: Path) -> None:
    """The second engine has smaller sums than the first one had, which must not look like a negative difference."""
    run = a_run(tmp_path)
    file = CalibrationFile(parse_spec(run | {"schedule": run["schedule"] | {"maxPolicyLag": 0}}), tmp_path)
    gone = StepCost(3, 20, 160, 2000, 8.0)
    for step, first, second in ((1, StepCost(3, 10, 80, 1000, 7.0), []), (2, gone, [StepCost(3, 30, 240, 3000, 0.6)])):
        report = a_report(step).model_copy(update={"rollouts": 16, "phases": PhaseSeconds(generation=2.0)})
        file.add_step(report, [a_group(5, 5)], {"first": [first], "second": second}, 1, (1.5, 1.0))
    found = written(tmp_path)
    assert [(one.steps, one.seconds) for one in found.engine_steps] == [(40, pytest.approx(1.6 / 40))]
    assert [one.starting_seconds for one in found.alone] == [pytest.approx(0.4 / 16)]


def test_steps_without_time_or_rollouts_are_omitted(tmp_path: Path) -> None:
    costs = [StepCost(3, 10, 80, 1000, 0.0), StepCost(0, 10, 0, 1000, 0.5), StepCost(1, 10, 80, 1000, 0.5)]
    a_file(tmp_path).add_step(a_report(1), [a_group(5, 5)], {"a": costs}, 1, (None, None))
    assert [step.draft_tokens for step in written(tmp_path).engine_steps] == [1]


def test_a_write_error_does_not_stop_the_run(tmp_path: Path) -> None:
    (tmp_path / "calibration.json" / "in the way").mkdir(parents=True)
    a_file(tmp_path).add_step(a_report(1), [a_group(5, 5)], {}, 0, (None, None))
    assert [path.name for path in tmp_path.iterdir()] == ["calibration.json"]
