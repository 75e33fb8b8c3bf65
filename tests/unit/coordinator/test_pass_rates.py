"""pass@k and its interval, against enumeration and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.pass_rates import interval, pass_at, pass_rates, wilson


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_choices_that_hold_a_pass(case: tuple[int, int, int]) -> None:
    attempts, passed, k = case
    choices = [any(place < passed for place in chosen) for chosen in combinations(range(attempts), k)]
    assert pass_at(k, attempts, passed) == pytest.approx(sum(choices) / len(choices))


def test_k_are_powers_of_two_and_the_most_attempts_and_lost_attempts_leave_a_problem_out() -> None:
    found = pass_rates([(6, 3), (6, 0), (4, 4)])
    assert [(item.k, item.problems) for item in found] == [(1, 3), (2, 3), (4, 3), (6, 2)]
    assert found[0].rate == pytest.approx((0.5 + 0 + 1) / 3)
    assert found[-1].rate == pytest.approx(0.5)
    assert pass_rates([]) == []
    assert pass_rates([(0, 0)]) == []


def test_one_attempt_a_problem_is_a_share_with_wilsons_interval() -> None:
    (found,) = pass_rates([(1, 1)] * 30 + [(1, 0)] * 70)
    assert (found.low, found.high) == pytest.approx(wilson(0.3, 100))


@pytest.mark.parametrize("solved", [0, 1])
def test_interval_of_all_or_none_has_a_width(solved: int) -> None:
    low, high = interval([float(solved)] * 20, 8)
    assert (low, high) == pytest.approx(wilson(solved, 20))
    assert high - low > 0.1


def test_problems_of_equal_difficulty_count_as_often_as_they_were_answered() -> None:
    assert interval([0.25] * 40, 8) == pytest.approx(wilson(0.25, 320))
    assert interval([0.0, 0.5] * 20, 8) == pytest.approx(wilson(0.25, 120))


@pytest.mark.parametrize("spread", [0.3, 2.0, 50.0])
def test_intervals_hold_the_true_rate_about_as_often_as_they_say(spread: float) -> None:
    """Problems of very different, of different and of nearly the same difficulty; 60 of them, 8 attempts each."""
    random = np.random.default_rng(0)
    mean, held = 0.4, {1: 0, 4: 0}
    truth = {1: mean, 4: float(1 - np.mean((1 - random.beta(mean * spread, (1 - mean) * spread, 1_000_000)) ** 4))}
    for _ in range(400):
        difficulty = random.beta(mean * spread, (1 - mean) * spread, 60)
        found = {item.k: item for item in pass_rates([(8, int(passed)) for passed in random.binomial(8, difficulty)])}
        for k in held:
            held[k] += found[k].low <= truth[k] <= found[k].high
    assert all(0.92 <= count / 400 <= 1 for count in held.values()), held


def test_the_interval_is_wilsons() -> None:
    """Against scipy's own."""
    stats = pytest.importorskip("scipy.stats")
    for right, count in ((0, 10), (5, 10), (10, 10), (97, 128)):
        theirs = stats.binomtest(right, count).proportion_ci(0.95, "wilson")
        assert wilson(right / count, count) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_an_interval_holds_its_share_and_stays_within_0_and_1(share: float, count: int) -> None:
    low, high = wilson(share, count)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1
