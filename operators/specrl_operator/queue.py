"""Which jobs are to be looked at, and when: each key once, by one worker at a time, later after every failure.

    WAITING (a time) -> DUE -> WORKED ON -> (forgotten | WAITING)
    added while worked on: due again as soon as that is over

Waiting workers are woken by `add`, by the earliest time that something is due, and by `close`.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

Key = tuple[str, str]

FIRST_DELAY_S, LAST_DELAY_S = 1.0, 300.0
"""Pauses after failures double from one to the other."""


class WorkQueue:
    """Keys in the order in which they are due. May be used by many threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._due: list[tuple[float, Key]] = []
        self._at: dict[Key, float] = {}
        self._working: set[Key] = set()
        self._again: set[Key] = set()
        self._failures: dict[Key, int] = {}
        self._is_closed = False
        self.retries = 0

    def add(self, key: Key, after_s: float = 0.0) -> None:
        """Have `key` looked at in so many seconds at the latest."""
        with self._changed:
            if key in self._working and after_s <= 0:
                self._again.add(key)
                return
            moment = self._clock() + after_s
            if moment < self._at.get(key, float("inf")):
                self._at[key] = moment
                heapq.heappush(self._due, (moment, key))
                self._changed.notify()

    def take(self, *, waits: bool = True) -> Key | None:
        """Wait for the next key that is due; whoever takes it calls `done`. None once closed, or instead of a wait."""
        with self._changed:
            while not self._is_closed:
                self._drop_overtaken()
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0 and (key := self._pop()) is not None:
                    return key
                if wait_s is None or wait_s > 0:
                    if not waits:
                        return None
                    self._changed.wait(wait_s)
            return None

    def _drop_overtaken(self) -> None:
        while self._due and self._at.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)

    def _pop(self) -> Key | None:
        _, key = heapq.heappop(self._due)
        del self._at[key]
        if key in self._working:
            self._again.add(key)
            return None
        self._working.add(key)
        return key

    def done(self, key: Key, *, failed: bool, after_s: float | None) -> None:
        """The look is over. failed: look again after a pause that grows; else after `after_s`, if at all."""
        with self._changed:
            self._working.discard(key)
            again = key in self._again
            self._again.discard(key)
            if failed:
                self.retries += 1
                self._failures[key] = self._failures.get(key, 0) + 1
            else:
                self._failures.pop(key, None)
        if failed:
            after_s = min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._failures[key] - 1))
            self.add(key, after_s)
        elif again:
            self.add(key)
        elif after_s is not None:
            self.add(key, after_s)

    def depth(self) -> int:
        """Keys that are due now."""
        with self._changed:
            now = self._clock()
            return sum(moment <= now for moment in self._at.values())

    def close(self) -> None:
        """Wake everybody who waits, for the last time."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
