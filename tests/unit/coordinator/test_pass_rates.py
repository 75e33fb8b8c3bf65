"""pass@k and its interval, against enumeration and simulation."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.formats.statistics.pass_rates import (
    effective_wilson_interval,
    estimate_pass_at,
    estimate_pass_rates,
    wilson_interval,
)


@given(st.integers(1, 8).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_draws_with_a_pass(case: tuple[int, int, int]) -> None:
    attempts, passed, k = case
    choices = [any(place < passed for place in chosen) for chosen in combinations(range(attempts), k)]
    assert estimate_pass_at(k, attempts, passed) == pytest.approx(sum(choices) / len(choices))


def test_k_are_powers_of_two_up_to_the_most_attempts() -> None:
    found = estimate_pass_rates([(6, 3), (6, 0), (4, 4)])
    assert [(item.k, item.problems) for item in found] == [(1, 3), (2, 3), (4, 3), (6, 2)]
    assert found[0].rate == pytest.approx((0.5 + 0 + 1) / 3)
    assert found[-1].rate == pytest.approx(0.5)
    assert estimate_pass_rates([]) == []
    assert estimate_pass_rates([(0, 0)]) == []


def test_with_one_attempt_per_problem_the_interval_is_wilsons() -> None:
    (found,) = estimate_pass_rates([(1, 1)] * 30 + [(1, 0)] * 70)
    assert (found.low, found.high) == pytest.approx(wilson_interval(0.3, 100))


@pytest.mark.parametrize("solved", [0, 1])
def test_interval_of_all_or_none_has_a_width(solved: int) -> None:
    low, high = effective_wilson_interval([float(solved)] * 20, 8)
    assert (low, high) == pytest.approx(wilson_interval(solved, 20))
    assert high - low > 0.1


def test_every_answer_counts_if_problems_are_equally_difficult() -> None:
    assert effective_wilson_interval([0.25] * 40, 8) == pytest.approx(wilson_interval(0.25, 320))
    assert effective_wilson_interval([0.0, 0.5] * 20, 8) == pytest.approx(wilson_interval(0.25, 120))


@pytest.mark.parametrize("spread", [0.3, 2.0, 50.0])
def test_intervals_have_about_their_nominal_coverage(spread: float) -> None:
    """60 problems with 8 attempts each: of very different, of different and of nearly equal difficulty."""
    random = np.random.default_rng(0)
    mean = 0.4
    held = {1: 0, 4: 0}
    truth = {1: mean, 4: float(1 - np.mean((1 - random.beta(mean * spread, (1 - mean) * spread, 1_000_000)) ** 4))}
    for _ in range(400):
        difficulty = random.beta(mean * spread, (1 - mean) * spread, 60)
        found = {
            item.k: item
            for item in estimate_pass_rates([(8, int(passed)) for passed in random.binomial(8, difficulty)])
        }
        for k in held:
            held[k] += found[k].low <= truth[k] <= found[k].high
    assert all(0.92 <= count / 400 <= 1 for count in held.values()), held


def test_the_interval_is_wilsons() -> None:
    """Compared with scipy."""
    stats = pytest.importorskip("scipy.stats")
    for right, count in ((0, 10), (5, 10), (10, 10), (97, 128)):
        theirs = stats.binomtest(right, count).proportion_ci(0.95, "wilson")
        assert wilson_interval(right / count, count) == pytest.approx((theirs.low, theirs.high), abs=1e-4)


@given(st.floats(0, 1), st.integers(0, 10_000))
def test_an_interval_contains_its_share_and_stays_within_0_and_1(share: float, count: int) -> None:
    low, high = wilson_interval(share, count)
    assert 0 <= low <= share + 1e-9
    assert share - 1e-9 <= high <= 1
