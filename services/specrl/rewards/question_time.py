"""Measure the time of one question to a worker: wall time minus the time that it waited for a processor.

The pool and its workers share an array of slots in memory. A worker writes its process id, its start time, and how long
its sandboxed programs waited (`sandbox.waiting`). The pool reads the slot while it waits for the answer, and adds the
worker's own wait from /proc. `workers` calls this module on both sides; `code.time_limit` calls `add_waiting`.

Invariant: a slot belongs to one question. A cancelled worker that still runs never writes to another question's slot:
each write compares the slot's question number first.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.context import BaseContext
from typing import Any

from specrl.rewards.sandbox.waiting import ThreadWait

MAX_WAITING = 4
"""Most waiting that is added to a time limit, as a multiple of the limit. Beyond that the machine is too busy."""


class _TimeSlot(ctypes.Structure):
    _fields_ = (
        ("question", ctypes.c_uint64),  # number of the question that holds the slot; 0: free
        ("pid", ctypes.c_int64),  # 0 until a worker has taken the question; written last, see `begin_question`
        ("began_s", ctypes.c_double),  # time.monotonic, which is the same clock in every process
        ("worker_waited_s", ctypes.c_double),  # the worker's total wait before this question
        ("programs_waited_s", ctypes.c_double),  # the wait of its sandboxed programs during this question
    )


@dataclass
class _CurrentQuestion:
    slots: Any = None
    number: int = 0
    index: int = 0


_current = _CurrentQuestion()
"""In a worker: the slots of its pool, and the question that it works on."""


class TimeSlots:
    """The pool's side: one slot for each question that may be in progress."""

    def __init__(self, count: int, context: BaseContext) -> None:
        self.shared: Any = context.RawArray(_TimeSlot, count)  # without a lock: each field has one writer at a time
        self._free = list(range(count))
        self._numbers = itertools.count(1)

    @contextmanager
    def reserve_slot(self) -> Iterator[QuestionTime]:
        """Reserve a slot for one question until the block ends. The caller limits the number of open questions."""
        index = self._free.pop()
        number = next(self._numbers)  # never reused, so that a late worker recognises that the slot is not its own
        slot = self.shared[index]
        slot.pid = 0
        slot.began_s = 0.0
        slot.programs_waited_s = 0.0
        slot.question = number
        try:
            yield QuestionTime(slot, index, number)
        finally:
            slot.question = 0
            self._free.append(index)


class QuestionTime:
    """The time that one question has used so far."""

    def __init__(self, slot: Any, index: int, number: int) -> None:
        self._slot = slot
        self.index = index
        self.number = number
        self._worker: ThreadWait | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a worker has taken the question."""
        return bool(self._slot.pid)

    def measure_seconds(self) -> tuple[float, float]:
        """Return the seconds since a worker began, and how many of them it and its programs waited for a processor."""
        if not self.has_begun:
            return 0.0, 0.0
        if self._worker is None:
            self._worker = ThreadWait(f"/proc/{self._slot.pid}/task/{self._slot.pid}", self._slot.began_s)
        now = time.monotonic()
        self._worker.read_counters(now)
        elapsed_s = now - self._slot.began_s
        worker_s = max(0.0, self._worker.waited_s - self._slot.worker_waited_s)
        return elapsed_s, min(elapsed_s, worker_s + self._slot.programs_waited_s)


def enter_worker(slots: Any) -> None:
    """Store the pool's slots. Called once in each worker when it starts."""
    _current.slots = slots


def begin_question(index: int, number: int) -> None:
    """Start the time of a question. Called in the worker that has taken it."""
    _current.index = index
    _current.number = number
    slot = _current.slots[index]
    if slot.question == number:
        slot.began_s = time.monotonic()
        worker = ThreadWait("/proc/thread-self", slot.began_s)
        worker.read_counters(slot.began_s)
        slot.worker_waited_s = worker.waited_s
        slot.pid = os.getpid()  # last, since the pool takes a pid as the sign that the other fields are valid


def add_waiting(seconds: float) -> None:
    """Add the seconds that this question's programs waited for a processor. Does nothing outside of a worker."""
    if _current.slots is not None and _current.slots[_current.index].question == _current.number:
        _current.slots[_current.index].programs_waited_s += seconds
