"""Mirrors a run's complete checkpoints to another place through fsspec: S3, GCS, Azure, another disk. Without torch.

URL/run.json                    the run file whose checkpoints these are
URL/step-000010/...             as in the run's folder; complete once checksums.json is there, which is uploaded last
URL/step-000010.metrics.pb      uploaded before it

Invariant: a checkpoint with checksums.json is complete. Object stores have no rename, so that file is uploaded last and
deleted first. Every fetched file is verified against its checksum.

`trainer/service.py` calls this in a thread: before it loads the first checkpoint, and after a checkpoint is complete
on the disk. The command line lists mirrors with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import structlog

from specrl.errors import CheckpointInvalid, RunInvalid, SpecrlError, StoreFailed
from specrl.file_systems import open_file_system
from specrl.files import parse_object, write_folder
from specrl.records.run_file import RecordedRun, find_edits, record_run
from specrl.spec import RunSpec
from specrl.telemetry import metrics
from specrl.trainer.checkpointing import checkpoints, checksums

OWNER = "run.json"

log = structlog.get_logger(__name__)


class CheckpointMirror:
    """The mirror of one run's checkpoints."""

    def __init__(self, url: str, owner: RecordedRun) -> None:
        """owner: the run file. Raises RunInvalid when the URL needs a library that is not installed."""
        self.url = url
        self._owner = owner
        try:
            self._files, root = open_file_system(url)
        except (ImportError, ValueError) as error:
            raise RunInvalid(
                f"checkpoint.mirror must be a URL whose file system is installed, got {url}: {error}; "
                "install the extra `s3`, `gcs` or `azure` (docs/install.md) wherever the trainer runs; for pods, in "
                "the trainer's image (docs/checkpoints.md)"
            ) from error
        self._root = root.rstrip("/")

    def list_steps(self) -> list[int]:
        """List the steps of complete checkpoints, ascending. Raises StoreFailed; RunInvalid if they are another run's.

        Reads the mirror at each call.
        """
        with self._translate_errors("list checkpoints"):
            if not self._files.exists(self._root):
                return []
            paths = self._files.ls(self._root, detail=False)
            steps = [checkpoints.parse_step(path.rstrip("/").rsplit("/", 1)[-1]) for path in paths]
            found = sorted(step for step in steps if step is not None and self._is_complete(step))
            if found:
                self._check_owner()
            return found

    def upload_step(self, run: Path, step: int) -> None:
        """Upload a step's complete checkpoint. Raises StoreFailed; RunInvalid if the mirror is another run's."""
        source = checkpoints.step_directory(run, step)
        answer = checkpoints.metrics_file(run, step)
        with self._translate_errors("store a checkpoint"):
            self._files.makedirs(self._root, exist_ok=True)
            if self._files.exists(self._join_path(OWNER)):
                self._check_owner()
            else:
                self._files.pipe_file(self._join_path(OWNER), json.dumps(asdict(self._owner)).encode())
            self._delete_step(step)  # an older copy of this step, or an upload that was interrupted
            if answer.is_file():
                self._files.put_file(str(answer), self._join_path(answer.name))
            for file in (*checksums.read_checksums(source), checksums.FILE):
                self._files.makedirs(self._join_path(source.name, *Path(file).parts[:-1]), exist_ok=True)
                self._files.put_file(str(source / file), self._join_path(source.name, file))

    def delete_superseded(self, keeping: checkpoints.Keeping) -> None:
        """Delete superseded checkpoints of the mirror. Raises StoreFailed."""
        with self._translate_errors("delete superseded checkpoints"):
            for step in checkpoints.find_superseded(self.list_steps(), keeping):
                self._delete_step(step)

    def restore_newest(self, run: Path) -> Path | None:
        """Fetch the newest undamaged checkpoint into the run's folder. Returns its folder; None if the mirror is empty.

        Raises StoreFailed when the mirror cannot be reached, CheckpointInvalid when all its checkpoints are damaged.
        """
        refusal: CheckpointInvalid | None = None
        for step in reversed(self.list_steps()):
            try:
                with self._translate_errors("fetch a checkpoint"):
                    return self._fetch_step(run, step)
            except CheckpointInvalid as error:
                refusal = refusal or error
                metrics.FILES_SKIPPED.labels("checkpoint").inc()
                log.error("mirrored_checkpoint_passed_over", step=step, reason=str(error))
        if refusal is not None:
            raise refusal
        return None

    @contextmanager
    def _translate_errors(self, what: str) -> Iterator[None]:
        try:
            self._files.invalidate_cache()  # fsspec caches listings; other processes change the mirror
            yield
        except SpecrlError:
            raise
        except Exception as error:  # the seam to fsspec, whose file systems raise their own libraries' errors
            raise StoreFailed(
                f"could not {what} at checkpoint.mirror {self.url}: {type(error).__name__}: {error}; "
                "check its address, credentials and free space, and in a pod that egress to it is allowed"
            ) from error

    def _is_complete(self, step: int) -> bool:
        return bool(self._files.exists(self._join_path(checkpoints.step_name(step), checksums.FILE)))

    def _check_owner(self) -> None:
        try:
            found = parse_object(self._files.cat_file(self._join_path(OWNER)))
            edits = find_edits(RecordedRun(dict(found["run_file"]), dict(found["given"])), self._owner)
        except (FileNotFoundError, KeyError, TypeError, ValueError):
            edits = None
        if edits is None or edits:
            raise RunInvalid(
                f"checkpoint.mirror must not have checkpoints of another run file, got {self.url}; "
                "use a separate URL for each run"
            )

    def _delete_step(self, step: int) -> None:
        name = checkpoints.step_name(step)
        # checksums.json first: without it, a half-deleted checkpoint is not complete.
        for part in (f"{name}/{checksums.FILE}", name, checkpoints.metrics_file(Path(), step).name):
            if self._files.exists(self._join_path(part)):
                self._files.rm(self._join_path(part), recursive=True)

    def _fetch_step(self, run: Path, step: int) -> Path:
        target = checkpoints.step_directory(run, step)
        name = target.name
        with write_folder(target) as scratch:
            self._files.get_file(self._join_path(name, checksums.FILE), str(scratch / checksums.FILE))
            for file in checksums.read_checksums(scratch):
                (scratch / file).parent.mkdir(parents=True, exist_ok=True)
                # A missing file is reported below, together with damaged ones.
                if self._files.exists(self._join_path(name, file)):
                    self._files.get_file(self._join_path(name, file), str(scratch / file))
            damages = checksums.list_damages(scratch)
            if damages:
                raise CheckpointInvalid(
                    f"mirrored checkpoint {self.url}/{name} is damaged: {damages[0]}; delete it there"
                )
            answer = checkpoints.metrics_file(run, step)
            if self._files.exists(self._join_path(answer.name)):
                self._files.get_file(self._join_path(answer.name), str(answer))
        return target

    def _join_path(self, *parts: str) -> str:
        return "/".join((self._root, *parts))


def open_mirror(spec: RunSpec) -> CheckpointMirror | None:
    """Open the mirror that a run file names; None if it names none. Raises RunInvalid."""
    url = spec.checkpoint.mirror
    return CheckpointMirror(url, record_run(spec)) if url is not None else None
