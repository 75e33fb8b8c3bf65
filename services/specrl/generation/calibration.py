"""What a step costs: which steps can tell, and how it is measured on an engine at its start. Pure.

A step verifies what the one before it drafted; and the time between two steps is that of the first or, where the next
one is scheduled before that has ended (async scheduling), of the one before. So it is what a length costs only after
three steps of that length, the last two of which did nothing but decode. With less, leaving the drafter out would look
as dear as the last drafts that were still to be verified.

At the start every length is measured in turn, over and over. A machine that does other things slows down for seconds at
a time, by more than lengths differ. So nothing is compared over seconds: a pass runs every length once, for a few
steps, and says how each compares with the others of the same pass; of these ratios the median over all passes counts.
How long steps are altogether is decided by undisturbed passes, the lower quartile: whatever else a machine does makes
steps longer, never shorter.

Called by the engine core's scheduler (vllm_backend/scheduler.py) at every step of a calibration. Seconds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from specrl.generation.draft_length import calibrated_lengths

PASSES = 12
PASS_STEPS = 2  # of each length in a pass; the quicker one counts
CLOSE = 8  # batches that differ by no more than such a part of them cost the same


class Step(NamedTuple):
    """When it was scheduled, how many requests are in it, how many tokens each drafts, how many of prompts are read."""

    at_s: float
    batch: int
    length: int
    read: int
    is_catch_up: bool = False
    """What is read had been read before, without the drafter."""

    def is_measured(self, two_before: Step, before: Step) -> bool:
        """Whether the time from this step to the next is what its length costs at its batch."""
        is_pure = self.batch > 0 and self.read == before.read == 0
        is_alike = abs(self.batch - before.batch) * CLOSE <= self.batch
        return is_pure and is_alike and two_before.length == before.length == self.length


class Calibration:
    """Measures one batch size after the other. `rows`: seconds [batch sizes so far] by length."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.rows: dict[int, list[float]] = {k: [] for k in calibrated_lengths(lengths)}
        self.begin(0)

    def begin(self, batch: int) -> None:
        """Measure at this batch size next."""
        self.batch = batch
        self._plan = [k for _ in range(PASSES) for k in self.rows for _ in range(PASS_STEPS)]
        self._seconds: list[float] = []

    @property
    def length(self) -> int:
        """What to draft now."""
        return self._plan[min(len(self._seconds), len(self._plan) - 1)]

    @property
    def is_done(self) -> bool:
        """Whether the present batch size has been measured."""
        return len(self._seconds) == len(self._plan)

    def saw_step(self, batch: int, k: int, seconds: float) -> None:
        """A step that is measured ended: it verified and drafted k tokens for each of `batch` requests."""
        if self.is_done or (batch, k) != (self.batch, self.length):
            return
        self._seconds.append(seconds)
        if len(self._seconds) == len(self._plan):
            for length, cost in self._costs().items():
                self.rows[length].append(cost)

    def _costs(self) -> dict[int, float]:
        levels: list[float] = []
        ratios: dict[int, list[float]] = {k: [] for k in self.rows}
        pass_steps = PASS_STEPS * len(self.rows)
        for begin in range(0, len(self._seconds), pass_steps):
            firsts = range(begin, begin + pass_steps, PASS_STEPS)
            costs = (min(self._seconds[first : first + PASS_STEPS]) for first in firsts)
            by_length = dict(zip(self.rows, costs, strict=True))
            levels.append(math.exp(statistics.fmean(math.log(cost) for cost in by_length.values())))
            for k, cost in by_length.items():
                ratios[k].append(cost / levels[-1])
        level = statistics.quantiles(levels, n=4)[0]
        return {k: level * statistics.median(found) for k, found in ratios.items()}
