"""The interval of a mean reward, against scipy and simulation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from specrl.formats.statistics.mean_reward import student_95, student_interval


@pytest.mark.parametrize("freedom", [*range(1, 40), 63, 127, 999])
def test_quantiles_match_students_t(freedom: int) -> None:
    assert student_95(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=2e-3)


@given(st.lists(st.floats(-100, 100), min_size=2, max_size=40).filter(lambda values: np.std(values) > 1e-3))
def test_the_interval_matches_students_t(values: list[float]) -> None:
    found = student_interval(values)
    assert found is not None
    expected = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    assert found == pytest.approx(expected, rel=3e-3, abs=1e-3 * (expected[1] - expected[0]))


@pytest.mark.parametrize("values", [[], [7.0], [0.5] * 30])
def test_without_any_spread_there_is_no_interval(values: list[float]) -> None:
    """An interval of width zero would claim a certainty that the data do not support."""
    assert student_interval(values) is None


def test_the_interval_has_its_nominal_coverage() -> None:
    """Rewards from 0 to 10 of 32 problems. Once pass@1's interval was used for them, and never contained the mean."""
    random = np.random.default_rng(0)
    draws = random.beta(4, 2, (1000, 32)) * 10
    ends = [student_interval(draw.tolist()) for draw in draws]
    held = sum(low <= 10 * 4 / 6 <= high for low, high in (it for it in ends if it is not None))
    assert 920 <= held <= 980
