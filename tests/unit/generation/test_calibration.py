"""Calibration gives the right step costs on a machine with other load."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.generation.test_draft_length import LENGTHS, a_cost

from specrl.generation.cost_calibration import PASS_STEPS, PASSES, CostCalibration, Step
from specrl.generation.draft_length import OFF, choose_batch_nodes, choose_calibrated_lengths

CALIBRATED = choose_calibrated_lengths(LENGTHS)


class BusyMachine:
    """A machine whose steps cost `a_cost`, and up to twice as much for 0.3 to 3 seconds at a time."""

    def __init__(self, seed: int, disturbed_share: float) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._share = disturbed_share
        self._slowness = 1.0
        self._until = 0.0
        self._now = 0.0

    def step(self, batch: int, k: int) -> float:
        if self._now >= self._until:
            is_disturbed = self._random.random() < self._share
            self._slowness = self._random.uniform(1.3, 2.0) if is_disturbed else 1.0
            self._until = self._now + self._random.uniform(0.3, 3.0)
        seconds = a_cost(batch, k) * self._slowness * self._random.uniform(0.98, 1.02)
        self._now += seconds
        return seconds


def measure(calibration: CostCalibration, machine: BusyMachine) -> None:
    for batch in choose_batch_nodes(64):
        calibration.begin_batch(batch)
        while not calibration.is_done:
            k = calibration.current_length
            calibration.record_step(batch, k, machine.step(batch, k))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), disturbed_share=st.floats(0, 0.5))
def test_cost_ratios_are_those_of_a_quiet_machine(seed: int, disturbed_share: float) -> None:
    calibration = CostCalibration(LENGTHS)
    measure(calibration, BusyMachine(seed, disturbed_share))
    for place, batch in enumerate(choose_batch_nodes(64)):
        for k in CALIBRATED:
            ratio = calibration.rows[k][place] / calibration.rows[CALIBRATED[0]][place]
            assert ratio == pytest.approx(a_cost(batch, k) / a_cost(batch, CALIBRATED[0]), rel=0.06)


def test_steps_of_another_batch_or_length_are_not_counted() -> None:
    calibration = CostCalibration(LENGTHS)
    calibration.begin_batch(4)
    for _ in range(2 * PASSES * PASS_STEPS * len(CALIBRATED)):
        calibration.record_step(3, calibration.current_length, 1.0)
        calibration.record_step(4, calibration.current_length + 1, 1.0)
    assert not calibration.is_done


@pytest.mark.parametrize(
    ("steps", "is_measured"),
    [
        ([(4, 1), (4, 1), (4, 1)], True),
        ([(64, 1), (64, 1), (57, 1)], True),
        ([(8, 1), (64, 1), (64, 1)], True),
        ([(64, 1), (64, 1), (50, 1)], False),
        ([(5, 1), (5, 1), (4, 1)], False),
        ([(4, 3), (4, OFF), (4, OFF)], False),
        ([(4, 3), (4, 3), (4, OFF)], False),
        ([(4, 1), (4, 3), (4, 1)], False),
    ],
)
def test_a_step_is_measured_if_it_verified_drafts_of_its_own_length(
    steps: list[tuple[int, int]], is_measured: bool
) -> None:
    *before, last = (Step(float(at), batch, length, 0) for at, (batch, length) in enumerate(steps))
    assert last.is_measured(*before) is is_measured


def test_steps_that_read_prompts_are_not_measured() -> None:
    decodes = Step(0.0, 4, 1, 0)
    reads = Step(0.0, 4, 1, 9)
    assert decodes.is_measured(reads, decodes)
    assert not decodes.is_measured(decodes, reads)
    assert not reads.is_measured(decodes, decodes)
