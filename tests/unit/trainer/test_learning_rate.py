"""Warm-up, stable part and decay of the learning rate, at the steps where one ends and the next begins."""

from __future__ import annotations

import math
from typing import Any

import pytest

from specrl.spec.trainer import Optimizer
from specrl.trainer.learning_rate import compute_learning_rate


def rates(*steps: int, **settings: Any) -> list[float]:
    optimizer = Optimizer.model_validate({"learningRate": "8", **settings})
    return [compute_learning_rate(optimizer, step, 100) for step in steps]


def test_warm_up_rises_from_0_and_is_over_at_its_last_step() -> None:
    assert rates(1, 3, 4, 5, 100, warmupSteps=4) == [2, 6, 8, 8, 8]
    assert rates(1, 100) == [8, 8]


def test_decay_begins_after_the_warm_up_and_ends_at_the_last_step() -> None:
    found = rates(20, 21, 60, 100, warmupSteps=20, decay="Linear", finalLearningRate="4")
    assert found == pytest.approx([8, 8 - 4 / 80, 6, 4])


def test_cosine_is_half_way_in_the_middle_and_flat_at_both_ends() -> None:
    found = rates(20, 21, 60, 99, 100, warmupSteps=20, decay="Cosine")
    assert found == pytest.approx([8, 4 + 4 * math.cos(math.pi / 80), 4, 4 - 4 * math.cos(math.pi / 80), 0], abs=1e-12)


def test_decay_of_the_last_steps_leaves_a_stable_part() -> None:
    found = rates(5, 10, 90, 95, 100, 101, warmupSteps=10, decay="Linear", decaySteps=10)
    assert found == pytest.approx([4, 8, 8, 4, 0, 0])


def test_where_warm_up_and_decay_overlap_the_lower_counts() -> None:
    assert rates(50, 75, 100, warmupSteps=100, decay="Linear", decaySteps=50) == pytest.approx([4, 4, 0])
