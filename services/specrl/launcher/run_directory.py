"""The folder of one run: where everything lies, how it comes to be, and who may drive it.

    runs/NAME-1/
      run.yaml        the resolved run file                    launcher; coordinator, when it is scaled
      endpoints.json  addresses of the coordinator             coordinator, at each start
      token           what lets this machine's user act on it  coordinator, at each start
      status.json     the last phase and, at the end, summary  coordinator, at each change
      metrics.jsonl   one line a step                          coordinator
      validations.jsonl  one line a validation                 coordinator
      origin.json     versions and machine, at each start      coordinator
      references.json references that the run does without     launcher, coordinator
      store.db        progress, unless it is kept in Redis     coordinator
      store-id        the run's id, for a store that it shares coordinator
      checkpoints/, export/                                    trainer
      logs/NAME.log   one a process                            launcher
      lock            held by the launcher that drives the run

Invariants: a folder appears under its name whole, with its run file, or not at all; one launcher at a time drives it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specrl.errors import RunInvalid
from specrl.files import write_text
from specrl.spec import RunSpec, dump

RUN_FILE = "run.yaml"
LOCK_ATTEMPTS = 5


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def run_file(self) -> Path:
        return self.path / RUN_FILE

    @property
    def endpoints_file(self) -> Path:
        return self.path / "endpoints.json"

    @property
    def status_file(self) -> Path:
        return self.path / "status.json"

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def validations_file(self) -> Path:
        return self.path / "validations.jsonl"

    @property
    def origin_file(self) -> Path:
        return self.path / "origin.json"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Drive this run alone. The kernel frees the lock when the process ends, however it ends. Raises RunInvalid."""
        with self.lock_file.open("a") as file:
            if not any(_locked(file) for _ in range(LOCK_ATTEMPTS)):
                raise RunInvalid(
                    f"a run must be driven by one launcher, got run={self.path} driven by another; "
                    f"stop that one, or look on with `specrl status {self.path}`"
                )
            os.utime(self.lock_file)  # `newest` goes by it
            yield

    def is_driven(self) -> bool:
        """Whether a launcher holds the lock at this moment."""
        try:
            with self.lock_file.open() as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        return False

    def write_run_file(self, spec: RunSpec) -> None:
        """Replace the run file, in one piece."""
        write_text(self.run_file, dump(spec), is_synced=True)


def create(runs: Path, spec: RunSpec) -> RunDirectory:
    """Make `runs/<name>-<n>` with the next n, holding the run file. Two at once get two numbers. Raises RunInvalid."""
    try:
        runs.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=".new-", dir=runs))
    except OSError as error:
        raise RunInvalid(
            f"runs must be a writable folder, got runs={runs}: {error.strerror}; pass --runs DIR"
        ) from error
    try:
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide the run from other users
        directory = RunDirectory(unfinished)
        directory.logs.mkdir()
        directory.lock_file.touch()
        directory.write_run_file(spec)
        number = 1 + max(_numbers(runs, spec.name), default=0)
        while not _renamed(unfinished, runs / f"{spec.name}-{number}"):
            number += 1
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return RunDirectory((runs / f"{spec.name}-{number}").resolve())


def find(run: str, runs: Path) -> RunDirectory:
    """The run of that path or, below `runs`, of that name. Raises RunInvalid."""
    for path in (runs / run, Path(run)):
        if (path / RUN_FILE).is_file():
            return RunDirectory(path.resolve())
    known = ", ".join(sorted(path.parent.name for path in runs.glob(f"*/{RUN_FILE}"))) or "none"
    raise RunInvalid(f"a run must be a run directory or the name of one in {runs}, got run={run}; runs there: {known}")


def newest(runs: Path) -> RunDirectory:
    """The run that was driven last. Raises RunInvalid when there is none."""
    locks = [path.parent / "lock" for path in runs.glob(f"[!.]*/{RUN_FILE}") if (path.parent / "lock").is_file()]
    if not locks:
        raise RunInvalid(f"there must be a run in {runs}, got none; start one with `specrl run` or pass --runs DIR")
    return RunDirectory(max(locks, key=lambda lock: lock.stat().st_mtime_ns).parent.resolve())


def _locked(file: IO[str]) -> bool:
    """Try for the lock. `is_driven` holds it for an instant when it looks, so one failure proves nothing."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.02)
        return False
    return True


def _numbers(runs: Path, name: str) -> Iterator[int]:
    for path in runs.iterdir():
        match = re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name)
        if match is not None:
            yield int(match[1])


def _renamed(source: Path, target: Path) -> bool:
    """Rename a folder onto a name that is free. False when somebody else has just taken it."""
    try:
        source.rename(target)  # atomic, and refused when the target has anything in it; a run always has
    except OSError:
        if target.exists():
            return False
        raise
    return True
