"""The numbers of a run's steps fit on a screen, however many there are."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.coordinator.test_report_files import a_report

from specrl.coordinator.curves import Curves
from specrl.coordinator.report import StageSeconds, StepReport


def a_step(step: int, **fields: object) -> StepReport:
    return a_report(step).model_copy(update=fields)


def test_few_steps_are_shown_as_they_are() -> None:
    curves = Curves([a_step(1, reward=0.5), a_step(2, reward=None), a_step(3, reward=0.25)])
    found = curves.report(1, None, 10)
    assert (found.steps, found.stride) == ([1, 2, 3], 1)
    assert found.numbers["reward"] == [0.5, None, 0.25]


def test_a_point_is_the_mean_of_its_steps_and_of_the_lag_the_largest() -> None:
    curves = Curves(
        a_step(n, reward=float(n), policy_lag_max=n, stages=StageSeconds(train=2.0 * n)) for n in range(1, 6)
    )
    found = curves.report(1, None, 3)
    assert (found.steps, found.stride) == ([2, 4, 5], 2)
    assert found.numbers["reward"] == [1.5, 3.5, 5.0]
    assert found.numbers["policy_lag_max"] == [2.0, 4.0, 5.0]
    assert found.stages["train"] == [3.0, 7.0, 10.0]


def test_a_report_that_is_completed_replaces_the_one_before() -> None:
    curves = Curves([a_step(1)])
    curves.add(a_step(1, validation_reward=0.75))
    assert curves.report(1, None, 5).numbers["validation_reward"] == [0.75]


def test_positions_that_no_draft_had_are_left_out() -> None:
    found = Curves([a_step(1, accepted_per_position=[0.5, 0.25])]).report(1, None, 5)
    assert [name for name in found.numbers if name.startswith("accepted_")] == ["accepted_1", "accepted_2"]


def test_without_steps_there_are_no_points() -> None:
    assert Curves().report(1, None, 5).steps == []
    assert Curves([a_step(1)]).report(7, 9, 5).steps == []


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 400))
def test_points_are_bounded_and_end_with_the_newest_step(last: int, first: int, points: int) -> None:
    curves = Curves([a_step(last)])
    found = curves.report(first, None, points)
    assert len(found.steps) <= points
    assert found.steps == sorted(set(found.steps))
    assert all(len(values) == len(found.steps) for values in [*found.stages.values(), *found.numbers.values()])
    if first <= last:
        assert found.steps[-1] == last
        assert found.steps[0] >= first
        assert found.stages["data"][-1] == pytest.approx(0.0)
