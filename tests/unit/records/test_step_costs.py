"""Sums of step costs: what came on top is never less than nothing, whatever a replica says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import RecordInvalid
from specrl.records import StepCost

SUMS = st.floats(0, 1e6, allow_nan=False)
COSTS = st.builds(StepCost, st.just(3), st.integers(0, 1000), SUMS, SUMS, SUMS)


def test_what_came_on_top_is_the_difference() -> None:
    assert StepCost(3, 30, 240, 3000, 1.5).minus(StepCost(3, 10, 80, 1000, 0.5)) == StepCost(3, 20, 160, 2000, 1.0)


@given(now=COSTS, before=COSTS)
def test_sums_of_which_one_has_fallen_began_anew(now: StepCost, before: StepCost) -> None:
    since = now.minus(before)
    since.check()
    sums = [(vars(now)[name], vars(before)[name]) for name in ("steps", "live_sum", "context_sum", "seconds_sum")]
    assert (since == now) or all(mine >= theirs for mine, theirs in sums)


@pytest.mark.parametrize(
    "cost",
    [
        StepCost(3, 10, 80, 1000, -0.5),
        StepCost(3, 10, 80, float("nan"), 0.5),
        StepCost(1025, 10, 80, 1000, 0.5),
        StepCost(3, 10, 80, 1000, 1e13),
    ],
)
def test_sums_that_no_steps_can_have_are_refused(cost: StepCost) -> None:
    with pytest.raises(RecordInvalid, match="a step's cost must be"):
        cost.check()
