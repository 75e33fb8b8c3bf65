"""Measures the wall time of a step by phase. The phases partition it: each second is charged to exactly one phase.

Beside the phases it measures generation under way: the seconds in which at least one rollout was in flight. Those
outside of the phase generation are hidden, because the trainer did not wait for rollouts then.

It also measures how many cores of this machine were busy in each phase, with all processes counted. If generation and
training share one machine, this shows how much each leaves to the other.

Used by the loop. The rollout pipeline tells it how many rollouts are in flight.
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
    did not wait for rollouts.
    """

    phases: PhaseSeconds
    generation_under_way_s: float = 0.0
    hidden_generation_s: float = 0.0


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
        self._in_flight = 0
        self._flight_mark = self._mark
        self._flown = 0.0  # seconds with rollouts in flight since `_mark`, not charged yet
        self._under_way: defaultdict[StepPhase, float] = defaultdict(float)

    def set_in_flight(self, rollouts: int) -> None:
        """Note how many rollouts are in flight from now on. May be called inside a block."""
        self._add_flown(self._clock())
        self._in_flight = rollouts

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
            self._mark = self._flight_mark = self._clock()
            self._flown = 0.0
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
        under_way = sum(self._under_way.values())
        return Lap(PhaseSeconds(**self._seconds), under_way, under_way - self._under_way["generation"])

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
        self._under_way.clear()
        self._lasted.clear()
        self._core_seconds.clear()
        return lap

    def _charge_elapsed(self, name: StepPhase) -> None:
        now = self._clock()
        core_now = self._core_clock()
        self._add_flown(now)
        self._under_way[name] += self._flown
        self._flown = 0.0
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._lasted[name] += now - self._mark
        self._core_seconds[name] += core_now - self._core_mark
        self._mark = now
        self._core_mark = core_now

    def _add_flown(self, now: float) -> None:
        if self._in_flight:
            self._flown += now - self._flight_mark
        self._flight_mark = now
