"""Costs of steps on a machine that does other things, too."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.generation.test_draft_length import LENGTHS, a_cost

from specrl.generation.calibration import PASS_STEPS, PASSES, Calibration, Step
from specrl.generation.draft_length import OFF, batch_nodes, calibrated_lengths

CALIBRATED = calibrated_lengths(LENGTHS)


class BusyMachine:
    """Steps by `a_cost`; for tenths of a second at a time everything takes up to twice as long."""

    def __init__(self, seed: int, disturbed_share: float) -> None:
        self._random = random.Random(seed)  # noqa: S311 - no secret
        self._share = disturbed_share
        self._slowness, self._until, self._now = 1.0, 0.0, 0.0

    def step(self, batch: int, k: int) -> float:
        if self._now >= self._until:
            is_disturbed = self._random.random() < self._share
            self._slowness = self._random.uniform(1.3, 2.0) if is_disturbed else 1.0
            self._until = self._now + self._random.uniform(0.3, 3.0)
        seconds = a_cost(batch, k) * self._slowness * self._random.uniform(0.98, 1.02)
        self._now += seconds
        return seconds


def measure(calibration: Calibration, machine: BusyMachine) -> None:
    for batch in batch_nodes(64):
        calibration.begin(batch)
        while not calibration.is_done:
            k = calibration.length
            calibration.saw_step(batch, k, machine.step(batch, k))


@settings(max_examples=40)
@given(seed=st.integers(0, 2**32 - 1), disturbed_share=st.floats(0, 0.5))
def test_lengths_compare_as_they_do_on_a_quiet_machine(seed: int, disturbed_share: float) -> None:
    calibration = Calibration(LENGTHS)
    measure(calibration, BusyMachine(seed, disturbed_share))
    for place, batch in enumerate(batch_nodes(64)):
        for k in CALIBRATED:
            ratio = calibration.rows[k][place] / calibration.rows[CALIBRATED[0]][place]
            assert ratio == pytest.approx(a_cost(batch, k) / a_cost(batch, CALIBRATED[0]), rel=0.06)


def test_steps_of_another_batch_or_length_are_not_counted() -> None:
    calibration = Calibration(LENGTHS)
    calibration.begin(4)
    for _ in range(2 * PASSES * PASS_STEPS * len(CALIBRATED)):
        calibration.saw_step(3, calibration.length, 1.0)
        calibration.saw_step(4, calibration.length + 1, 1.0)
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
def test_a_step_tells_what_its_length_costs_when_it_verified_drafts_of_that_length(
    steps: list[tuple[int, int]], is_measured: bool
) -> None:
    *before, last = (Step(float(at), batch, length, 0) for at, (batch, length) in enumerate(steps))
    assert last.is_measured(*before) is is_measured


def test_steps_that_read_prompts_tell_nothing() -> None:
    decodes, reads = Step(0.0, 4, 1, 0), Step(0.0, 4, 1, 9)
    assert decodes.is_measured(reads, decodes)
    assert not decodes.is_measured(decodes, reads)
    assert not reads.is_measured(decodes, decodes)
