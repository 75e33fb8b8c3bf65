"""What is drawn is as long, and as alike within a group, as what was given."""

from __future__ import annotations

import numpy as np
import pytest

from specrl.simulator.lengths import Distribution, Groups, log_normal

MEASURED = [(10, 12, 11, 13), (90, 40, 70, 80), (5, 5, 6, 5)]


def test_a_measured_prompt_is_drawn_with_the_very_lengths_of_its_rollouts_and_each_once_a_pass() -> None:
    found = Groups(MEASURED, 100).draw(6, 4, np.random.default_rng(0))
    for of_pass in (found[:3], found[3:]):
        assert sorted(sorted(row) for row in of_pass.tolist()) == sorted(sorted(map(float, row)) for row in MEASURED)


@pytest.mark.parametrize("size", [2, 16])
def test_a_group_of_another_size_stays_between_the_shortest_and_the_longest_of_its_prompt(size: int) -> None:
    found = Groups(MEASURED, 100).draw(300, size, np.random.default_rng(0))
    assert found.shape == (300, size)
    for row in found:
        assert any(min(group) <= row.min() and row.max() <= max(group) for group in MEASURED)
    assert found.mean() == pytest.approx(Groups(MEASURED, 100).mean, rel=0.05)


def test_what_may_not_be_as_long_as_it_was_ends_at_the_cap() -> None:
    lengths = Groups(MEASURED, 50)
    assert lengths.draw(3, 4, np.random.default_rng(0)).max() == 50
    assert lengths.mean == pytest.approx((10 + 12 + 11 + 13 + 50 + 40 + 50 + 50 + 5 + 5 + 6 + 5) / 12)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_a_distribution_s_groups_are_as_alike_as_asked(correlation: float) -> None:
    lengths = log_normal(400, 0.5, 10_000, correlation)
    assert isinstance(lengths, Distribution)
    logs = np.log(lengths.draw(4000, 8, np.random.default_rng(0)))
    within = logs.var(axis=1, ddof=1).mean()
    assert 1 - within / logs.var() == pytest.approx(correlation, abs=0.05)
