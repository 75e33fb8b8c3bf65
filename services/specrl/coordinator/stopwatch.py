"""Measures the wall time of a step by phase. The phases partition it: each second is charged to exactly one phase.

Beside the phases it measures generation under way: the seconds in which at least one rollout was in flight. Those
outside of the phase generation are hidden, because the trainer did not wait for rollouts then. It also measures the
seconds of the phase generation in which only verifiers were at work on the next step.

It also measures how many cores of this machine were busy in each phase, with all processes counted. If generation and
training share one machine, this shows how much each leaves to the other.

Used by the loop. The rollout pipeline tells it how many rollouts are in flight, and what the next step waits for.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import psutil

from specrl.formats.reports import PhaseSeconds

StepPhase = Literal["data", "prepare", "generation", "logprob", "train", "validation", "checkpoint"]


def read_core_seconds() -> float:
    """Return core seconds that this machine has spent since boot, in all processes. Waiting for I/O is not counted."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq)


@dataclass(frozen=True)
class Lap:
    """Wall seconds of one step.

    generation_under_way_s: at least one rollout was in flight. hidden_generation_s: the part of it in which the trainer
    did not wait for rollouts. grading_s: the part of the phase generation in which only verifiers were waited for.
    """

    phases: PhaseSeconds
    generation_under_way_s: float = 0.0
    hidden_generation_s: float = 0.0
    grading_s: float = 0.0


class _HeldTime:
    """Measures for how long a condition holds, by phase."""

    def __init__(self, now: float) -> None:
        self._is_held = False
        self._mark = now
        self._uncharged_s = 0.0
        self.seconds: defaultdict[StepPhase, float] = defaultdict(float)

    def set_held(self, is_held: bool, now: float) -> None:
        """Note whether the condition holds from now on."""
        self._add_elapsed(now)
        self._is_held = is_held

    def charge_to(self, name: StepPhase, now: float) -> None:
        """Charge the time since the last charge to a phase."""
        self._add_elapsed(now)
        self.seconds[name] += self._uncharged_s
        self._uncharged_s = 0.0

    def drop_elapsed(self, now: float) -> None:
        """Charge the time since the last charge to no phase."""
        self._mark = now
        self._uncharged_s = 0.0

    def _add_elapsed(self, now: float) -> None:
        if self._is_held:
            self._uncharged_s += now - self._mark
        self._mark = now


class Stopwatch:
    """Charges wall time to the phases of a step.

    Time outside of every phase is charged to data: the coordinator's own work, such as assembling the batch.
    """

    def __init__(self, clock: Callable[[], float], core_clock: Callable[[], float] = read_core_seconds) -> None:
        self._clock = clock
        self._core_clock = core_clock
        self._mark = clock()
        self._core_mark = core_clock()
        self._seconds: dict[StepPhase, float] = {}
        self._lasted: defaultdict[StepPhase, float] = defaultdict(float)
        self._core_seconds: defaultdict[StepPhase, float] = defaultdict(float)
        self._under_way = _HeldTime(self._mark)
        self._grading = _HeldTime(self._mark)

    def set_rollouts(self, in_flight: int, *, only_grading: bool = False) -> None:
        """Note how many rollouts are in flight from now on. May be called inside a block.

        only_grading: all that the next step lacks is with the verifiers.
        """
        now = self._clock()
        self._under_way.set_held(in_flight > 0, now)
        self._grading.set_held(only_grading, now)

    @contextmanager
    def charge_to(self, name: StepPhase) -> Iterator[None]:
        """Charge the time inside the block to `name`. Blocks must not be nested."""
        self._charge_elapsed("data")
        try:
            yield
        finally:
            self._charge_elapsed(name)

    @contextmanager
    def exclude_time(self) -> Iterator[None]:
        """Charge the time inside the block to no phase: the run is paused. Blocks must not be nested."""
        self._charge_elapsed("data")
        try:
            yield
        finally:
            self._mark = self._clock()
            self._under_way.drop_elapsed(self._mark)
            self._grading.drop_elapsed(self._mark)
            self._core_mark = self._core_clock()

    def split_phase(self, source: StepPhase, parts: dict[StepPhase, float]) -> None:
        """Move the time of one phase to `parts` (seconds by phase), and the rest of it to data.

        The trainer reports how long log-probabilities and training took. The rest of the call was transport.
        """
        left = self._seconds.pop(source, 0.0)
        for name, seconds in parts.items():
            taken = min(seconds, left)  # the trainer's clock may differ; the sum must stay the wall time
            self._seconds[name] = self._seconds.get(name, 0.0) + taken
            left -= taken
        self._seconds["data"] = self._seconds.get("data", 0.0) + left

    def read_lap(self) -> Lap:
        """Return the seconds since the last lap."""
        self._charge_elapsed("data")
        under_way = self._under_way.seconds
        return Lap(
            PhaseSeconds(**self._seconds),
            generation_under_way_s=sum(under_way.values()),
            hidden_generation_s=sum(under_way.values()) - under_way["generation"],
            grading_s=self._grading.seconds["generation"],
        )

    def busy_cores(self, name: StepPhase) -> float | None:
        """Return the mean number of busy cores in a phase since the last lap, or None if there was no such phase.

        Not affected by `split_phase`.
        """
        lasted = self._lasted.get(name, 0.0)
        return self._core_seconds[name] / lasted if lasted > 0 else None

    def end_lap(self) -> Lap:
        """Return the seconds since the last lap, and start the next lap."""
        lap = self.read_lap()
        self._seconds = {}
        self._under_way.seconds.clear()
        self._grading.seconds.clear()
        self._lasted.clear()
        self._core_seconds.clear()
        return lap

    def _charge_elapsed(self, name: StepPhase) -> None:
        now = self._clock()
        core_now = self._core_clock()
        self._under_way.charge_to(name, now)
        self._grading.charge_to(name, now)
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._lasted[name] += now - self._mark
        self._core_seconds[name] += core_now - self._core_mark
        self._mark = now
        self._core_mark = core_now
