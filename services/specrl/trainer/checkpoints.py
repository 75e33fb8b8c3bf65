"""Where checkpoints lie, which of them are complete, and which are old enough to go. Without torch.

DIR/checkpoints/step-000010/             appears whole, by one rename, or not at all; `checksums` says what is in it
DIR/checkpoints/step-000010.metrics.pb   written before the rename: the answer to TrainStep 10
DIR/checkpoints/.step-000010.tmp/        one that is being written, or was when the trainer died
DIR/checkpoints/unreadable-step-000010/  one that could not be read, when an older one could; kept for people to look at
DIR/checkpoints/drafter.safetensors      finished epochs of the drafter's initialisation, until a step is saved
DIR/weights/version-000010-0f3a9c21/     weights.transport Checkpoint: the version that replicas read
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import structlog

from specrl.errors import CheckpointInvalid
from specrl.files import SMALL_BYTES, read_object
from specrl.records import StreamPlace
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)

STATE, DRAFTER, POLICY, WEIGHTS = "state.json", "drafter.safetensors", "policy", "weights"
"""In a checkpoint: what is no tensor; the drafter with its optimizer; the policy, and of it the weights alone."""

_NAME = re.compile(r"step-(\d{6,})")


def name(step: int) -> str:
    """Of the folder that a step's checkpoint is in."""
    return f"step-{step:06d}"


def step_of(name: str) -> int | None:
    """The inverse of `name`; None for any other."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match is not None else None


def directory(run: Path, step: int) -> Path:
    """Of the checkpoint of one step."""
    return run / "checkpoints" / name(step)


def metrics_file(run: Path, step: int) -> Path:
    """What TrainStep answered for that step."""
    return run / "checkpoints" / f"step-{step:06d}.metrics.pb"


def drafter_progress(run: Path) -> Path:
    """Finished epochs of the drafter's initialisation."""
    return run / "checkpoints" / "drafter.safetensors"


def weights_directory(run: Path) -> Path:
    """Where versions lie for replicas to read."""
    return run / "weights"


def prune_weights(run: Path, kept: Path) -> None:
    """Delete all versions but one, and what died half-written."""
    for pattern in ("version-*", ".version-*.tmp"):
        for old in weights_directory(run).glob(pattern):
            if old != kept:
                shutil.rmtree(old, ignore_errors=True)


def temporary(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(f".{target.name}.tmp")


def complete(run: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by ascending step."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    found = [(step, path) for path in root.iterdir() if (step := step_of(path.name)) is not None]
    return sorted((step, path) for step, path in found if (path / STATE).is_file())


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = complete(run)
    return found[-1][1] if found else None


def complete_step(path: Path) -> int:
    """The step of a checkpoint that people name. Raises CheckpointInvalid for a folder that is none."""
    step = step_of(path.resolve().name)
    if step is None or not (path / STATE).is_file():
        raise CheckpointInvalid(
            f"a checkpoint must be a complete folder step-NNNNNN, got {path}; `specrl checkpoint list` shows a run's"
        )
    return step


def copy_into(run: Path, source: Path) -> None:
    """Give a run the complete checkpoint of another, by one rename. Raises CheckpointInvalid, OSError."""
    target = directory(run, complete_step(source))
    shutil.copytree(source, temporary(target))
    temporary(target).rename(target)


def stream_in(path: Path) -> StreamPlace | None:
    """Where the data stand with a checkpoint; None when it does not say. Raises CheckpointInvalid."""
    try:
        return stream_of(read_object(path / STATE, SMALL_BYTES).get("stream"))
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(f"{path / STATE} must be as it was written, got {error}; use another one") from error


def stream_of(value: Any) -> StreamPlace | None:
    """A place in the data stream from JSON. Raises ValueError."""
    if value is None:
        return None
    try:
        place = StreamPlace(**value | {"ahead": tuple(value["ahead"])})
        types = [type(it) for it in (place.cursor, *place.ahead, place.problems)]
        if set(types) != {int} or not isinstance(place.identity, str):
            raise TypeError(f"got {str(value)[:200]}")
        place.check()
    except (TypeError, KeyError) as error:
        raise ValueError(f"stream must be a cursor, places ahead, problems and an identity: {error}") from error
    return place


def load_newest(run: Path, load: Callable[[Path | None], None]) -> Path | None:
    """Load the newest complete checkpoint, or the one before it where that cannot be read; returns which.

    Without any, the initial model is loaded (None). Raises CheckpointInvalid, of the newest, when none can be read, and
    whatever else `load` raises. What was passed over is set aside, under a name that nothing looks at.
    """
    found = [path for _, path in reversed(complete(run))]
    if not found:
        load(None)
        return None
    refused: list[tuple[Path, CheckpointInvalid]] = []
    for path in found:
        try:
            load(path)
        except CheckpointInvalid as error:
            refused.append((path, error))
            continue
        for unreadable, reason in refused:
            aside = unreadable.with_name(f"unreadable-{unreadable.name}")
            shutil.rmtree(aside, ignore_errors=True)
            unreadable.rename(aside)
            metrics.FILES_PASSED_OVER.labels("checkpoint").inc()
            log.error("checkpoint_passed_over", path=str(aside), used=str(path), reason=str(reason))
        return path
    raise refused[0][1]


def superseded(steps: Sequence[int], keep: int, milestone_every: int | None) -> list[int]:
    """Which of some ascending steps go: all but the `keep` newest and every multiple of `milestone_every`."""
    return [step for step in steps[:-keep] if not is_milestone(step, milestone_every)]


def is_milestone(step: int, every: int | None) -> bool:
    """Whether a step's checkpoint is kept for ever. The initial model is none: it has its own folder."""
    return every is not None and step > 0 and step % every == 0


def prune(run: Path, keep: int, milestone_every: int | None = None) -> list[int]:
    """Delete superseded checkpoints, and what died half-written. Returns the steps that went."""
    found = dict(complete(run))
    gone = superseded(list(found), keep, milestone_every)
    for step in gone:
        # Renamed first: a deletion that is interrupted leaves nothing that looks complete.
        doomed = temporary(found[step])
        shutil.rmtree(doomed, ignore_errors=True)
        found[step].rename(doomed)
        metrics_file(run, step).unlink(missing_ok=True)
    for leftover in (run / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
    return gone
