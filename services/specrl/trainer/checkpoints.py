"""Where checkpoints lie, which of them are complete, and which are old enough to go. Without torch.

DIR/checkpoints/step-000010/             appears whole, by one rename, or not at all
DIR/checkpoints/step-000010.metrics.pb   written before the rename: the answer to TrainStep 10
DIR/checkpoints/.step-000010.tmp/        one that is being written, or was when the trainer died
DIR/checkpoints/drafter.safetensors      finished epochs of the drafter's initialisation, until a step is saved
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

STATE = "state.json"
_NAME = re.compile(r"step-(\d{6,})")


def directory(run: Path, step: int) -> Path:
    """Of the checkpoint of one step."""
    return run / "checkpoints" / f"step-{step:06d}"


def metrics_file(run: Path, step: int) -> Path:
    """What TrainStep answered for that step."""
    return run / "checkpoints" / f"step-{step:06d}.metrics.pb"


def drafter_progress(run: Path) -> Path:
    """Finished epochs of the drafter's initialisation."""
    return run / "checkpoints" / "drafter.safetensors"


def temporary(target: Path) -> Path:
    """Where a checkpoint is written before it gets its name."""
    return target.with_name(f".{target.name}.tmp")


def complete(run: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints by ascending step."""
    root = run / "checkpoints"
    if not root.is_dir():
        return []
    found = [(int(match[1]), path) for path in root.iterdir() if (match := _NAME.fullmatch(path.name))]
    return sorted((step, path) for step, path in found if (path / STATE).is_file())


def newest(run: Path) -> Path | None:
    """The newest complete checkpoint."""
    found = complete(run)
    return found[-1][1] if found else None


def prune(run: Path, keep: int) -> None:
    """Delete all but the `keep` newest complete checkpoints, and what died half-written."""
    for step, path in complete(run)[:-keep]:
        # Renamed first: a deletion that is interrupted leaves nothing that looks complete.
        doomed = temporary(path)
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        metrics_file(run, step).unlink(missing_ok=True)
    for leftover in (run / "checkpoints").glob(".step-*.tmp"):
        shutil.rmtree(leftover, ignore_errors=True)
