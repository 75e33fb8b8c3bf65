"""Measures what a decoding step costs at each draft length, when an engine starts. Pure.

Steps that count. A step verifies the drafts of the step before it. The time between two steps belongs to the first of
them or, with async scheduling, to the one before that. So a step counts only if the two steps before it had the same
length. Also, it and the step before must have done nothing but decode. Otherwise running without the drafter would seem
to cost as much as the last drafts that were still being verified.

Removal of noise. Other load slows a machine down for seconds at a time, by more than the lengths differ. So lengths are
only compared within a pass, which runs every length once for a few steps. A length's cost relative to the others is
the median of its ratios over all passes. The absolute level is the lower quartile over passes, because load makes steps
longer and never shorter.

Called by the engine core's scheduler (vllm_backend/extensions/scheduler.py) at every step of a calibration. Times are
in seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from specrl.generation.draft_length import choose_calibrated_lengths

PASSES = 12  # per batch size
FEWEST_PASSES = 3  # of a batch size whose time is over: large models on CPUs take seconds for a step
PASS_STEPS = 2  # measured steps of each length in a pass; the faster one counts
CLOSE = 8  # batches that differ by at most 1/8 of their size are taken to cost the same


class Step(NamedTuple):
    """One step of the engine."""

    at_s: float
    """When it was scheduled."""
    batch: int
    """Requests in it."""
    length: int
    """Draft tokens of each request, or `draft_length.OFF`."""
    read: int
    """Prompt tokens that it computes."""
    is_catch_up: bool = False
    """Whether these tokens were computed before without the drafter, which now catches up."""

    def is_measured(self, two_before: Step, before: Step) -> bool:
        """Whether the time from this step to the next is the cost of its length at its batch size.

        two_before, before: the steps that precede it.
        """
        is_pure = self.batch > 0 and self.read == before.read == 0
        is_alike = abs(self.batch - before.batch) * CLOSE <= self.batch
        return is_pure and is_alike and two_before.length == before.length == self.length


class CostCalibration:
    """Measures one batch size after another. rows: seconds [batch sizes measured so far], by length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.rows: dict[int, list[float]] = {k: [] for k in choose_calibrated_lengths(lengths)}
        self.begin_batch(0)

    def begin_batch(self, batch: int) -> None:
        """Begin to measure another batch size."""
        self.batch = batch
        self._plan = [k for _ in range(PASSES) for k in self.rows for _ in range(PASS_STEPS)]
        self._seconds: list[float] = []

    @property
    def current_length(self) -> int:
        """The draft length of the next step."""
        return self._plan[min(len(self._seconds), len(self._plan) - 1)]

    @property
    def is_done(self) -> bool:
        """Whether the current batch size has been measured."""
        return len(self._seconds) == len(self._plan)

    def record_step(self, batch: int, k: int, seconds: float) -> None:
        """Record a step that `Step.is_measured` accepts: k tokens drafted and verified for each of `batch` requests.

        Ignored if the step is not of the batch size and length that are being measured.
        """
        if self.is_done or (batch, k) != (self.batch, self.current_length):
            return
        self._seconds.append(seconds)
        if len(self._seconds) == len(self._plan):
            self._add_costs()

    def end_early(self) -> bool:
        """Use the whole passes so far. Returns whether they are enough; if not, the batch size is not measured."""
        pass_steps = PASS_STEPS * len(self.rows)
        measured = len(self._seconds) // pass_steps * pass_steps
        if self.is_done or measured < FEWEST_PASSES * pass_steps:
            return self.is_done
        self._plan = self._plan[:measured]
        self._seconds = self._seconds[:measured]
        self._add_costs()
        return True

    def _add_costs(self) -> None:
        for length, cost in self._compute_costs().items():
            self.rows[length].append(cost)

    def _compute_costs(self) -> dict[int, float]:
        levels: list[float] = []
        ratios: dict[int, list[float]] = {k: [] for k in self.rows}
        pass_steps = PASS_STEPS * len(self.rows)
        for begin in range(0, len(self._seconds), pass_steps):
            firsts = range(begin, begin + pass_steps, PASS_STEPS)
            costs = (min(self._seconds[first : first + PASS_STEPS]) for first in firsts)
            by_length = dict(zip(self.rows, costs, strict=True))
            # The pass's speed: geometric mean over lengths.
            levels.append(math.exp(statistics.fmean(math.log(cost) for cost in by_length.values())))
            for k, cost in by_length.items():
                ratios[k].append(cost / levels[-1])
        level = statistics.quantiles(levels, n=4)[0]
        return {k: level * statistics.median(found) for k, found in ratios.items()}
