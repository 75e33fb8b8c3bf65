"""Measures how long sandboxed programs waited for a processor, from the kernel's counters of every thread.

`code.time_limit` moves an answer's deadline by that time. Source: the first two fields of /proc/PID/task/TID/schedstat.
They are nanoseconds that a thread ran, and that it was runnable without running (Linux,
Documentation/scheduler/sched-stats).

Only waits for processes outside the sandbox count. While one thread of the programs runs, the others may be waiting for
it. So the running time of the other threads is subtracted from a thread's wait. The rest is a lower bound of the time
in which no thread of the programs ran. An answer cannot lengthen it by competing with itself.

If a thread ends between two looks, its wait in that interval does not count. A kernel without these files (gVisor)
reports no waits, so a limit is plain wall time there.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_NS = 1e-9


class ThreadWait:
    """One thread, by its folder in /proc."""

    def __init__(self, place: str, now: float) -> None:
        self._place = place
        self._counted_s = 0.0
        """The kernel's count of its waits, which grows only when the thread gets a processor."""
        self._unchanged_since = now
        self.ran_s = 0.0
        self.waited_s = 0.0
        """The counted wait plus the present one."""

    def read_counters(self, now: float) -> tuple[float, float]:
        """Return the seconds that it ran and waited since the last look; at the first look, since its start."""
        before_ran_s = self.ran_s
        before_waited_s = self.waited_s
        try:
            ran, waited, _ = Path(self._place, "schedstat").read_text(encoding="ascii").split()
            ran_s = int(ran) * _NS
            counted_s = int(waited) * _NS
            if (ran_s, counted_s) != (self.ran_s, self._counted_s):
                self.ran_s = ran_s
                self._counted_s = counted_s
                self._unchanged_since = now
                self.waited_s = counted_s
            elif _is_runnable(self._place):
                self.waited_s = counted_s + now - self._unchanged_since
        except (OSError, ValueError):
            return 0.0, 0.0
        return self.ran_s - before_ran_s, self.waited_s - before_waited_s


@dataclass(frozen=True)
class WaitSeconds:
    """Seconds waited since the previous look."""

    programs_s: float
    worker_s: float
    """Wait of this process' own thread, for which programs may be waiting."""


@dataclass
class ProgramTree:
    """The processes of one sandbox, as a tree.

    pid: the first process. wrappers: number of our own generations of processes above the program.
    """

    pid: int
    wrappers: int
    threads: dict[str, ThreadWait] = field(default_factory=dict)
    """Threads by their folders in /proc: the program's, or our wrappers' until it has started."""
    has_started: bool = False


class WaitMeter:
    """Measures the waits of this thread and of programs, from one look to the next."""

    def __init__(self) -> None:
        self._programs: dict[int, ProgramTree] = {}
        self._last_look = time.monotonic()
        self._worker = ThreadWait("/proc/thread-self", self._last_look)
        self._worker.read_counters(self._last_look)

    def add_program(self, program: ProgramTree) -> None:
        """Measure a program's waits from its start on."""
        self._programs[program.pid] = program

    def remove_program(self, program: ProgramTree) -> None:
        """Stop measuring a program that has ended."""
        del self._programs[program.pid]

    def measure_waits(self) -> WaitSeconds:
        """Read all counters, and return the waits since the previous look."""
        now = time.monotonic()
        elapsed_s = now - self._last_look
        self._last_look = now
        changes = [_read_thread_changes(program, now) for program in self._programs.values()]
        return compute_stalls(elapsed_s, changes, self._worker.read_counters(now)[1])


def compute_stalls(
    elapsed_s: float, programs: Sequence[Sequence[tuple[float, float]]], worker_wait_s: float
) -> WaitSeconds:
    """Compute how long programs and worker waited for other processes in `elapsed_s`.

    programs: for each thread of each program, the seconds that it ran and waited. Programs that call each other wait
    one after the other, so their waits are added. Threads of one program may wait at the same time, so only its longest
    wait counts.
    """
    ran_s = sum(ran for threads in programs for ran, _ in threads)
    waits = [max((wait - (ran_s - ran) for ran, wait in threads), default=0.0) for threads in programs]
    programs_s = min(elapsed_s, sum(max(0.0, wait) for wait in waits))
    return WaitSeconds(programs_s, min(elapsed_s - programs_s, max(0.0, worker_wait_s - ran_s)))


def _read_thread_changes(program: ProgramTree, now: float) -> list[tuple[float, float]]:
    """Return (ran, waited) of each thread since the last look. Waits are left out if a thread has ended since."""
    found = list(_list_threads(program.pid, program.wrappers))
    own = [place for place, generation in found if generation == program.wrappers]
    counted = own or [place for place, _ in found]  # our wrappers, until the program has started
    has_lost = program.has_started and not program.threads.keys() <= set(own)
    program.has_started = bool(own)
    program.threads = {place: program.threads.get(place) or ThreadWait(place, now) for place in counted}
    changes = [thread.read_counters(now) for thread in program.threads.values()]
    return [(ran_s, 0.0) for ran_s, _ in changes] if has_lost else changes


def _list_threads(pid: int, wrappers: int, generation: int = 0) -> Iterator[tuple[str, int]]:
    """Each thread's folder in /proc, below `pid`; with 0 for `pid`'s own, 1 for its children's, `wrappers` at most."""
    with suppress(OSError):  # ended in the meantime, or a kernel that does not list children
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield str(task), generation
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    yield from _list_threads(int(child), wrappers, min(generation + 1, wrappers))


def _is_runnable(place: str) -> bool:
    return Path(place, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "R"
