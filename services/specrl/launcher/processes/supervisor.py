"""Keeps the processes of one run alive and leaves none behind. It plays the operator's role on one machine.

Each program (coordinator, a replica, the trainer with all its ranks) is one process group:

    WAITING --start--> RUNNING --any rank ends--> the whole group is killed, then
                          exit 2 (a mistake of the user's)     -> REFUSED: the run ends with the program's message
                          exit 0 of the coordinator            -> INTERRUPTED: someone stopped the run through it
                          exit 0 of a replica                  -> LEFT: it drained; stays away until wanted again
                          more than MAX_CRASHES in a row       -> FAILED: the run ends
                          a replica, with the same message or signal MAX_EQUAL_FAILURES times in a row
                              -> GIVEN UP: it stays away; if it was the last replica, FAILED: the run ends
                          anything else                        -> WAITING for a backoff that doubles, then RUNNING
    RUNNING --retire--> SIGTERM, SIGKILL after its grace period --any end--> LEFT

"In a row" means that the program did nothing useful between: it lasted less than SERVED_S, and `local_run` has called
neither `forget_crashes`, as it does after a trained step, nor `forget_equal_failures`, as it does for serving replicas.

No method blocks: `poll` looks once; `begin_stop` and `poll_stop` stop everything, the coordinator first. A program's
`grace_s` bounds every wait of a stop; what is still alive then is killed. Call it from the main thread (child_guard.py
says why). Called by `launcher.local_run`.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from textwrap import shorten
from typing import IO

from specrl.files import PRIVATE_UMASK
from specrl.formats.reports import StatusReport
from specrl.launcher.processes import child_guard

# Exit code of a process of ours that refuses to run until the user has changed something.
REFUSED_CODE = 2

MAX_CRASHES = 5
# A replica's start takes minutes, so one that ends again and again with the same message is not started six times.
MAX_EQUAL_FAILURES = 3
SERVED_S = 1800.0  # longer than most starts; a program that lasted longer counts as one that has served

# Backoff before a restart: 0.5, 1, 2, 4, 8 and then 10 seconds.
FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 10.0

# For a killed process to be reaped. Longer only if the kernel cannot end it, as in uninterruptible I/O.
REAP_TIMEOUT_S = 10.0

SIGNAL = "signal "  # how the description of a program's end begins that a signal has ended

MAX_MESSAGE_CHARS = 300  # characters of a crash's last line in a notice; the log has the rest

# An engine core logs its error in its own process, in vLLM's format. Our message only points to the log above.
_SEE_LOG_ABOVE = "see the log above for the engine core's error"
_ENGINE_ERROR = re.compile(r"ERROR .*?\] ([\w.]*(?:Error|Exception)\b.*)")

# How our processes, and child_guard, begin the message with which they end.
_MESSAGE = re.compile(r"(error|specrl-[a-z]+): ")


@dataclass(frozen=True)
class Rank:
    """One operating-system process of a program."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Program:
    """A program that is kept running. `ranks` is called at every start, so that a restart can use fresh ports.

    stop_order: programs with a lower number have exited before those with a higher number receive SIGTERM.
    grace_s: seconds between SIGTERM and SIGKILL.
    ends_run: exit code 0 ends the run. may_leave: exit code 0 means that the program was retired and has drained.
    Exit code 0 of any other program counts as a crash.
    """

    name: str
    ranks: Callable[[], Sequence[Rank]]
    stop_order: int = 1
    grace_s: float = 15.0
    ends_run: bool = False
    may_leave: bool = False


class RunEnd(StrEnum):
    """How a launch of a run ended. REFUSED: every launch would end like this until the user has changed something."""

    FINISHED = "finished"
    FAILED = "failed"
    REFUSED = "refused"
    INTERRUPTED = "interrupted"

    @property
    def exit_code(self) -> int:
        """Exit code of the command that launched the run."""
        # 2 as for wrong usage; 130 is 128 + SIGINT, as shells report it.
        return {RunEnd.FINISHED: 0, RunEnd.FAILED: 1, RunEnd.REFUSED: 2, RunEnd.INTERRUPTED: 130}[self]


