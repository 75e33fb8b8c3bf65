"""Where a step's wall time goes. The stages partition it: time is always charged to exactly one of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

from specrl.coordinator.report import StageSeconds

Stage = Literal["data", "prepare", "generation", "logprob", "train", "validation", "checkpoint"]


class Stopwatch:
    """Charges wall time to stages. What no stage claims is data: the coordinator's own work between the others."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mark = clock()
        self._seconds: dict[Stage, float] = {}

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
            self._mark = self._clock()

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

    def lap(self) -> StageSeconds:
        """Seconds since the last lap, by stage; starts the next one."""
        seconds = self.so_far()
        self._seconds = {}
        return seconds

    def _charge(self, name: Stage) -> None:
        now = self._clock()
        self._seconds[name] = self._seconds.get(name, 0.0) + now - self._mark
        self._mark = now
