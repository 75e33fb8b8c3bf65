"""Programs that keep a processor busy, for tests of time limits under load."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

SPINS = "echo spins; while :; do :; done"


@contextmanager
def occupy_processor(count: int, beside: int | None = None) -> Iterator[None]:
    """Run programs that never sleep. Meanwhile they share one processor with this process and its children.

    beside: id of another process that is bound to a single processor. All programs run when the block begins. Each has
    its own session, because the kernel may share a processor by sessions.
    """
    with ExitStack() as started:
        for process in [0] if beside is None else [0, beside]:
            before = os.sched_getaffinity(process)
            started.callback(os.sched_setaffinity, process, before)
            os.sched_setaffinity(process, {min(before)})
        for _ in range(count):
            hog = subprocess.Popen(["sh", "-c", SPINS], stdout=subprocess.PIPE, start_new_session=True)
            started.enter_context(hog)
            started.callback(hog.kill)
            assert hog.stdout is not None
            assert hog.stdout.readline() == b"spins\n"
        yield


WAIT_FOR_PROCESSOR = """
import time
began = time.monotonic() - time.process_time()
while time.monotonic() - time.process_time() < began + {seconds}:
    pass
"""
"""A Python program that runs until it has waited `seconds` for a processor: its wall time minus its CPU time.

The busier the machine, the less CPU time it uses. With COUNT other programs on its processor it uses 1/COUNT of the
seconds.
"""
