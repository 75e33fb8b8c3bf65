"""Drawn lengths are as long, and as similar within a group, as the given ones."""

from __future__ import annotations

import numpy as np
import pytest

from specrl.simulator.scenarios.lengths import LengthDistribution, MeasuredGroups, log_normal

MEASURED = [(10, 12, 11, 13), (90, 40, 70, 80), (5, 5, 6, 5)]


def test_a_measured_prompt_is_drawn_once_per_pass_with_exactly_its_lengths() -> None:
    found = MeasuredGroups(MEASURED, 100).draw_lengths(6, 4, np.random.default_rng(0))
    for of_pass in (found[:3], found[3:]):
        assert sorted(sorted(row) for row in of_pass.tolist()) == sorted(sorted(map(float, row)) for row in MEASURED)


@pytest.mark.parametrize("size", [2, 16])
def test_a_group_of_another_size_stays_within_its_prompts_measured_range(size: int) -> None:
    found = MeasuredGroups(MEASURED, 100).draw_lengths(300, size, np.random.default_rng(0))
    assert found.shape == (300, size)
    for row in found:
        assert any(min(group) <= row.min() and row.max() <= max(group) for group in MEASURED)
    assert found.mean() == pytest.approx(MeasuredGroups(MEASURED, 100).mean_tokens, rel=0.05)


def test_measured_lengths_are_cut_off_at_the_cap() -> None:
    lengths = MeasuredGroups(MEASURED, 50)
    assert lengths.draw_lengths(3, 4, np.random.default_rng(0)).max() == 50
    assert lengths.mean_tokens == pytest.approx((10 + 12 + 11 + 13 + 50 + 40 + 50 + 50 + 5 + 5 + 6 + 5) / 12)


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_groups_of_a_distribution_have_the_given_correlation(correlation: float) -> None:
    lengths = log_normal(400, 0.5, 10_000, correlation)
    assert isinstance(lengths, LengthDistribution)
    logs = np.log(lengths.draw_lengths(4000, 8, np.random.default_rng(0)))
    within = logs.var(axis=1, ddof=1).mean()
    assert 1 - within / logs.var() == pytest.approx(correlation, abs=0.05)
