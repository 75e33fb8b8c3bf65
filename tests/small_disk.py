"""A file system that is small enough to be filled."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.requirements import MOUNTS


@contextmanager
def mount_small_disk(place: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of `size` at `place` while the context lasts. Skips the test without the right to mount."""
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)],
        capture_output=True,
        check=False,
        timeout=30,
    )
    if mounted.returncode:
        MOUNTS.skip("no tmpfs can be mounted")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)
