"""Starts a run from a checkpoint of another run, which is copied into the new run's folder. Without torch.

The launcher checks the checkpoint that `specrl run --checkpoint` names. In a pod, `trainer/service.py` finds and copies
it. Invariant: a run that has a checkpoint of its own never goes back to that of the other run.
"""

from __future__ import annotations

from pathlib import Path

import structlog

from specrl.errors import CheckpointInvalid, RunInvalid, StoreFailed
from specrl.telemetry import metrics
from specrl.trainer.checkpointing import checkpoints, checksums

MOST_SHOWN = 10
"""Folders that the message about a missing one names."""

log = structlog.get_logger(__name__)


def check_usable(checkpoint: Path, steps: int) -> int:
    """Return the step of a checkpoint from which a run of so many steps can go on.

    Raises CheckpointInvalid if it is incomplete or damaged, and RunInvalid if no step is left to train.
    """
    step = checkpoints.check_complete(checkpoint)
    damages = checksums.list_damages(checkpoint)
    if damages:
        raise CheckpointInvalid(f"{checkpoint} must match its checksums, got {'; '.join(damages)}; use another one")
    if step >= steps:
        raise RunInvalid(f"schedule.steps must be greater than the checkpoint's step {step}, got {steps}; raise it")
    return step


def find_checkpoint(origin: Path, steps: int) -> Path:
    """Return the checkpoint to start from. origin: a checkpoint, or a run's folder: its newest undamaged one.

    Raises CheckpointInvalid when there is none that can be read, and RunInvalid as `check_usable` does.
    """
    if checkpoints.parse_step(origin.name) is not None:
        check_usable(origin, steps)
        return origin
    refusal: CheckpointInvalid | None = None
    for _, path in reversed(checkpoints.list_complete(origin)):
        try:
            check_usable(path, steps)
        except CheckpointInvalid as error:
            refusal = refusal or error
            metrics.FILES_SKIPPED.labels("checkpoint").inc()
            log.error("checkpoint_passed_over", path=str(path), reason=str(error))
            continue
        return path
    raise refusal or CheckpointInvalid(
        f"the folder to start from must have a complete checkpoint, got {origin}, which has none; "
        f"{_describe_neighbours(origin)}"
    )


def copy_from_origin(run: Path, origin: Path, steps: int) -> Path:
    """Copy the checkpoint to start from into the run's folder, atomically. Returns the checkpoint that was copied.

    Raises what `find_checkpoint` raises, and StoreFailed when it cannot be copied.
    """
    found = find_checkpoint(origin, steps)
    try:
        checkpoints.copy_into(run, found)
    except OSError as error:
        raise StoreFailed(f"could not copy {found} to {run}: {error}; free space on its disk") from error
    return found


def _describe_neighbours(origin: Path) -> str:
    """Describe which folders are beside the one that is missing or empty."""
    try:
        names = sorted(path.name for path in origin.parent.iterdir() if path.is_dir() and path != origin)
    except OSError:
        return "name a run's folder on that claim"
    more = f" and {len(names) - MOST_SHOWN} more" if len(names) > MOST_SHOWN else ""
    return (
        f"beside it there are {', '.join(names[:MOST_SHOWN])}{more}" if names else "there is no other folder beside it"
    )
