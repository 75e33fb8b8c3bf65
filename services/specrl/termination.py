"""A process's last words: the error that ends it, as one line on standard error and, in a pod, as its message.

Kubernetes shows the content of TERMINATION_LOG in the container's status, where the operator reads why a job failed.
Without it, the kubelet takes the end of the log, whose last lines are often of libraries.

Called by the main functions of coordinator, trainer and replicas, and by `specrl fetch`.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from specrl.errors import SpecrlError

TERMINATION_LOG = "/dev/termination-log"
"""File that the kubelet mounts into every container. It does not exist elsewhere."""
MAX_BYTES = 4096
"""The kubelet reads no more."""
NEEDS_USER = 2
"""Exit code of an error that a restart would repeat until the user repairs something (`SpecrlError.exit_code`)."""


def report_error(program: str, error: SpecrlError, path: str = TERMINATION_LOG) -> None:
    """Print the error that ends this process, and make it the message of its container, if it runs in one."""
    sys.stderr.write(f"{program}: {error}\n")
    record_error(program, error, path)


def record_error(program: str, error: SpecrlError, path: str = TERMINATION_LOG) -> None:
    """Make the error that ends this process the message of its container, if it runs in one."""
    text = f"{program}: {error}"
    file = Path(path)
    with suppress(OSError):  # no such file outside of a container
        # The ranks of a trainer share it. A rank that only lost another must not replace what the other refused.
        is_empty = file.stat().st_size == 0
        if is_empty or error.exit_code == NEEDS_USER:
            file.write_bytes(text.encode()[:MAX_BYTES])
