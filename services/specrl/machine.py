"""What this machine leaves to a process: its main memory, in a container no more than the container's limit.

Read by the launcher before a run, by a generation engine and by the trainer before they load a model. Each of them says
what is too large, and what to do about it. Nothing here fails: what cannot be read sets no limit.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from specrl.files import read_text

CGROUP = Path("/sys/fs/cgroup")
"""Where a container finds its own limits, with cgroup v2 and v1 alike."""


@dataclass(frozen=True)
class _Files:
    """Paths below CGROUP. cache: the name, in `stat`, of file content that the kernel can drop at once."""

    limit: str
    usage: str
    stat: str
    cache: str


# Linux's Documentation/admin-guide: cgroup-v2.rst, "Memory Interface Files", and cgroup-v1/memory.rst, section 5.
# Without a limit v2 says `max`, and v1 says the largest number that its counter can hold.
_VERSIONS = (
    _Files("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _Files(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory_bytes(cgroup: Path | None = None) -> int:
    """Memory that can be had without swapping: the machine's, or less where the container's limit leaves less.

    cgroup: for tests; CGROUP without one.
    """
    available = int(psutil.virtual_memory().available)
    for files in _VERSIONS:
        limit = _number(cgroup or CGROUP, files.limit)
        if limit is not None:
            available = min(available, max(0, limit - _used_bytes(cgroup or CGROUP, files)))
    return available


def _used_bytes(cgroup: Path, files: _Files) -> int:
    """What counts against the limit, without the cache of files, which the kernel drops before it refuses memory.

    psutil counts that cache as available, too; kubelets subtract the same number.
    """
    usage = _number(cgroup, files.usage) or 0
    try:
        stat = dict(line.split(maxsplit=1) for line in read_text(cgroup / files.stat).splitlines())
        cache = int(stat[files.cache])
    except (OSError, ValueError, KeyError):
        cache = 0
    return max(0, usage - max(0, cache))


def _number(cgroup: Path, file: str) -> int | None:
    """The number in a file, not negative; None for `max`, for anything else, and for a file that cannot be read."""
    try:
        found = int(read_text(cgroup / file))
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None