@dataclass(frozen=True)
class RunOutcome:
    """How a launch ended. message: what to tell the user; empty after a successful end.

    status: the last one of the coordinator that is known.
    """

    end: RunEnd
    message: str = ""
    status: StatusReport | None = None


@dataclass
class _ProgramState:
    """The processes of one program.

    logs: (path, offset at which this start's output begins). crashes: in a row.
    kill_at: deadline on the supervisor's clock after SIGTERM; None: it was not told to end. is_wanted: keep it running.
    last_failure: how its last start ended, and equal_failures: how many starts in a row have ended like that.
    given_up: why it is started no more; empty otherwise.
    """

    program: Program
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    logs: list[tuple[Path, int]] = field(default_factory=list)
    started_at: float = 0.0
    restart_at: float = 0.0
    crashes: int = 0
    kill_at: float | None = None
    is_wanted: bool = True
    last_failure: str = ""
    equal_failures: int = 0
    given_up: str = ""

    @property
    def process_group(self) -> int:
        return self.processes[0].pid  # rank 0 leads the group


class Supervisor:
    """Supervises the programs of one run. Use it as a context manager; leaving it kills everything."""

    def __init__(self, programs: Sequence[Program], clock: Callable[[], float] = time.monotonic) -> None:
        self._slots = [_ProgramState(program) for program in programs]
        self._clock = clock
        self._notices: list[str] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._stopping: int | None = None

    def __enter__(self) -> Supervisor:
        self._guard = subprocess.Popen(child_guard.watcher_command(), stdin=subprocess.PIPE, process_group=0)
        return self

    def __exit__(self, *_: object) -> None:
        """Kill every program, then end the guard."""
        self.kill_all()
        assert self._guard is not None
        self._guard.communicate(timeout=REAP_TIMEOUT_S)  # closes its stdin, which ends it

    def poll(self) -> RunOutcome | None:
        """Start the programs that are due and look at those that ended.

        Returns how the run ended, without its status, when no restart of a program would help.
        """
        for slot in self._slots:
            if slot.processes:
                end = self._check_program(slot)
                if end is not None:
                    return end
            if not slot.processes and slot.is_wanted and self._clock() >= slot.restart_at:
                self._start_program(slot)
        return None

    @property
    def given_up(self) -> dict[str, str]:
        """Why replicas are started no more, by name."""
        return {slot.program.name: slot.given_up for slot in self._slots if slot.given_up}

    def forget_equal_failures(self, replicas: Collection[str]) -> None:
        """Count equal failures anew for these replicas: their start has succeeded."""
        for slot in self._slots:
            if slot.program.name in replicas:
                slot.equal_failures = 0

    def forget_crashes(self, replicas: Collection[str]) -> None:
        """Count crashes anew for these replicas and for all other programs: they have trained a step together."""
        for slot in self._slots:
            if not slot.program.may_leave or slot.program.name in replicas:
                slot.crashes = 0

    def keep_running(self, program: Program) -> None:
        """Keep a program running from the next poll on. A program that has left, or is leaving, comes back."""
        slot = next((slot for slot in self._slots if slot.program.name == program.name), None)
        if slot is None:
            self._slots.append(_ProgramState(program))
        elif not slot.is_wanted:
            slot.is_wanted = True
            slot.crashes = 0
            slot.equal_failures = 0
            slot.given_up = ""
            slot.restart_at = 0.0

    def retire_program(self, name: str, grace_s: float) -> None:
        """Send a program SIGTERM and do not restart it; kill it after `grace_s`. Idempotent."""
        for slot in self._slots:
            if slot.program.name != name:
                continue
            slot.given_up = ""
            if slot.is_wanted:
                slot.is_wanted = False
                if slot.processes:
                    self._terminate_ranks(slot, grace_s)

    def begin_stop(self) -> None:
        """Send SIGTERM to the programs that stop first. Idempotent. No program is restarted from here on."""
        if self._stopping is None:
            self._stop_next()

    def poll_stop(self) -> bool:
        """Reap programs that ended, kill those past their deadline, and stop the next ones.

        Returns whether everything is down.
        """
        assert self._stopping is not None
        for slot in self._slots:
            if not slot.processes:
                continue
            is_overdue = slot.kill_at is not None and self._clock() >= slot.kill_at
            if is_overdue or all(_exit_code(process) is not None for process in slot.processes):
                self._kill_and_reap(slot)
        if not any(slot.processes for slot in self._slots if slot.program.stop_order <= self._stopping):
            self._stop_next()
        return not any(slot.processes for slot in self._slots)

    def kill_all(self) -> None:
        """Kill every process group at once."""
        for slot in self._slots:
            if slot.processes:
                self._kill_and_reap(slot)

    def take_notices(self) -> list[str]:
        """Return messages about what happened since the last call, and forget them."""
        taken = self._notices
        self._notices = []
        return taken

    def _stop_next(self) -> None:
        alive = [slot for slot in self._slots if slot.processes]
        # maxsize: nothing is alive any more, so that `poll_stop` reports the end.
        self._stopping = min((slot.program.stop_order for slot in alive), default=sys.maxsize)
        for slot in alive:
            if slot.program.stop_order == self._stopping:
                self._terminate_ranks(slot, slot.program.grace_s)

    def _terminate_ranks(self, slot: _ProgramState, grace_s: float) -> None:
        """Send SIGTERM to every rank and set the deadline. A rank must end its own children itself."""
        slot.kill_at = self._clock() + grace_s
        for process in slot.processes:
            # Popen.send_signal would reap a rank that has ended, which `_exit_code` still looks at.
            if _exit_code(process) is None:
                os.kill(process.pid, signal.SIGTERM)

    def _start_program(self, slot: _ProgramState) -> None:
        slot.started_at = self._clock()
        for rank in slot.program.ranks():
            rank.log.parent.mkdir(parents=True, exist_ok=True)
            with rank.log.open("ab") as log:
                # Logs are appended to. The offset is where the output of this start begins.
                slot.logs.append((rank.log, log.tell()))
                slot.processes.append(self._spawn_rank(rank, log, slot.process_group if slot.processes else 0))
            if len(slot.processes) == 1:
                self._write_to_guard(f"+{slot.process_group}\n")

    def _spawn_rank(self, rank: Rank, log: IO[bytes], group: int) -> subprocess.Popen[bytes]:
        """Start one rank in the program's process group (0: a new group)."""
        return subprocess.Popen(
            child_guard.guarded_command(rank.arguments),
            env=dict(rank.environment),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            # In its own process group, the rank does not get the terminal's Ctrl-C: the launcher orders the stop.
            process_group=group,
            umask=PRIVATE_UMASK,  # what the run writes is for its owner alone
        )

    def _check_program(self, slot: _ProgramState) -> RunOutcome | None:
        codes = [code for code in map(_exit_code, slot.processes) if code is not None]
        is_overdue = slot.kill_at is not None and self._clock() >= slot.kill_at
        if not codes and not is_overdue:
            return None
        name = slot.program.name
        logs = slot.logs
        log = logs[0][0]
        # Read everything from the slot before the group is reaped, which clears it.
        was_told = slot.kill_at is not None
        self._kill_and_reap(slot)
        if was_told or (slot.program.may_leave and set(codes) == {0}):
            slot.is_wanted = slot.is_wanted and was_told  # True if it was wanted again while it was leaving
            self._notices.append(f"{name} left" + ("; killed, since it did not end in time" if is_overdue else ""))
            return None
        if REFUSED_CODE in codes:
            # A restart would end alike. The program has logged what the user must change.
            return RunOutcome(RunEnd.REFUSED, _find_last_message(logs) or f"{name} refused to run; see {log}")
        if slot.program.ends_run and set(codes) == {0}:
            return RunOutcome(RunEnd.INTERRUPTED, f"{name} was stopped")
        lasted_s = self._clock() - slot.started_at
        how = _describe_exit(codes, logs)
        if slot.program.may_leave and _count_equal_failure(slot, how, lasted_s) >= MAX_EQUAL_FAILURES:
            return self._give_up(slot, how, log)
        if lasted_s >= SERVED_S:
            slot.crashes = 0
        slot.crashes += 1
        if slot.crashes > MAX_CRASHES:
            message = f"{name} crashed {slot.crashes} times in a row, last with {how}; see {log}"
            return RunOutcome(RunEnd.FAILED, message)
        self._notices.append(f"{name} ended with {how}; restarting it; see {log}")
        slot.restart_at = self._clock() + min(FIRST_BACKOFF_S * 2 ** (slot.crashes - 1), MAX_BACKOFF_S)
        return None

    def _give_up(self, slot: _ProgramState, how: str, log: Path) -> RunOutcome | None:
        """Start a replica no more. Returns how the run ended if no replica is left.

        Otherwise the launcher tells the coordinator, whose status then says it.
        """
        slot.is_wanted = False
        slot.given_up = f"it failed {MAX_EQUAL_FAILURES} times in a row with {how}; see {log}"
        if any(other.is_wanted for other in self._slots if other.program.may_leave):
            return None
        return RunOutcome(RunEnd.FAILED, f"{slot.program.name} is given up: {slot.given_up}")

    def _kill_and_reap(self, slot: _ProgramState) -> None:
        """Kill the remaining processes of a group and reap them.

        The leader is reaped last: until then the kernel cannot reuse its process id, which is the group's id.
        """
        group = slot.process_group
        child_guard.kill_group(group)
        for process in reversed(slot.processes):
            process.wait(REAP_TIMEOUT_S)
        self._write_to_guard(f"-{group}\n")
        slot.processes = []
        slot.logs = []
        slot.kill_at = None

    def _write_to_guard(self, line: str) -> None:
        assert self._guard is not None
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(line.encode())
            self._guard.stdin.flush()
        except BrokenPipeError:
            # Something killed the guard. The run goes on: the kernel still kills programs when this process dies.
            return


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    """Return the exit code of a process, or the negative signal number, without reaping it; None while it runs."""
    # WNOWAIT leaves a zombie: the process id, which is the group's id, must not be reused before the group is killed.
    result = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if result is None:
        return None
    return result.si_status if result.si_code == os.CLD_EXITED else -result.si_status


