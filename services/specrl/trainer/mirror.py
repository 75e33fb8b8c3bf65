"""Copies of a run's complete checkpoints elsewhere, through fsspec: S3, GCS, Azure, another disk. Without torch.

URL/run.json                    the digest of the run file that they are of
URL/step-000010/...             as in the run's folder; complete once checksums.json is there, which is sent last
URL/step-000010.metrics.pb      sent before it

An object store has no rename, so what is complete is what has its checksums.json; it goes first when a checkpoint is
deleted. Every file is compared with its checksum when it is fetched. Called by `trainer/service.py` in a thread of its
own, after a checkpoint is complete on the disk, and before the first is loaded; by the command line, to list.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import fsspec
import structlog

from specrl.errors import CheckpointInvalid, RunInvalid, StoreFailed
from specrl.files import parse_object
from specrl.spec import RunSpec, digest
from specrl.telemetry import metrics
from specrl.trainer import checkpoints, checksums

T = TypeVar("T")

OWNER = "run.json"

log = structlog.get_logger(__name__)


class Mirror:
    """Where one run's checkpoints are copied to. Raises RunInvalid when its file system needs a library."""

    def __init__(self, url: str, owner: str) -> None:
        self.url, self._owner = url, owner
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise RunInvalid(
                f"checkpoint.mirror must be of a file system that is installed, got {url}: {error}; "
                "pip install 'specrl[s3]', 'specrl[gcs]' or 'specrl[azure]' wherever the trainer runs"
            ) from error
        self._root = root.rstrip("/")

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints there, ascending. Raises StoreFailed; RunInvalid when another run's."""
        return self._reach("be listed", self._steps)

    def upload(self, run: Path, step: int) -> None:
        """Copy a complete checkpoint there. Raises StoreFailed; RunInvalid when those there are another run's."""
        self._reach("take a checkpoint", lambda: self._upload(run, step))

    def prune(self, keep: int, milestone_every: int | None) -> None:
        """Delete what is superseded there. Raises StoreFailed."""

        def delete() -> None:
            for step in checkpoints.superseded(self._steps(), keep, milestone_every):
                self._delete(step)

        self._reach("be pruned", delete)

    def restore(self, run: Path) -> Path | None:
        """Fetch the newest checkpoint there that is whole into the run's folder; None when there is none.

        Raises StoreFailed when the copies cannot be reached, CheckpointInvalid when all of them are damaged.
        """
        refusal: CheckpointInvalid | None = None
        for step in reversed(self.steps()):
            try:
                return self._reach("give a checkpoint back", partial(self._fetch, run, step))
            except CheckpointInvalid as error:
                refusal = refusal or error
                metrics.FILES_PASSED_OVER.labels("checkpoint").inc()
                log.error("mirrored_checkpoint_passed_over", step=step, reason=str(error))
        if refusal is not None:
            raise refusal
        return None

    def _reach(self, what: str, work: Callable[[], T]) -> T:
        try:
            self._files.invalidate_cache()
            return work()
        except (CheckpointInvalid, RunInvalid):
            raise
        except Exception as error:
            raise StoreFailed(
                f"checkpoint.mirror must {what}, got {self.url}: {type(error).__name__}: {error}; "
                "check address, credentials and room"
            ) from error

    def _steps(self) -> list[int]:
        if not self._files.exists(self._root):
            return []
        found = [checkpoints.step_of(path.rstrip("/").rsplit("/", 1)[-1]) for path in self._paths()]
        steps = sorted(step for step in found if step is not None and self._is_complete(step))
        if steps:
            self._check_owner()
        return steps

    def _paths(self) -> list[str]:
        found: list[str] = self._files.ls(self._root, detail=False)
        return found

    def _is_complete(self, step: int) -> bool:
        found: bool = self._files.exists(self._place(checkpoints.name(step), checksums.FILE))
        return found

    def _check_owner(self) -> None:
        try:
            found = parse_object(self._files.cat_file(self._place(OWNER))).get("digest")
        except (FileNotFoundError, ValueError):
            found = None
        if found != self._owner:
            raise RunInvalid(
                f"checkpoint.mirror must hold the checkpoints of one run, got {self.url} with those of another run "
                "file; name a place of its own for each run"
            )

    def _upload(self, run: Path, step: int) -> None:
        owner = json.dumps({"digest": self._owner}).encode()
        self._files.makedirs(self._root, exist_ok=True)
        if self._files.exists(self._place(OWNER)):
            self._check_owner()
        else:
            self._files.pipe_file(self._place(OWNER), owner)
        source, name = checkpoints.directory(run, step), checkpoints.name(step)
        self._delete(step)  # trained again since, or half sent
        if (answer := checkpoints.metrics_file(run, step)).is_file():
            self._files.put_file(str(answer), self._place(answer.name))
        for file in (*checksums.read(source), checksums.FILE):
            self._files.makedirs(self._place(name, *Path(file).parts[:-1]), exist_ok=True)
            self._files.put_file(str(source / file), self._place(name, file))

    def _delete(self, step: int) -> None:
        name = checkpoints.name(step)
        for part in (f"{name}/{checksums.FILE}", name, checkpoints.metrics_file(Path(), step).name):
            if self._files.exists(self._place(part)):
                self._files.rm(self._place(part), recursive=True)

    def _fetch(self, run: Path, step: int) -> Path:
        target, name = checkpoints.directory(run, step), checkpoints.name(step)
        scratch = checkpoints.temporary(target)
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        self._files.get_file(self._place(name, checksums.FILE), str(scratch / checksums.FILE))
        for file in checksums.read(scratch):
            (scratch / file).parent.mkdir(parents=True, exist_ok=True)
            if self._files.exists(self._place(name, file)):
                self._files.get_file(self._place(name, file), str(scratch / file))
        damages = checksums.damages(scratch)
        if damages:
            shutil.rmtree(scratch, ignore_errors=True)
            raise CheckpointInvalid(
                f"a checkpoint must be as it was written, got {self.url}/{name}: {damages[0]}; delete it there"
            )
        answer = checkpoints.metrics_file(run, step)
        if self._files.exists(self._place(answer.name)):
            self._files.get_file(self._place(answer.name), str(answer))
        scratch.rename(target)
        return target

    def _place(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def of_run(spec: RunSpec) -> Mirror | None:
    """The mirror that a run file names. Raises RunInvalid."""
    url = spec.checkpoint.mirror
    return Mirror(url, digest(spec)) if url is not None else None
