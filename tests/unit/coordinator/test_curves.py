"""The curves of any number of steps are downsampled to a bounded number of points."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.observe.curves import StepCurves
from specrl.formats.reports import PhaseSeconds, StepReport


def a_step(step: int, **fields: object) -> StepReport:
    return a_report(step).model_copy(update=fields)


def test_few_steps_are_not_downsampled() -> None:
    curves = StepCurves([a_step(1, reward=0.5), a_step(2, reward=None), a_step(3, reward=0.25)])
    found = curves.downsample_steps(1, None, 10)
    assert (found.steps, found.stride) == ([1, 2, 3], 1)
    assert found.numbers["reward"] == [0.5, None, 0.25]


def test_a_point_is_the_mean_of_its_steps_but_the_largest_lag() -> None:
    curves = StepCurves(
        a_step(n, reward=float(n), policy_lag_max=n, phases=PhaseSeconds(train=2.0 * n)) for n in range(1, 6)
    )
    found = curves.downsample_steps(1, None, 3)
    assert (found.steps, found.stride) == ([2, 4, 5], 2)
    assert found.numbers["reward"] == [1.5, 3.5, 5.0]
    assert found.numbers["policy_lag_max"] == [2.0, 4.0, 5.0]
    assert found.phases["train"] == [3.0, 7.0, 10.0]


def test_a_completed_report_replaces_the_first_one() -> None:
    curves = StepCurves([a_step(1)])
    curves.add_report(a_step(1, validation_reward=0.75))
    assert curves.downsample_steps(1, None, 5).numbers["validation_reward"] == [0.75]


def test_positions_that_no_draft_reached_are_omitted() -> None:
    found = StepCurves([a_step(1, accepted_per_position=[0.5, 0.25])]).downsample_steps(1, None, 5)
    assert [name for name in found.numbers if name.startswith("accepted_")] == ["accepted_1", "accepted_2"]


def test_without_steps_there_are_no_points() -> None:
    assert StepCurves().downsample_steps(1, None, 5).steps == []
    assert StepCurves([a_step(1)]).downsample_steps(7, 9, 5).steps == []


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400))
def test_points_are_bounded_and_end_with_the_newest_step(last: int, first: int, points: int) -> None:
    curves = StepCurves([a_step(last)])
    found = curves.downsample_steps(first, None, points)
    assert len(found.steps) <= points
    assert found.steps == sorted(set(found.steps))
    assert all(len(values) == len(found.steps) for values in [*found.phases.values(), *found.numbers.values()])
    if first <= last:
        assert found.steps[-1] == last
        assert found.steps[0] >= first
        assert found.phases["data"][-1] == pytest.approx(0.0)


def test_named_rewards_have_curves_of_their_own() -> None:
    steps = [
        a_step(1, rewards={"answer": 0.5}),
        a_step(2, rewards={"answer": 1.0, "tags": 0.25}, validation_rewards={"tags": 0.75}),
    ]
    found = StepCurves(steps, ("answer", "tags")).downsample_steps(1, None, 5)
    assert found.rewards == {"answer": [0.5, 1.0], "tags": [None, 0.25]}
    assert found.validation_rewards == {"answer": [None, None], "tags": [None, 0.75]}
    assert StepCurves(steps).downsample_steps(1, None, 5).rewards == {}
