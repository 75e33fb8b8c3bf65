"""Paths of a run's checkpoints, which of them are complete, and which may be deleted. Without torch.

DIR/checkpoints/step-000010/             appears by one rename, so it is complete or absent; `checksums` lists its files
DIR/checkpoints/step-000010.metrics.pb   the reply to TrainParts for step 10, written before the rename
DIR/checkpoints/.step-000010.tmp/        being written, or left over from a trainer that died
DIR/checkpoints/unreadable-step-000010/  could not be read although an older one could; kept for inspection
DIR/checkpoints/drafter.safetensors      finished epochs of the drafter's initialisation, until a step is saved
DIR/weights/version-000010-0f3a9c21/     weights.transport Checkpoint: the version that replicas read

Called by the trainer, the launcher and the command line.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog

from specrl.errors import CheckpointInvalid
from specrl.files import SMALL_BYTES, read_object, write_folder
from specrl.records import StreamPlace
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)

# Names inside a checkpoint's folder.
STATE = "state.json"  # everything that is not a tensor; written last before the checksums
DRAFTER = "drafter.safetensors"  # the drafter with its optimizer
POLICY = "policy"  # folders by kind: float32 weights, and both moments of the optimizer
WEIGHTS = "weights"  # below POLICY

_NAME = re.compile(r"step-(\d{6,})")


def step_name(step: int) -> str:
    """Return the name of the folder of a step's checkpoint."""
    return f"step-{step:06d}"


def parse_step(name: str) -> int | None:
    """Parse the step of a checkpoint's folder name; None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None else None


def step_directory(run: Path, step: int) -> Path:
    """Return the folder of a step's checkpoint."""
    return run / "checkpoints" / step_name(step)


def metrics_file(run: Path, step: int) -> Path:
    """Return the file with the reply to TrainParts for that step."""
    return run / "checkpoints" / f"{step_name(step)}.metrics.pb"


def drafter_progress_file(run: Path) -> Path:
    """Return the file with finished epochs of the drafter's initialisation."""
    return run / "checkpoints" / "drafter.safetensors"


def weights_directory(run: Path) -> Path:
    """Return the folder of the versions that replicas read, with weights.transport Checkpoint."""
    return run / "weights"


def prune_versions(run: Path, kept: Path) -> None:
    """Delete all versions but `kept`, and unfinished ones."""
    for pattern in ("version-*", ".version-*.tmp"):
        for old in weights_directory(run).glob(pattern):
            if old != kept:
                shutil.rmtree(old, ignore_errors=True)


def scratch_directory(target: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is renamed to `target`."""
    return target.with_name(f".{target.name}.tmp")


def list_complete(run: Path) -> list[tuple[int, Path]]:
    """List complete checkpoints, (step, folder), by ascending step."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := parse_step(path.name)) is not None]
    return sorted((step, path) for step, path in found if (path / STATE).is_file())


def find_newest(run: Path) -> Path | None:
    """Return the newest complete checkpoint; None if there is none."""
    found = list_complete(run)
    return found[-1][1] if found else None


def check_complete(path: Path) -> int:
    """Return the step of a checkpoint that a user named. Raises CheckpointInvalid for any other folder."""
    step = parse_step(path.resolve().name)
    if step is None or not (path / STATE).is_file():
        raise CheckpointInvalid(
            f"checkpoint must be a complete folder step-NNNNNN, got {path}; run `specrl checkpoint list` to see a run's"
        )
    return step


def copy_into(run: Path, source: Path) -> None:
    """Copy a complete checkpoint of another run into `run`, atomically. Raises CheckpointInvalid, OSError."""
    with write_folder(step_directory(run, check_complete(source))) as scratch:
        shutil.copytree(source, scratch, dirs_exist_ok=True)


def read_stream_place(path: Path) -> StreamPlace | None:
    """Read the position in the prompt stream from a checkpoint; None if it has none. Raises CheckpointInvalid."""
    try:
        return parse_stream_place(read_object(path / STATE, SMALL_BYTES).get("stream"))
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"could not read the checkpoint's {path / STATE}: {error}; use another checkpoint"
        ) from error


def parse_stream_place(value: Any) -> StreamPlace | None:
    """Parse a position in the prompt stream from JSON; None stays None. Raises ValueError."""
    if value is None:
        return None
    types = {"cursor": int, "problems": int, "identity": str}
    # Exact types, since a bool is an int to isinstance.
    if not isinstance(value, dict) or {name: type(item) for name, item in value.items()} != types:
        raise ValueError(
            f"stream must have an integer cursor, integer problems and a string identity, got {str(value)[:200]}"
        )
    place = StreamPlace(**value)
    place.check()
    return place


def load_newest(run: Path, load: Callable[[Path | None], None]) -> Path | None:
    """Load the newest complete checkpoint that can be read. Returns its folder.

    load: loads one checkpoint, or the initial model for None, and raises CheckpointInvalid if it cannot.

    If the run has no checkpoint, the initial model is loaded, and None is returned. Unreadable checkpoints that are
    newer than the loaded one are renamed, so that they are not tried again.

    Raises the newest checkpoint's CheckpointInvalid when none can be read, and any other error of `load`.
    """
    found = [path for _, path in reversed(list_complete(run))]
    if not found:
        load(None)
        return None
    # Only the texts: an error's traceback would keep the models alive that `load` had made, beside the next ones.
    refused: list[tuple[Path, str]] = []
    for path in found:
        try:
            load(path)
        except CheckpointInvalid as error:
            refused.append((path, str(error)))
            log.error("checkpoint_refused", path=str(path), reason=str(error))
            continue
        # Renamed only now: if none can be read, all stay where the user can repair them.
        for unreadable, reason in refused:
            aside = unreadable.with_name(f"unreadable-{unreadable.name}")
            shutil.rmtree(aside, ignore_errors=True)
            unreadable.rename(aside)
            metrics.FILES_SKIPPED.labels("checkpoint").inc()
            log.error("checkpoint_passed_over", path=str(aside), used=str(path), reason=reason)
        return path
    raise CheckpointInvalid(refused[0][1])


@dataclass(frozen=True)
class Keeping:
    """Which checkpoints stay: the `newest` newest, those of milestones, and the one of the best step (0: none)."""

    newest: int
    milestone_every: int | None = None
    best_step: int = 0


def find_superseded(steps: Sequence[int], keeping: Keeping) -> list[int]:
    """Return the steps to delete. steps: ascending."""
    older = [step for step in steps[: -keeping.newest] if not is_milestone(step, keeping.milestone_every)]
    return [step for step in older if step == 0 or step != keeping.best_step]


def is_milestone(step: int, every: int | None) -> bool:
    """Return whether a step's checkpoint is kept for ever. Step 0 is not: the initial model has its own folder."""
    return every is not None and step > 0 and step % every == 0


def prune_superseded(run: Path, keeping: Keeping) -> list[int]:
    """Delete superseded checkpoints and unfinished ones. Returns the deleted steps."""
    found = dict(list_complete(run))
    gone = find_superseded(list(found), keeping)
    for step in gone:
        # Rename first, so that an interrupted deletion leaves nothing that looks complete.
        doomed = scratch_directory(found[step])
        shutil.rmtree(doomed, ignore_errors=True)
        found[step].rename(doomed)
        metrics_file(run, step).unlink(missing_ok=True)
    for leftover in (run / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    return gone
