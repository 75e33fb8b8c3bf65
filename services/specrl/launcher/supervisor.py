"""Keeps the processes of one run alive, and leaves none behind: the local stand-in for the operator.

Each program (coordinator, a replica, the trainer with all its ranks) is one process group:

    WAITING --start--> RUNNING --any rank ends--> the whole group is killed, then
                          exit 2, a user's mistake      -> REFUSED: the run ends with the program's own message
                          exit 0 of the coordinator     -> ENDED: somebody stopped the run through it
                          exit 0 of a replica           -> LEFT: it was told to, and stays away until it is wanted again
                          more crashes in a row than    -> GIVEN UP: the run ends
                            MAX_CRASHES
                          anything else                 -> WAITING for a pause that doubles, then RUNNING again
    RUNNING --retire--> told to end, killed after its grace --any end--> LEFT

Nothing here blocks: `poll` looks once, `begin_stop` and `poll_stop` bring everything down, coordinator first. Every
wait of a stop is bounded by a program's `grace_s`; what outlives it is killed. Called from one thread (see leash.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import IO

from specrl.launcher import leash, warden

REFUSED_CODE = 2
MAX_CRASHES = 5
HEALTHY_S = 120.0  # longer than any start: a program that ran this long has recovered, and its crashes count anew
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.5, 10.0
KILLED_WAIT_S = 10.0
LONGEST_WORDS = 300  # letters of a crash's last line that are shown; the log has the rest
_MESSAGE = re.compile(r"(error|specrl-[a-z]+): ")


@dataclass(frozen=True)
class Rank:
    """One operating-system process of a program."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Program:
    """Something that is kept running. `ranks` is asked at every start, so that a restart may use fresh ports.

    stop_order: programs with lower numbers are stopped, and gone, before those with higher ones are told to stop.
    grace_s: how long it may take to end after SIGTERM.
    ends_run: exit 0 means that the run is over. may_leave: it means that it was told to leave, and has nothing left to
    do. Of all others it is as unexpected as a crash.
    """

    name: str
    ranks: Callable[[], Sequence[Rank]]
    stop_order: int = 1
    grace_s: float = 15.0
    ends_run: bool = False
    may_leave: bool = False


class Ending(StrEnum):
    """Why no further restart makes sense."""

    REFUSED = "refused"
    ENDED = "ended"
    GIVEN_UP = "given up"


@dataclass(frozen=True)
class Verdict:
    """A program that ended the run, and what to tell the user."""

    ending: Ending
    program: str
    message: str


@dataclass
class _Slot:
    """One program's processes. crashes: those since it was last healthy. is_wanted: whether it is kept running."""

    program: Program
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[tuple[Path, int]] = field(default_factory=list)
    started_at: float = 0.0
    restart_at: float = 0.0
    crashes: int = 0
    restarts: int = 0
    kill_at: float | None = None
    is_wanted: bool = True

    @property
    def group(self) -> int:
        return self.processes[0].pid


