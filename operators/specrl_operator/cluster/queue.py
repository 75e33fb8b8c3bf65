"""A work queue of jobs to reconcile, like client-go's: deduplicated, delayed, with exponential backoff after failures.

    WAITING (until a time) -> DUE -> IN PROGRESS -> (dropped | WAITING)
    added while in progress: due again as soon as `done` is called

Invariant: a key is in progress at one worker at a time. Watches call `add`; the workers of `main.py` call `get` and
`done`. `add`, the earliest due time and `close` wake waiting workers.
"""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable

JobKey = tuple[str, str]
"""Namespace and name of an RLJob."""

MIN_BACKOFF_S = 1.0
MAX_BACKOFF_S = 300.0
"""The delay after consecutive failures of a key doubles from MIN_BACKOFF_S up to MAX_BACKOFF_S. At five minutes, as
often as every job is reconciled anyway (`watches.RELIST_S`)."""


class WorkQueue:
    """Keys in the order in which they are due. May be used by many threads."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """clock: monotonic seconds."""
        self._clock = clock
        self._changed = threading.Condition()
        # A heap cannot move an entry. When a key becomes due earlier, a second entry is pushed. The first one no longer
        # equals `_at[key]`, and `_drop_stale_entries` removes it when it reaches the top.
        self._due: list[tuple[float, JobKey]] = []
        self._at: dict[JobKey, float] = {}
        self._working: set[JobKey] = set()
        self._again: set[JobKey] = set()
        self._failures: dict[JobKey, int] = {}
        self._is_closed = False

    def add(self, key: JobKey, after_s: float = 0.0) -> None:
        """Make `key` due in `after_s` seconds at the latest."""
        with self._changed:
            if key in self._working and after_s <= 0:
                self._again.add(key)
                return
            moment = self._clock() + after_s
            if moment < self._at.get(key, float("inf")):
                self._at[key] = moment
                heapq.heappush(self._due, (moment, key))
                self._changed.notify()

    def get(self, *, waits: bool = True) -> JobKey | None:
        """Wait for the next due key; the caller must call `done` for it. Wakes as the module says.

        Returns None once the queue is closed, and with waits=False if no key is due.
        """
        with self._changed:
            while not self._is_closed:
                self._drop_stale_entries()
                wait_s = self._due[0][0] - self._clock() if self._due else None
                if wait_s is not None and wait_s <= 0 and (key := self._pop_due_key()) is not None:
                    return key
                if wait_s is None or wait_s > 0:
                    if not waits:
                        return None
                    self._changed.wait(wait_s)
            return None

    def _drop_stale_entries(self) -> None:
        while self._due and self._at.get(self._due[0][1]) != self._due[0][0]:
            heapq.heappop(self._due)

    def _pop_due_key(self) -> JobKey | None:
        _, key = heapq.heappop(self._due)
        del self._at[key]
        # A delayed key can become due while a worker has it: `done` makes it due again then.
        if key in self._working:
            self._again.add(key)
            return None
        self._working.add(key)
        return key

    def done(self, key: JobKey, *, failed: bool, after_s: float | None) -> None:
        """Finish a key that `get` returned. failed: it is due again after a backoff; else after `after_s`, if given."""
        with self._changed:
            self._working.discard(key)
            again = key in self._again
            self._again.discard(key)
            if failed:
                self._failures[key] = self._failures.get(key, 0) + 1
            else:
                self._failures.pop(key, None)
        if failed:
            after_s = min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2.0 ** (self._failures[key] - 1))
            self.add(key, after_s)
        elif again:
            self.add(key)
        elif after_s is not None:
            self.add(key, after_s)

    def count_due(self) -> int:
        """Count the keys that are due now."""
        with self._changed:
            now = self._clock()
            return sum(moment <= now for moment in self._at.values())

    def close(self) -> None:
        """Wake all waiting workers. From now on `get` returns None."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
