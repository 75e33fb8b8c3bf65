"""Runs other programs, and says what is going on."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class ImagesFailed(Exception):
    """No images can be built; the message says what to do."""


def run(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
    """Run a command, its output shown. Raises ImagesFailed if it fails."""
    _check_status(command, subprocess.run(command, cwd=cwd, env=env, check=False).returncode)


def run_and_read(*command: str | Path) -> str:
    """Run a command, its output shown. Returns the output. Raises ImagesFailed if it fails."""
    lines = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as running:
        assert running.stdout is not None
        for line in running.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    _check_status(command, running.returncode)
    return "".join(lines)


def _check_status(command: Sequence[str | Path], status: int) -> None:
    if status != 0:
        raise ImagesFailed(f"`{' '.join(map(str, command))[:300]}` failed with exit status {status}; see above")


def read_output(*command: str | Path, cwd: Path | None = None, env: Mapping[str, str] | None = None) -> str:
    """Return what a command writes to standard output. Raises ImagesFailed if it fails."""
    done = subprocess.run(command, cwd=cwd, env=env, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        raise ImagesFailed(
            f"`{' '.join(map(str, command))[:300]}` failed with exit status {done.returncode}: {done.stderr}"
        )
    return done.stdout.strip()


def has_succeeded(*command: str | Path) -> bool:
    """Whether a program is there and ends with 0."""
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def check_disk(folder: Path, needed_gb: float) -> None:
    """Raises ImagesFailed where less than this is free."""
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise ImagesFailed(
            f"the disk of {folder} must have {needed_gb:.0f} GB free, got {free_gb:.1f} GB; free some space, or name "
            "another folder in SPECRL_CACHE_DIR"
        )


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Keep other builds out of a folder, be they of another checkout. Waits for one that is there."""
    with (folder / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another build, which uses {folder}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def say(text: str) -> None:
    """Print a line among the output of other programs."""
    print(f"images: {text}", flush=True)


@contextmanager
def step(text: str) -> Iterator[None]:
    """Announce a step, and how long it took."""
    say(text)
    began_s = time.monotonic()
    yield
    say(f"  {time.monotonic() - began_s:.1f} s")
    sys.stdout.flush()
