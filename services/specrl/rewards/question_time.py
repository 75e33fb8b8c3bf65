"""The time of one question to a worker: wall time less what it waited for a processor, seen from both sides.

A worker writes into a slot of memory that it shares with the pool: who it is, when it began, and how long programs that
it runs had to wait (`sandbox.waiting`). The pool reads the slot while it waits for the answer, and adds what the worker
itself waited, which is in /proc. Called by `workers`; `add_waiting` also by `code.time_limit`.

Invariant: a slot belongs to one question. A worker that was told to stop, and still runs, writes to no other's.
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

MOST_WAITING = 4
"""How much may be added to a time limit for waiting, as a multiple of it. Past that the machine is too busy."""


class _Slot(ctypes.Structure):
    _fields_ = (
        ("question", ctypes.c_uint64),
        ("pid", ctypes.c_int64),
        ("began_s", ctypes.c_double),
        ("worker_waited_s", ctypes.c_double),  # before the question
        ("programs_waited_s", ctypes.c_double),
    )


@dataclass
class _Current:
    slots: Any = None
    number: int = 0
    index: int = 0


_current = _Current()
"""In a worker: the slots of its pool, and the question that it is at."""


class Slots:
    """A slot for each question that is under way, in the pool's process."""

    def __init__(self, count: int, context: BaseContext) -> None:
        self.shared: Any = context.RawArray(_Slot, count)
        self._free = list(range(count))
        self._numbers = itertools.count(1)

    @contextmanager
    def question(self) -> Iterator[QuestionTime]:
        """A slot of its own for one question."""
        index, number = self._free.pop(), next(self._numbers)
        slot = self.shared[index]
        slot.pid, slot.began_s, slot.programs_waited_s = 0, 0.0, 0.0
        slot.question = number
        try:
            yield QuestionTime(slot, index, number)
        finally:
            slot.question = 0
            self._free.append(index)


class QuestionTime:
    """The time that one question has taken so far."""

    def __init__(self, slot: Any, index: int, number: int) -> None:
        self._slot, self.index, self.number = slot, index, number
        self._worker: ThreadWait | None = None

    @property
    def has_begun(self) -> bool:
        """Whether a worker has taken the question."""
        return bool(self._slot.pid)

    def look(self) -> tuple[float, float]:
        """Seconds since a worker has begun, and those of them that it and its programs waited for a processor."""
        if not self.has_begun:
            return 0.0, 0.0
        if self._worker is None:
            self._worker = ThreadWait(f"/proc/{self._slot.pid}/task/{self._slot.pid}", self._slot.began_s)
        now = time.monotonic()
        self._worker.look(now)
        elapsed_s = now - self._slot.began_s
        worker_s = max(0.0, self._worker.waited_s - self._slot.worker_waited_s)
        return elapsed_s, min(elapsed_s, worker_s + self._slot.programs_waited_s)


def enter_worker(slots: Any) -> None:
    """In a worker, once: these are its pool's slots."""
    _current.slots = slots


def begin(index: int, number: int) -> None:
    """In a worker: its time for a question starts now."""
    _current.index, _current.number = index, number
    slot = _current.slots[index]
    if slot.question == number:
        slot.began_s = time.monotonic()
        worker = ThreadWait("/proc/thread-self", slot.began_s)
        worker.look(slot.began_s)
        slot.worker_waited_s = worker.waited_s
        slot.pid = os.getpid()  # last: what makes the others valid


def add_waiting(seconds: float) -> None:
    """In a worker: programs of this question waited for so long, through no fault of its own. Elsewhere nothing."""
    if _current.slots is not None and _current.slots[_current.index].question == _current.number:
        _current.slots[_current.index].programs_waited_s += seconds
