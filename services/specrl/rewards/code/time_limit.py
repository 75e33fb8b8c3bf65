"""Limit the time of one answer: wall time minus the time that its programs waited for a processor.

Called by `sandbox_runner`. Waits are summed while programs run (`sandbox.waiting`), and each wait moves the deadline.
The load of the machine at the deadline does not matter. So an answer that sleeps and then spins exceeds its limit under
any load, and an answer that got no processor gets that time back.
"""

from __future__ import annotations

import select
import time
from collections.abc import Iterator
from contextlib import contextmanager

from specrl.rewards import question_time
from specrl.rewards.question_time import MAX_WAITING
from specrl.rewards.sandbox.confine import ConfinedProgram
from specrl.rewards.sandbox.waiting import WaitMeter
from specrl.rewards.verifier import Ungraded

_MEASURE_S = 0.1
"""Interval at which a program's counters are read, about ten small files of /proc each time."""


class TimeLimit:
    """The limit of one answer, in seconds from its creation. Waiting adds at most MAX_WAITING times the limit."""

    def __init__(self, wall_s: float) -> None:
        self.wall_s = wall_s
        self._started = time.monotonic()
        self._waited_s = 0.0
        self._next_look = self._started + _MEASURE_S
        self._meter = WaitMeter()

    @contextmanager
    def count_waits(self, program: ConfinedProgram) -> Iterator[None]:
        """Count a program's waits until the end of the block.

        The block must end before `ConfinedProgram.end`, after which the kernel's counters are gone.
        """
        self._meter.add_program(program.tree)
        try:
            yield
        finally:
            self._update_waits()
            self._meter.remove_program(program.tree)

    def poll_within_limit(self, poll: select.poll) -> list[tuple[int, int]]:
        """Wait for descriptors to become ready. Returns none if the time is up first.

        Raises Ungraded if the programs waited for a processor for too long.
        """
        while True:
            now = time.monotonic()
            if now >= self._next_look or self._left_s(now) <= 0:
                self._update_waits()
                now = time.monotonic()
            if self._waited_s > MAX_WAITING * self.wall_s:
                raise Ungraded(
                    f"a program must get a processor when it can run, got {self._waited_s:.0f} s of waiting for one; "
                    "the machine is too busy: use fewer workers in the pool, or another machine"
                )
            if self._left_s(now) <= 0:  # even if something is ready: output now and then must not extend the time
                return []
            if ready := poll.poll(1000 * max(0.0, min(self._left_s(now), self._next_look - now))):
                return ready

    def _left_s(self, now: float) -> float:
        return self.wall_s + self._waited_s - (now - self._started)

    def _update_waits(self) -> None:
        waited = self._meter.measure_waits()
        question_time.add_waiting(waited.programs_s)
        self._waited_s += waited.programs_s + waited.worker_s
        self._next_look = time.monotonic() + _MEASURE_S
