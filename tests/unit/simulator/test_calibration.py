"""From the measurements of engines and coordinators to calibration.json, and from there to costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.unit.simulator.scenarios import a_scenario

from specrl.errors import SpecInvalid
from specrl.formats.calibration import AloneCosts, EngineStep, RunCalibration, TrainedPhases, merge_step_costs
from specrl.formats.reports import PhaseSeconds
from specrl.generation.step_times import StepTimes
from specrl.simulator.costs.measured import MeasuredCosts, read_calibration, read_calibrations
from specrl.simulator.simulate import prepare_scenario, simulate_scenario


def seconds(live: float, k: float, context: float) -> float:
    return 0.004 + 0.0005 * live + 2e-7 * live * context + 0.0005 * k + 0.00005 * k * live


def a_calibration(*lengths: int) -> RunCalibration:
    steps = [
        EngineStep(live=live, draft_tokens=k, context=context, seconds=seconds(live, k, context), steps=50)
        for live in (1.0, 4.0, 16.0, 64.0)
        for context in (100.0, 400.0)
        for k in lengths
    ]
    phases = [
        TrainedPhases(
            step=step,
            phases=PhaseSeconds(data=0.1, prepare=0.4, logprob=1e-4 * tokens, train=0.5 + 3e-4 * tokens),
            rollouts=32,
            tokens=tokens,
            load_seconds=0.1,
        )
        for step, tokens in enumerate((9000, 9000, 12000, 21000), start=1)
    ]
    return RunCalibration(
        run="small",
        hardware="test",
        engine_steps=tuple(steps),
        acceptance=(0.7, 0.6),
        draft_tokens=3,
        steps=tuple(phases),
    )


def alone(draft_tokens: int, starting_seconds: float) -> AloneCosts:
    return AloneCosts(
        draft_tokens=draft_tokens,
        starting_seconds=starting_seconds,
        cores=4,
        threads=1,
        core_seconds=0.001,
        cores_training=2.0,
    )


def test_steps_that_only_decode_are_summed_by_batch_and_draft_length() -> None:
    times = StepTimes()
    for place in range(20):
        times.record_step_end(0.1 * place, 8, 3, 100.0, decodes=True)
    times.record_step_end(2.5, 9, 3, 100.0, decodes=False)  # a prompt was read
    times.record_step_end(2.6, 9, 3, 100.0, decodes=True)  # the first step after a prefill is not used
    times.record_step_end(9.0, 8, 3, 100.0, decodes=True)  # disturbed
    times.record_step_end(9.1, 0, 3, 100.0, decodes=True)  # idle
    times.record_step_end(20.0, 8, 0, 100.0, decodes=True)  # began on an idle engine
    (cost,) = times.list_costs()
    assert (cost.steps, cost.draft_tokens, cost.live_sum) == (19, 3, 19 * 8)
    assert cost.seconds_sum == pytest.approx(1.9)


def test_a_step_counts_the_rollouts_that_end_in_it() -> None:
    times = StepTimes()
    for place, live in enumerate((32, 32, 16, 4)):
        times.record_step_end(0.1 * place, live, 3, 100.0, decodes=True)
    assert {(cost.steps, cost.live_sum) for cost in times.list_costs()} == {(2, 2 * 32), (1, 16)}


def test_a_step_delayed_by_a_pause_is_not_counted() -> None:
    times = StepTimes()
    for at_s in (0.0, 0.1, 0.2):
        times.record_step_end(at_s, 8, 3, 100.0, decodes=True)
    times.note_interruption()
    for at_s in (0.4, 0.5):
        times.record_step_end(at_s, 8, 3, 100.0, decodes=True)
    (cost,) = times.list_costs()
    assert (cost.steps, cost.seconds_sum) == (3, pytest.approx(0.3))


def test_equal_steps_of_two_replicas_are_merged() -> None:
    one = StepTimes()
    other = StepTimes()
    for times, gap in ((one, 0.1), (other, 0.3)):
        for place in range(11):
            times.record_step_end(gap * place, 8, 3, 100.0, decodes=True)
    (step,) = merge_step_costs([*one.list_costs(), *other.list_costs()])
    assert (step.steps, step.live, step.seconds) == (20, 8, pytest.approx(0.2))


def test_a_fit_reproduces_measured_costs_and_reports_extrapolation() -> None:
    costs = MeasuredCosts(a_calibration(0, 3), a_scenario())
    for k in (0, 3):
        found = costs.step_s(np.array([2.0, 32.0]), k, 250.0)
        assert found == pytest.approx([seconds(2, k, 250), seconds(32, k, 250)], rel=0.02)
    assert costs.train_s(20000) == pytest.approx(6.5, rel=0.02)
    assert [told.split(":")[0] for told in costs.list_extrapolations(64)] == [
        "extrapolated"
    ]  # of context: 200 + 2000 / 2
    assert len(costs.list_extrapolations(200)) == 2


def test_with_one_draft_length_a_draft_costs_one_extra_token_and_with_two_its_measured_cost() -> None:
    live = np.array([2.0, 32.0])
    plain, drafting = (np.array([seconds(2, k, 250), seconds(32, k, 250)]) for k in (0, 3))
    costs = MeasuredCosts(a_calibration(0, 3), a_scenario())
    for k in (1, 5):
        assert costs.step_s(live, k, 250.0) == pytest.approx(plain + (k + 1) / 4 * (drafting - plain), rel=0.02)
    several = a_calibration(0, 2, 4)
    dearer = [
        step.model_copy(update={"seconds": step.seconds + 0.01 * bool(step.draft_tokens)})
        for step in several.engine_steps
    ]
    costs = MeasuredCosts(several.model_copy(update={"engine_steps": tuple(dearer)}), a_scenario())
    for k in (1, 3, 5):
        assert costs.step_s(np.array([2.0]), k, 250.0) == pytest.approx([seconds(2, k, 250) + 0.01], rel=0.02)


def test_few_rollouts_may_cost_more_than_their_share() -> None:
    """A step of 8 costs nearly as much as a step of 1; a step of 64 costs little more than one of 32."""
    known = {1.0: 0.005, 8.0: 0.006, 16.0: 0.010, 32.0: 0.016, 64.0: 0.018}
    steps = [EngineStep(live=live, draft_tokens=0, context=100.0, seconds=s, steps=50) for live, s in known.items()]
    costs = MeasuredCosts(a_calibration(0).model_copy(update={"engine_steps": tuple(steps)}), a_scenario())
    assert costs.step_s(np.array(list(known)), 0, 100.0) == pytest.approx(list(known.values()), rel=0.02)


def test_starting_rollouts_costs_what_was_measured() -> None:
    found = a_calibration(0, 3)
    read = MeasuredCosts(found, a_scenario()).start_s(16, 200.0)
    assert read == pytest.approx(200 * 0.0005, rel=0.1)  # a token of a prompt, like one more live rollout
    measured = found.model_copy(update={"alone": (alone(0, 0.05), alone(3, 0.01), alone(3, 0.02), alone(3, 0.01))})
    assert MeasuredCosts(measured, a_scenario()).start_s(16, 200.0) == 0.16
    assert MeasuredCosts(measured, a_scenario("speculation=none")).start_s(16, 200.0) == 0.8
    plain = found.model_copy(update={"alone": (alone(0, 0.05),)})
    assert MeasuredCosts(plain, a_scenario()).start_s(16, 200.0) == 0.8


def test_processes_that_share_too_few_cores_slow_each_other_down() -> None:
    found = a_calibration(0).model_copy(update={"alone": (alone(0, 0.05),)})
    sharing = MeasuredCosts(found, a_scenario("cluster.gpu=null")).sharing
    assert sharing is not None
    assert [sharing.slowdown_factor(replicas, 1000.0, is_training=False) for replicas in (1, 3, 5)] == [1, 1, 1.5]
    assert [sharing.slowdown_factor(replicas, 1000.0, is_training=True) for replicas in (0, 1, 2)] == [1, 1, 1.25]
    assert sharing.slowdown_factor(1, 2000.0, is_training=True) == 1.25
    assert MeasuredCosts(found, a_scenario()).sharing is None  # GPUs
    assert MeasuredCosts(a_calibration(0), a_scenario("cluster.gpu=null")).sharing is None


def test_overlap_gains_less_on_shared_cores() -> None:
    """When either side can use all cores, overlap gains nothing: a step takes the sum of its parts."""
    found = a_calibration(0, 3)
    crowded = alone(0, 0.0).model_copy(update={"threads": 4, "core_seconds": 0.0, "cores_training": 4.0})
    fields = ("cluster.gpu=null", "layout.generationGpus=1", "schedule.steps=12", "speculation=none")
    seconds = {
        (lag, has_room): simulate_scenario(
            a_scenario(*fields, f"schedule.maxPolicyLag={lag}"),
            found.model_copy(
                update={"alone": (crowded.model_copy(update={"cores_training": 0.0} if has_room else {}),)}
            ),
        ).speculative.step_s
        for lag in (0, 1)
        for has_room in (True, False)
    }
    assert seconds[0, True] == seconds[0, False]
    assert seconds[1, True] < 0.9 * seconds[0, True]
    assert seconds[1, False] == pytest.approx(seconds[0, False], rel=0.1)  # the longest rollout is hidden


def test_a_trainers_largest_step_so_far_is_left_out_of_the_fit(tmp_path: Path) -> None:
    phases = [
        TrainedPhases(step=n, phases=PhaseSeconds(train=s), rollouts=0, tokens=tokens, load_seconds=0.0)
        for n, (tokens, s) in enumerate(((100, 9.0), (80, 0.8), (120, 4.0), (110, 1.1), (60, 0.6)), start=1)
    ]
    written = a_calibration(0).model_copy(update={"steps": tuple(phases)})
    (tmp_path / "one").write_text(written.model_dump_json(by_alias=True))
    found = read_calibrations([tmp_path / "one"] * 2)
    assert [step.step for step in found.steps] == [2, 4, 5] * 2
    assert MeasuredCosts(found, a_scenario()).train_s(200.0) == pytest.approx(2.0)


def test_a_run_that_always_drafted_does_not_show_the_gain_of_drafting() -> None:
    assert (
        "add --calibration of a run without" in MeasuredCosts(a_calibration(3), a_scenario()).list_extrapolations(8)[0]
    )


def test_machines_without_gpus_are_simulated_from_a_calibration() -> None:
    scenario = a_scenario(
        "cluster.gpu=null", "schedule.maxPolicyLag=0", "speculation={mechanism: eagle3, chances: [0.7]}"
    )
    outcome = simulate_scenario(scenario, a_calibration(0, 3))
    assert outcome.speculative.phases_s["prepare"] == pytest.approx(0.4)
    assert 1 < outcome.rollout_speedup < 4
    with pytest.raises(SpecInvalid, match="must be given without a calibration"):
        prepare_scenario(scenario)


def test_several_calibrations_are_combined_and_a_damaged_one_is_refused(tmp_path: Path) -> None:
    for name, k in (("plain", 0), ("drafting", 3)):
        (tmp_path / name).write_text(a_calibration(k).model_dump_json(by_alias=True))
    found = read_calibrations([tmp_path / "plain", tmp_path / "drafting"])
    assert {step.draft_tokens for step in found.engine_steps} == {0, 3}
    (tmp_path / "broken").write_text('{"run": 3')
    with pytest.raises(SpecInvalid, match="must be a run's calibration"):
        read_calibration(tmp_path / "broken")
