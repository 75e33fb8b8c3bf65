"""Outlives the supervisor by a moment, and kills what the supervisor left behind.

    python warden.py < PIPE

The supervisor holds the writing end of the pipe and says which process groups are its own (`+GROUP`, `-GROUP`). However
the supervisor ends, SIGKILL included, the kernel closes the pipe: the warden then kills every group still on the list.
The leash kills the direct children; this gets theirs too (an engine's worker processes). Without imports of specrl, so
that it costs nothing.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterable


def kill_group(group: int) -> None:
    """Kill every process of a group; one that is gone already is no error."""
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):  # macOS answers EPERM for a group of zombies
        return


def watch(lines: Iterable[str]) -> None:
    """Keep the list until the lines end, then kill what is on it."""
    groups: set[int] = set()
    for line in lines:
        group = int(line[1:])
        (groups.add if line[0] == "+" else groups.discard)(group)
    for group in groups:
        kill_group(group)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # only the end of the pipe ends it
    watch(sys.stdin)
