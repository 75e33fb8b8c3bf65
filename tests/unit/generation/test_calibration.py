"""Calibration gives the right step costs on a machine with other load."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.generation.test_draft_length import LENGTHS, a_cost
from tests.vllm_cases import a_spec

from specrl.generation.cost_calibration import FEWEST_PASSES, PASS_STEPS, PASSES, CostCalibration, Step
from specrl.generation.draft_length import OFF, choose_batch_nodes, choose_calibrated_lengths
from specrl.records import Sampling

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


@pytest.mark.parametrize(("passes", "is_enough"), [(FEWEST_PASSES - 1, False), (FEWEST_PASSES, True)])
def test_a_batch_size_whose_time_is_over_needs_a_few_passes(passes: int, is_enough: bool) -> None:
    """A model of 30 layers on two cores ran out of time, so the engine had no costs, and never switched drafts off."""
    calibration = CostCalibration(LENGTHS)
    calibration.begin_batch(4)
    for _ in range(passes * PASS_STEPS * len(CALIBRATED) + 1):
        calibration.record_step(4, calibration.current_length, a_cost(4, calibration.current_length))
    assert calibration.end_early() is calibration.is_done is is_enough
    calibration.record_step(4, calibration.current_length, 1.0)  # of a step under way
    found = {k: row[0] for k, row in calibration.rows.items() if row}
    assert found == ({k: pytest.approx(a_cost(4, k)) for k in CALIBRATED} if is_enough else {})


class SlowEngine:
    """A stand-in of vLLM's front end, whose engine core has measured some steps of a batch size."""

    def __init__(self, steps: int) -> None:
        self.engine_core = self.output_processor = self
        self._calibration = CostCalibration(LENGTHS)
        self._steps = steps

    async def call_utility_async(self, _method: str, name: str, *args: int) -> bool:
        if name == "calibrate":
            self._calibration.begin_batch(*args)
            for _ in range(self._steps):
                self._calibration.record_step(*args, self._calibration.current_length, 1.0)
        return self._calibration.end_early() if name == "end_batch_early" else self._calibration.is_done

    def has_unfinished_requests(self) -> bool:
        return True

    async def abort(self, _names: list[str]) -> None:
        return


@pytest.mark.parametrize(("passes", "is_measured"), [(1, False), (FEWEST_PASSES, True), (PASSES, True)])
async def test_an_engine_that_is_slow_uses_the_passes_that_it_has(
    vllm_imported: None, monkeypatch: pytest.MonkeyPatch, passes: int, is_measured: bool
) -> None:
    from specrl.generation.vllm_backend import draft_length_client

    monkeypatch.setattr(draft_length_client, "NODE_PATIENCE_S", -1.0)
    engine = SlowEngine(passes * PASS_STEPS * len(CALIBRATED))
    assert await draft_length_client._measure_batch_size(engine, 4, Sampling(8)) is is_measured


def test_costs_are_kept_for_another_length_of_completions(vllm_imported: None) -> None:
    """Each maxTokens was calibrated anew, for minutes with a model of 30 layers."""
    from specrl.generation.vllm_backend.draft_length_client import calibration_file

    def name_file(**sampling: Any) -> Path:
        return calibration_file(a_spec(Path("/policy"), {"ngram": {}}, generation={"sampling": sampling}), [])

    assert name_file(maxTokens=64) == name_file(maxTokens=128)
    assert name_file(maxTokens=64) != name_file(maxTokens=64, topK=4)


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
