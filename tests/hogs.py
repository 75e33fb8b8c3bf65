"""Programs that take a processor away, and what is left of it for others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

SPINS = "echo spins; while :; do :; done"


@contextmanager
def hogs(count: int) -> Iterator[None]:
    """Programs that never sleep, on the one processor that this process and what it starts may use meanwhile.

    All of them spin when the block begins. Each has a session of its own, since the kernel may share a processor out by
    sessions.
    """
    before = os.sched_getaffinity(0)
    with ExitStack() as started:
        started.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {min(before)})
        for _ in range(count):
            hog = subprocess.Popen(["sh", "-c", SPINS], stdout=subprocess.PIPE, start_new_session=True)
            started.enter_context(hog)
            started.callback(hog.kill)
            assert hog.stdout is not None
            assert hog.stdout.readline() == b"spins\n"
        yield


WAITS = """
import time
began = time.monotonic() - time.process_time()
while time.monotonic() - time.process_time() < began + {seconds}:
    pass
"""
"""Runs until it has waited so long for a processor, by its own clocks: past any limit of less, whatever the load.

The busier the machine, the less of a processor it takes. Beside COUNT hogs it takes a COUNTth of the seconds.
"""
