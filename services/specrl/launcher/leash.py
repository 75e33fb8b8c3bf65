"""Becomes the program it is given, after asking the kernel to kill that program when its parent dies.

    python leash.py PARENT_PID PROGRAM ARGUMENT...

A script of its own, without imports of specrl: it runs before every process of a run, so it must start in
milliseconds, and `exec` keeps its process id, so the supervisor waits for the program itself. (A `preexec_fn` would
do the same, but is unsafe in a process with threads.) The kernel ties the signal to the *thread* that started the
child: the supervisor must start children from its main thread. Linux only; elsewhere the warden alone guards.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main() -> None:
    """Set the death signal, check that the parent is still there, become the program. Exit 2: it cannot be started."""
    parent, program = int(sys.argv[1]), sys.argv[2:]
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel knew
        sys.exit(1)
    try:
        os.execvp(program[0], program)  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.exit(_refuse(program[0], error))


def _refuse(program: str, error: OSError) -> int:
    sys.stderr.write(f"error: {program} must be installed and executable, got {error.strerror}; run `make setup`\n")
    return 2


if __name__ == "__main__":
    main()
