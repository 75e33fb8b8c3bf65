"""Sums of step costs: the difference from an earlier status is never negative, whatever a replica sends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import RecordInvalid
from specrl.records import StepCost

SUMS = st.floats(0, 1e6, allow_nan=False)
COSTS = st.builds(StepCost, st.just(3), st.integers(0, 1000), SUMS, SUMS, SUMS)


def test_costs_since_an_earlier_status_are_the_difference() -> None:
    assert StepCost(3, 30, 240, 3000, 1.5).minus(StepCost(3, 10, 80, 1000, 0.5)) == StepCost(3, 20, 160, 2000, 1.0)


@given(now=COSTS, before=COSTS)
def test_a_fallen_sum_means_that_the_engine_restarted(now: StepCost, before: StepCost) -> None:
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
def test_impossible_sums_are_refused(cost: StepCost) -> None:
    with pytest.raises(RecordInvalid, match="step cost must"):
        cost.check()
