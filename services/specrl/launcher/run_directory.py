"""The folder of one run: where each file is, how the folder is created, and who may run it.

    runs/NAME-1/
      file               content                               written by
      run.yaml           the resolved run file                 launcher; coordinator, when the run is scaled
      endpoints.json     addresses of the coordinator          coordinator, at each start
      token              credential of the run                 launcher, at each launch
      status.json        the last status, later the summary    coordinator, at each change
      outcome.json       how the last launch ended             launcher, at its end
      metrics.jsonl      one line per step                     coordinator
      validations.jsonl  one line per validation               coordinator
      rollouts.jsonl     a few rollouts of each step           coordinator
      rollouts.old.jsonl those of earlier steps                coordinator
      timeline.jsonl     timeline of the last steps            coordinator
      origin.json        versions and machine                  coordinator, at each start
      sources.json       models and data fetched by name       launcher
      references.json    references that the run leaves out    launcher, coordinator
      store.db           progress, unless Redis holds it       coordinator
      store-id           the run's id in a shared store        coordinator
      draft-costs/       step costs by draft length            coordinator, for its replicas
      checkpoints/, export/                                    trainer
      logs/NAME.log      one file per process                  launcher
      lock               held while a launcher runs the run    launcher

Invariants: a folder appears under its name complete, with its run file and the checkpoint that the run starts from, or
not at all. Only its owner can use it, and each file in it, whatever the umask. One launcher at a time holds the lock.
The launcher and most commands use this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from specrl.errors import RunInvalid
from specrl.files import open_regular, private_umask, take_from_others, write_text
from specrl.rpc.run_token import TOKEN_FILE
from specrl.spec import RunSpec, dump_spec

RUN_FILE = "run.yaml"
LOCK_FILE = "lock"
UNFINISHED = ".new-"
"""How the name of a folder begins that `create_run` fills. No run has such a name."""

# Five attempts, 20 ms apart: `has_launcher` of another process holds the lock for an instant only.
LOCK_ATTEMPTS = 5


class _PathBelow:
    """An attribute of RunDirectory: the path of one of the run's files or folders."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, directory: RunDirectory, _: type[RunDirectory]) -> Path:
        return directory.path / self._name


