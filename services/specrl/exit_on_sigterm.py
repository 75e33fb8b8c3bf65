"""Ends a container's first process at SIGTERM, until the process has a handler of its own. Imported first by each role.

The kernel drops a signal that the first process of a container has no handler for. A pod that was deleted while it
imported its packages, which takes minutes on a busy machine, therefore stayed for its whole grace period. Elsewhere
SIGTERM ends a process by itself, and this module does nothing.

asyncio's handlers replace this one. Nothing has to be saved before they do.
"""

import os
import signal
from types import FrameType


def _exit(number: int, _: FrameType | None) -> None:
    os._exit(128 + number)  # as a shell reports it; sys.exit would wait for threads that importing has started


if os.getpid() == 1:
    signal.signal(signal.SIGTERM, _exit)
