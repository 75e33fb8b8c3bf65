"""How long sandboxed programs waited for a processor, as the kernel counts it for every thread.

`code.time_limit` moves an answer's deadline by it. Source: /proc/PID/task/TID/schedstat, whose first two fields are
nanoseconds that a thread ran, and that it was runnable without running (Linux, Documentation/scheduler/sched-stats).

Only a wait that others caused counts. While one thread of the programs runs, the others may well be waiting for that
one, so the running time of the others is taken off a thread's wait. What is left is a lower bound of the time in which
nothing of the programs ran: an answer cannot lengthen it by competing with itself.

Threads that end between two looks lose their share of that interval: nothing is credited for it. A kernel without
these files (gVisor) credits nothing: there a limit is plain wall time.
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
        """Its wait by the kernel's count, which grows only when the thread gets a processor."""
        self._unchanged_since = now
        self.ran_s = 0.0
        self.waited_s = 0.0
        """The counted wait, and the one that goes on still."""

    def look(self, now: float) -> tuple[float, float]:
        """Seconds that it ran and waited since the last look; at the first, since it was born."""
        before_ran_s, before_waited_s = self.ran_s, self.waited_s
        try:
            ran, waited, _ = Path(self._place, "schedstat").read_text(encoding="ascii").split()
            ran_s, counted_s = int(ran) * _NS, int(waited) * _NS
            if (ran_s, counted_s) != (self.ran_s, self._counted_s):
                self.ran_s, self._counted_s, self._unchanged_since, self.waited_s = ran_s, counted_s, now, counted_s
            elif _is_runnable(self._place):
                self.waited_s = counted_s + now - self._unchanged_since
        except (OSError, ValueError):
            return 0.0, 0.0
        return self.ran_s - before_ran_s, self.waited_s - before_waited_s


@dataclass(frozen=True)
class Waited:
    """Seconds since the look before."""

    programs_s: float
    worker_s: float
    """Of this process' own thread, which programs may be waiting for in their turn."""


@dataclass
class ProgramTree:
    """The processes of one sandbox, as a tree.

    pid: the first of them. wrappers: how many generations of ours there are above the program itself.
    """

    pid: int
    wrappers: int
    threads: dict[str, ThreadWait] = field(default_factory=dict)
    """By their folders in /proc: the program's, or ours until it has started."""
    has_started: bool = False


class WaitMeter:
    """Measures the waits of this thread and of programs, from one look to the next."""

    def __init__(self) -> None:
        self._programs: dict[int, ProgramTree] = {}
        self._last_look = time.monotonic()
        self._worker = ThreadWait("/proc/thread-self", self._last_look)
        self._worker.look(self._last_look)

    def watch(self, program: ProgramTree) -> None:
        """Count a program's waits from its start on."""
        self._programs[program.pid] = program

    def forget(self, program: ProgramTree) -> None:
        """It has ended."""
        del self._programs[program.pid]

    def look(self) -> Waited:
        """Read all counters anew."""
        now = time.monotonic()
        elapsed_s, self._last_look = now - self._last_look, now
        changes = [_changes(program, now) for program in self._programs.values()]
        return stalled(elapsed_s, changes, self._worker.look(now)[1])


def stalled(elapsed_s: float, programs: Sequence[Sequence[tuple[float, float]]], worker_wait_s: float) -> Waited:
    """What programs and worker waited for others in `elapsed_s`.

    programs: of each program's threads, the seconds that it ran and waited. Programs that ask each other wait by turns,
    so their waits add up; those of one program's threads may be at the same time, so its longest counts.
    """
    ran_s = sum(ran for threads in programs for ran, _ in threads)
    waits = [max((wait - (ran_s - ran) for ran, wait in threads), default=0.0) for threads in programs]
    programs_s = min(elapsed_s, sum(max(0.0, wait) for wait in waits))
    return Waited(programs_s, min(elapsed_s - programs_s, max(0.0, worker_wait_s - ran_s)))


def _changes(program: ProgramTree, now: float) -> list[tuple[float, float]]:
    """(ran, waited) of each of its threads since the last look; without waits where threads have ended since."""
    found = list(_threads(program.pid, program.wrappers))
    own = [place for place, generation in found if generation == program.wrappers]
    counted = own or [place for place, _ in found]  # ours, as long as the program is on its way
    has_lost = program.has_started and not program.threads.keys() <= set(own)
    program.has_started = bool(own)
    program.threads = {place: program.threads.get(place) or ThreadWait(place, now) for place in counted}
    changes = [thread.look(now) for thread in program.threads.values()]
    return [(ran_s, 0.0) for ran_s, _ in changes] if has_lost else changes


def _threads(pid: int, wrappers: int, generation: int = 0) -> Iterator[tuple[str, int]]:
    """Each thread's folder in /proc, below `pid`; with 0 for `pid`'s own, 1 for its children's, `wrappers` at most."""
    with suppress(OSError):  # ended in the meantime, or a kernel that does not list children
        for task in Path(f"/proc/{pid}/task").iterdir():
            yield str(task), generation
            with suppress(OSError):
                for child in (task / "children").read_text(encoding="ascii").split():
                    yield from _threads(int(child), wrappers, min(generation + 1, wrappers))


def _is_runnable(place: str) -> bool:
    return Path(place, "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0] == "R"
