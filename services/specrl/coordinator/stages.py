"""Where a step's wall time goes. The stages partition it: time is always charged to exactly one of them.

Beside it what this machine's processors did meanwhile, whoever's work it was: on a machine that a whole run shares,
what generation and training, each by itself, leave of it for the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import psutil

from specrl.coordinator.report import StageSeconds

Stage = Literal["data", "prepare", "generation", "logprob", "train", "validation", "checkpoint"]


def core_seconds() -> float:
    """Seconds that this machine's cores have computed since it started, all processes together."""
    spent = psutil.cpu_times()
    return float(spent.user + spent.nice + spent.system + spent.irq + spent.softirq)


class Stopwatch:
    """Charges wall time to stages. What no stage claims is data: the coordinator's own work between the others."""

    def __init__(self, clock: Callable[[], float], core_clock: Callable[[], float] = core_seconds) -> None:
        self._clock, self._core_clock = clock, core_clock
        self._mark, self._core_mark = clock(), core_clock()
        self._seconds: dict[Stage, float] = {}
        self._lasted: defaultdict[Stage, float] = defaultdict(float)
        self._core_seconds: defaultdict[Stage, float] = defaultdict(float)

    @contextmanager
    def stage(self, name: Stage) -> Iterator[None]:
        """Charge what passes inside to `name`. Not nested."""
        self._charge("data")
        try:
            yield
        finally:
            self._charge(name)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Charge what passes inside to nothing: the run is paused, and no step is under way. Not nested."""
        self._charge("data")
        try:
            yield
        finally:
            self._mark, self._core_mark = self._clock(), self._core_clock()

    def split(self, source: Stage, parts: dict[Stage, float]) -> None:
        """Re-charge what a stage took to `parts` (seconds) and the rest of it to data.

        The trainer reports how long log-probabilities and training took; what its call took beyond is transport.
        """
        left = self._seconds.pop(source, 0.0)
        for name, seconds in parts.items():
            taken = min(seconds, left)
            self._seconds[name] = self._seconds.get(name, 0.0) + taken
            left -= taken
        self._seconds["data"] = self._seconds.get("data", 0.0) + left

    def so_far(self) -> StageSeconds:
        """Seconds since the last lap, by stage."""
        self._charge("data")
        return StageSeconds(**self._seconds)

    def busy_cores(self, name: Stage) -> float | None:
        """Mean cores of this machine that computed in a stage since the last lap, all of it before `split`.

        None for a stage that has not been.
        """
        lasted = self._lasted.get(name, 0.0)
        return self._core_seconds[name] / lasted if lasted > 0 else None

    def lap(self) -> StageSeconds:
        """Seconds since the last lap, by stage; starts the next one."""
        seconds = self.so_far()
        self._seconds = {}
        self._lasted.clear()
        self._core_seconds.clear()
        return seconds

    def _charge(self, name: Stage) -> None:
        now, core_now = self._clock(), self._core_clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._lasted[name] += now - self._mark
        self._core_seconds[name] += core_now - self._core_mark
        self._mark, self._core_mark = now, core_now
