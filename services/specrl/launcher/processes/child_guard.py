"""Kills the processes that a supervisor started when the supervisor itself dies, even by SIGKILL.

    python child_guard.py exec PARENT_PID PROGRAM ARGUMENT...
    python child_guard.py watch < PIPE

`exec` asks the kernel to kill this process when its parent dies, then becomes the program. The process id stays the
same, so the parent waits for the program itself. A `preexec_fn` would do the same, but is unsafe in a process with
threads. The kernel ties the signal to the *thread* that started the child: start children from the main thread.
Linux only.

`watch` also covers the children of programs (an engine's worker processes), and works on every platform. The
supervisor holds the writing end of the pipe and lists its process groups there (`+GROUP`, `-GROUP`). When the
supervisor ends, the kernel closes the pipe, and `watch` kills every group that is still on the list.

This file is a script that imports nothing from specrl. It runs before every process of a run, so it must start within
milliseconds.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterable, Sequence

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def guarded_command(arguments: Sequence[str]) -> list[str]:
    """Return the command line of a program that dies with this process. Start it from the main thread."""
    return [*_script_command(), "exec", str(os.getpid()), *arguments]


def watcher_command() -> list[str]:
    """Return the command line of the watcher, which reads this process's groups from its stdin."""
    return [*_script_command(), "watch"]


def kill_group(group: int) -> None:
    """Kill every process of a group. A group that is gone already is not an error."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return


def become_program(parent: int, program: list[str]) -> None:
    """Set the death signal, check that the parent still lives, and become the program.

    Exits with 2 when the program cannot be started, as for any mistake of the user's.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    # The parent may have died before prctl took effect; the kernel then sends no signal.
    if os.getppid() != parent:
        sys.exit(1)
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(
            f"error: {program[0]} must be installed and executable, got {error.strerror}; run `make setup`\n"
        )
        sys.exit(2)


def watch_groups(lines: Iterable[str]) -> None:
    """Follow the list until the pipe closes, then kill every group that is still on it."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the pipe may end the watcher
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        kill_group(group)


def _script_command() -> list[str]:
    # -I ignores PYTHON* variables and user paths; -S skips `site`. Both keep the start within milliseconds.
    return [sys.executable, "-I", "-S", __file__]


if __name__ == "__main__":
    if sys.argv[1] == "exec":
        become_program(int(sys.argv[2]), sys.argv[3:])
    else:
        watch_groups(sys.stdin)