def _count_equal_failure(slot: _ProgramState, how: str, lasted_s: float) -> int:
    """Count how many starts of a replica in a row have ended like this, before it had served.

    An exit code without a message is not counted: it says nothing about the cause.
    """
    says_cause = ": " in how or how.startswith(SIGNAL)
    is_equal = how == slot.last_failure and lasted_s < SERVED_S
    slot.equal_failures = (slot.equal_failures + 1 if is_equal else 1) if says_cause else 0
    slot.last_failure = how
    return slot.equal_failures


def _describe_exit(codes: Sequence[int], logs: Sequence[tuple[Path, int]]) -> str:
    """Describe the end of a program: `signal SIGKILL`, or `exit code 1` with the last message in its log."""
    code = codes[0]
    if code < 0:
        return f"{SIGNAL}{signal.Signals(-code).name}"
    words = shorten(_find_last_message(logs), MAX_MESSAGE_CHARS, placeholder="...") if code else ""
    return f"exit code {code}: {words}" if words else f"exit code {code}"


def _find_last_message(logs: Sequence[tuple[Path, int]]) -> str:
    """Return the message with which a program ended: `specrl-trainer: ...` with its indented lines, else the last line.

    Lines after that message are skipped: libraries log them while they shut down.
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
            message = "\n".join([_MESSAGE.sub("", first), *details])
            causes = [match[1] for line in lines if (match := _ENGINE_ERROR.search(line))]
            return f"vLLM failed to start: {causes[-1]}" if causes and _SEE_LOG_ABOVE in message else message
        last_line = last_line or (lines[-1] if lines else "")
    return last_line