class Supervisor:
    """The programs of one run."""

    def __init__(self, programs: Sequence[Program], clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = [_Slot(program) for program in programs]
        self._clock = clock
        self._notices: list[str] = []
        self._warden: subprocess.Popen[bytes] | None = None
        self._stopping: int | None = None

    def __enter__(self) -> Supervisor:
        self._warden = subprocess.Popen(
            [sys.executable, "-I", "-S", warden.__file__], stdin=subprocess.PIPE, process_group=0
        )
        return self

    def __exit__(self, *_: object) -> None:
        """Whatever happened, nothing of ours runs on."""
        self.kill_all()
        assert self._warden is not None
        assert self._warden.stdin is not None
        self._warden.stdin.close()
        self._warden.wait(KILLED_WAIT_S)

    def poll(self) -> Verdict | None:
        """Start what is due, look at what ended. Returns a Verdict when the run cannot go on."""
        for slot in self._slots:
            if slot.processes:
                verdict = self._look_at(slot)
                if verdict is not None:
                    return verdict
            if not slot.processes and slot.is_wanted and self._clock() >= slot.restart_at:
                self._start(slot)
        return None

    def want(self, program: Program) -> None:
        """Keep it running from the next poll on, as any other. One that has left, or is leaving, comes back."""
        slot = next((slot for slot in self._slots if slot.program.name == program.name), None)
        if slot is None:
            self._slots.append(_Slot(program))
        elif not slot.is_wanted:
            slot.is_wanted, slot.crashes, slot.restart_at = True, 0, 0.0

    def retire(self, name: str, grace_s: float) -> None:
        """Tell a program to end, and keep it away; killed after `grace_s`. Idempotent."""
        for slot in self._slots:
            if slot.program.name == name and slot.is_wanted:
                slot.is_wanted = False
                if slot.processes:
                    self._tell(slot, grace_s)

    def begin_stop(self) -> None:
        """Tell the first programs in stop order to end. Idempotent; nothing is restarted from here on."""
        if self._stopping is None:
            self._stop_next()

    def poll_stop(self) -> bool:
        """Reap what has ended, kill what is overdue, tell the next ones. Returns whether everything is down."""
        assert self._stopping is not None
        for slot in self._slots:
            if not slot.processes:
                continue
            is_overdue = slot.kill_at is not None and self._clock() >= slot.kill_at
            if is_overdue or all(_exit_code(process) is not None for process in slot.processes):
                self._end(slot)
        if not any(slot.processes for slot in self._slots if slot.program.stop_order <= self._stopping):
            self._stop_next()
        return not any(slot.processes for slot in self._slots)

    def kill_all(self) -> None:
        """Kill every process group at once."""
        for slot in self._slots:
            if slot.processes:
                self._end(slot)

    def take_notices(self) -> list[str]:
        """What has happened since the last call, in words."""
        taken, self._notices = self._notices, []
        return taken

    def restarts(self) -> dict[str, int]:
        """How often each program was started again."""
        return {slot.program.name: slot.restarts for slot in self._slots}

    def _stop_next(self) -> None:
        alive = [slot for slot in self._slots if slot.processes]
        self._stopping = min((slot.program.stop_order for slot in alive), default=sys.maxsize)
        for slot in alive:
            if slot.program.stop_order == self._stopping:
                self._tell(slot, slot.program.grace_s)

    def _tell(self, slot: _Slot, grace_s: float) -> None:
        """Have a program end, within `grace_s`. The ranks alone: what they started is theirs to end."""
        slot.kill_at = self._clock() + grace_s
        for process in slot.processes:
            process.send_signal(signal.SIGTERM)

    def _start(self, slot: _Slot) -> None:
        slot.started_at = self._clock()
        for rank in slot.program.ranks():
            rank.log.parent.mkdir(parents=True, exist_ok=True)
            with rank.log.open("ab") as log:
                slot.logs.append((rank.log, log.tell()))
                slot.processes.append(self._spawn(rank, log, slot.group if slot.processes else 0))
            if len(slot.processes) == 1:
                self._tell_warden(f"+{slot.group}\n")

    def _spawn(self, rank: Rank, log: IO[bytes], group: int) -> subprocess.Popen[bytes]:
        """Groups of their own keep the terminal's Ctrl-C away: the order of a stop is ours."""
        command = [sys.executable, "-I", "-S", leash.__file__, str(os.getpid()), *rank.arguments]
        return subprocess.Popen(
            command,
            env=dict(rank.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            process_group=group,
        )

    def _look_at(self, slot: _Slot) -> Verdict | None:
        codes = [code for code in map(_exit_code, slot.processes) if code is not None]
        is_overdue = slot.kill_at is not None and self._clock() >= slot.kill_at
        if not codes and not is_overdue:
            return None
        name, logs = slot.program.name, slot.logs
        was_told = slot.kill_at is not None
        self._end(slot)
        if was_told or (slot.program.may_leave and set(codes) == {0}):
            slot.is_wanted = slot.is_wanted and was_told  # wanted again while it was leaving
            self._notices.append(f"{name} has left" + ("; it was not done in time" if is_overdue else ""))
            return None
        if REFUSED_CODE in codes:
            return Verdict(Ending.REFUSED, name, _last_words(logs) or f"{name} refused to run; see {logs[0][0]}")
        if slot.program.ends_run and set(codes) == {0}:
            return Verdict(Ending.ENDED, name, f"{name} was stopped")
        if self._clock() - slot.started_at >= HEALTHY_S:
            slot.crashes = 0
        slot.crashes += 1
        how = f"{_how_it_ended(codes, logs)}; see {logs[0][0]}"
        if slot.crashes > MAX_CRASHES:
            return Verdict(Ending.GIVEN_UP, name, f"{name} must stay up, got {slot.crashes} crashes in a row: {how}")
        self._notices.append(f"{name} ended and is started again: {how}")
        slot.restarts += 1
        slot.restart_at = self._clock() + min(FIRST_PAUSE_S * 2 ** (slot.crashes - 1), LONGEST_PAUSE_S)
        return None

    def _end(self, slot: _Slot) -> None:
        """Kill what is left of a group, then reap it. Its leader is reaped last: until then nobody gets its number."""
        group = slot.group
        warden.kill_group(group)
        for process in reversed(slot.processes):
            process.wait(KILLED_WAIT_S)
        self._tell_warden(f"-{group}\n")
        slot.processes, slot.logs, slot.kill_at = [], [], None

    def _tell_warden(self, line: str) -> None:
        assert self._warden is not None
        assert self._warden.stdin is not None
        try:
            self._warden.stdin.write(line.encode())
            self._warden.stdin.flush()
        except BrokenPipeError:  # somebody killed it: the leash still holds, and the run is worth more
            return


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Exit code (negative: the signal) of a process that has ended, without reaping it; None while it runs."""
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _how_it_ended(codes: Sequence[int], logs: Sequence[tuple[Path, int]]) -> str:
    """`killed by SIGKILL`, or the exit code with what the program said last: the end of a traceback, as a rule."""
    code = codes[0]
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    words = shorten(_last_words(logs), LONGEST_WORDS, placeholder="...") if code else ""
    return f"exit code {code}: {words}" if words else f"exit code {code}"


def _last_words(logs: Sequence[tuple[Path, int]]) -> str:
    """What a program said last: `specrl-trainer: ...` and the indented lines below; else its last line.

    What follows the message is the noise of libraries that are torn down.
    """
    last_line = ""
    for path, offset in logs:
        with path.open("rb") as log:
            log.seek(offset)
            lines = log.read().decode(errors="replace").rstrip().splitlines()
        starts = [number for number, line in enumerate(lines) if _MESSAGE.match(line)]
        if starts:
            first, *rest = lines[starts[-1] :]
            details = takewhile(lambda line: line.startswith(" "), rest)
            return "\n".join([_MESSAGE.sub("", first), *details])
        last_line = last_line or (lines[-1] if lines else "")
    return last_line
