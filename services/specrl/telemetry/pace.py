"""Spreads work out in time, so that whoever asks for it without end takes a bounded share of a process.

Used by servers that answer anybody: `exporter`, the gRPC servers and the coordinator's page.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Pace:
    """Gives out turns: `burst` at once after a quiet time, then `per_s` a second. clock: monotonic seconds."""

    def __init__(self, per_s: float, burst: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._gap_s = 1.0 / per_s
        self._burst_s = burst / per_s
        self._clock = clock
        self._last_turn = clock() - self._burst_s

    def try_turn(self) -> bool:
        """Take the next turn if it needs no waiting. Returns whether it was taken."""
        if max(self._last_turn, self._clock() - self._burst_s) + self._gap_s > self._clock():
            return False
        self.take_turn()
        return True

    def take_turn(self) -> float:
        """Take the next turn. Returns the seconds to wait for it, 0 within the burst."""
        now = self._clock()
        self._last_turn = max(self._last_turn, now - self._burst_s) + self._gap_s
        return max(0.0, self._last_turn - now)
