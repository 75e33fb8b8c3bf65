"""The time of one answer: wall time less what its programs waited for a processor.

Called by `trial`. Whether the machine is busy is not asked when the time is up: waits are summed while programs run
(`sandbox.waiting`), and move the deadline. So an answer that sleeps and then spins is over its time whatever the load,
and one that got no processor is given that time.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specrl.rewards import question_time
from specrl.rewards.question_time import MOST_WAITING
from specrl.rewards.sandbox.confine import Confined
from specrl.rewards.sandbox.waiting import WaitMeter
from specrl.rewards.verifier import Ungraded

_LOOK_S = 0.1
"""Between two looks at the counters of a program: about ten small files of /proc."""


class TimeLimit:
    """Starts when it is made. At most MOST_WAITING times the limit is added for waiting."""

    def __init__(self, wall_s: float) -> None:
        self.wall_s = wall_s
        self._started = time.monotonic()
        self._waited_s = 0.0
        self._next_look = self._started + _LOOK_S
        self._meter = WaitMeter()

    @contextmanager
    def watch(self, program: Confined) -> Iterator[None]:
        """Count a program's waits until the end of the block, which comes before `Confined.end`."""
        self._meter.watch(program.tree)
        try:
            yield
        finally:
            self._look()
            self._meter.forget(program.tree)

    def poll(self, poll: select.poll) -> list[tuple[int, int]]:
        """Descriptors that are ready; none when the time is up. Raises Ungraded when the machine is too busy."""
        while True:
            now = time.monotonic()
            if now >= self._next_look or self._left_s(now) <= 0:
                self._look()
                now = time.monotonic()
            if self._waited_s > MOST_WAITING * self.wall_s:
                raise Ungraded(
                    f"a program must get a processor when it can run, but waited {self._waited_s:.0f} s for one; the "
                    "machine is too busy: fewer workers in the pool, or run elsewhere"
                )
            if self._left_s(now) <= 0:  # also when something is ready: who writes a byte now and then has no more time
                return []
            if ready := poll.poll(1000 * max(0.0, min(self._left_s(now), self._next_look - now))):
                return ready

    def _left_s(self, now: float) -> float:
        return self.wall_s + self._waited_s - (now - self._started)

    def _look(self) -> None:
        waited = self._meter.look()
        question_time.add_waiting(waited.programs_s)
        self._waited_s += waited.programs_s + waited.worker_s
        self._next_look = time.monotonic() + _LOOK_S