@dataclass(frozen=True)
class RunDirectory:
    """Paths of one run's files, and its lock."""

    path: Path

    run_file = _PathBelow(RUN_FILE)
    endpoints_file = _PathBelow("endpoints.json")
    status_file = _PathBelow("status.json")
    outcome_file = _PathBelow("outcome.json")
    metrics_file = _PathBelow("metrics.jsonl")
    validations_file = _PathBelow("validations.jsonl")
    rollouts_file = _PathBelow("rollouts.jsonl")
    older_rollouts_file = _PathBelow("rollouts.old.jsonl")
    origin_file = _PathBelow("origin.json")
    logs_folder = _PathBelow("logs")
    lock_file = _PathBelow(LOCK_FILE)
    token_file = _PathBelow(TOKEN_FILE)

    @property
    def name(self) -> str:
        return self.path.name

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Hold the run's lock, which only one launcher can. Raises RunInvalid when another process holds it.

        It also raises RunInvalid when the lock cannot be taken, as on a read-only disk. The kernel releases the lock
        when this process ends, even if it is killed.
        """
        with self.report_unwritable():
            file = self.lock_file.open("a")
        with file:
            with self.report_unwritable():
                if not any(_try_lock(file) for _ in range(LOCK_ATTEMPTS)):
                    raise RunInvalid(
                        f"RUN must not be active, got {self.path}, which another launcher is running; "
                        f"stop that launcher, or watch the run with `specrl status -w {self.path}`"
                    )
                os.utime(self.lock_file)  # `find_run` takes the newest lock file for the newest run
            yield

    def has_launcher(self) -> bool:
        """Whether a launcher holds the lock at this moment. Raises RunInvalid on a file system without locks."""
        try:
            with open_regular(self.lock_file) as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except FileNotFoundError:
            return False
        except OSError as error:
            if error.errno not in {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}:
                raise
            raise RunInvalid(
                f"RUN must be on a file system with locks, got {self.path}, where the lock of its launcher cannot be "
                f"tested ({error.strerror}); copy it to another disk to read it"
            ) from error
        return False

    def make_private(self) -> str:
        """Take the run from other users, as new runs are. Returns a message if an older version had left it open.

        Raises RunInvalid if a part of it belongs to another user.
        """
        try:
            changed = take_from_others(self.path)
        except OSError as error:
            raise RunInvalid(
                f"all files of a run must belong to the user who resumes it, got {error}; "
                "resume it as the user who started it, or change their owner"
            ) from error
        return f"made {changed} files and folders of {self.path} private, as they are in new runs" if changed else ""

    @contextmanager
    def report_unwritable(self) -> Iterator[None]:
        """Raise RunInvalid for an OSError of the block, which writes files of the run."""
        try:
            yield
        except OSError as error:
            raise RunInvalid(
                f"{self.path} must take the files of the run, got {error}; make room, or repair what the error names, "
                "then give the command again"
            ) from error

    def write_run_file(self, spec: RunSpec) -> None:
        """Replace the run file atomically. Raises OSError."""
        write_text(self.run_file, dump_spec(spec), is_synced=True)


def create_run(runs: Path, spec: RunSpec, fill: Callable[[Path], None] = lambda _: None) -> RunDirectory:
    """Make `runs/<name>-<n>` with the next free n and write the run file into it. Raises RunInvalid.

    fill: writes more into the folder, before it gets its name. Its OSError becomes RunInvalid, too.

    Safe against concurrent launches: two at once get two numbers. A process that is killed meanwhile leaves a hidden
    folder, which is no run; `delete_unfinished` deletes it.
    """
    try:
        runs.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=runs))
    except OSError as error:
        raise RunInvalid(
            f"the folder for runs must be writable, got {runs}: {error.strerror}; name another folder"
        ) from error
    try:
        directory = RunDirectory(unfinished)  # with mkdtemp's 0700: prompts, rollouts and the token are private
        with private_umask(), _hold_new_lock(directory):
            directory.logs_folder.mkdir()
            directory.write_run_file(spec)
            fill(unfinished)
            number = 1 + max(_used_numbers(runs, spec.name), default=0)
            while not _try_rename(unfinished, runs / f"{spec.name}-{number}"):
                number += 1
    except OSError as error:
        raise RunInvalid(
            f"{runs} must take the files of a new run, got {error}; make room, name another folder, or repair "
            "the file that the error names"
        ) from error
    finally:
        with suppress(OSError):  # after the rename nothing is there
            _delete_new_folder(unfinished)
    return RunDirectory((runs / f"{spec.name}-{number}").resolve())


@contextmanager
def _hold_new_lock(directory: RunDirectory) -> Iterator[None]:
    """Hold the lock of a folder that is being filled. The file gets its name once it is locked, see below."""
    nameless = directory.path / f".{LOCK_FILE}"
    with nameless.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        nameless.rename(directory.lock_file)
        yield


def delete_unfinished(runs: Path) -> None:
    """Delete what killed processes have left of new runs, which may hold a whole checkpoint.

    A folder without a lock file is left alone: its process may be about to lock it. So is a link, which is a user's.
    """
    for lock in runs.glob(f"{UNFINISHED}*/{LOCK_FILE}"):
        with suppress(OSError, RunInvalid):  # another user's, or without locks
            if not lock.parent.is_symlink() and not RunDirectory(lock.parent).has_launcher():
                _delete_new_folder(lock.parent)


def _delete_new_folder(folder: Path) -> None:
    """Delete a folder that `create_run` has not finished. Raises OSError.

    The lock is deleted last: if this process is killed meanwhile, the next `delete_unfinished` continues.
    """
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != LOCK_FILE:
            path.unlink()
    (folder / LOCK_FILE).unlink(missing_ok=True)
    folder.rmdir()


def find_run(run: str | None, runs: Path) -> RunDirectory:
    """Find a run by its path or by its name below `runs`. None: the run that was locked last. Raises RunInvalid."""
    if run is None:
        return _find_newest(runs)
    for path in (runs / run, Path(run)):
        try:
            if (path / RUN_FILE).is_file():
                return RunDirectory(path.resolve())
        except PermissionError as error:
            raise RunInvalid(
                f"RUN must be a run of this user, got {path}, which only its owner can use; "
                "ask the owner, or give the command as that user"
            ) from error
    known = ", ".join(sorted(path.parent.name for path in runs.glob(f"*/{RUN_FILE}"))) or "none"
    raise RunInvalid(f"RUN must be a run's folder or the name of a run in {runs}, got {run}; runs there: {known}")


def _find_newest(runs: Path) -> RunDirectory:
    # Names with a leading dot are folders that `create_run` has not finished.
    found = (path.parent / LOCK_FILE for path in runs.glob(f"[!.]*/{RUN_FILE}"))
    locks = [lock for lock in found if lock.is_file()]
    if not locks:
        raise RunInvalid(
            f"--runs must be a folder with a run, got none in {runs}; start one with `specrl run`, or pass --runs DIR"
        )
    return RunDirectory(max(locks, key=lambda lock: lock.stat().st_mtime_ns).parent.resolve())


def _try_lock(file: IO[str]) -> bool:
    """Try once to take the lock. Returns whether it was taken; sleeps for 20 ms otherwise.

    `has_launcher` takes the lock for an instant to test it, so a single failure proves nothing.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        time.sleep(0.02)
        return False
    return True


def _used_numbers(runs: Path, name: str) -> Iterator[int]:
    """Yield the numbers of the existing runs of this name."""
    for path in runs.iterdir():
        match = re.fullmatch(rf"{re.escape(name)}-(\d+)", path.name)
        if match is not None:
            yield int(match[1])


def _try_rename(source: Path, target: Path) -> bool:
    """Rename a folder to a free name. Returns False when another process took the name first."""
    try:
        # Atomic. The kernel refuses a target folder that is not empty, and a run's folder never is.
        source.rename(target)
    except OSError:
        if target.exists():
            return False
        raise
    return True
