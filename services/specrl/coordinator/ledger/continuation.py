"""Resumes a run from the trainer's checkpoint alone, when the ledger is empty.

This covers a lost store, and a run that starts from another run's checkpoint. The next step is the one after the
checkpoint, so no step is trained twice. Rollouts that were sampled and not trained are lost.

The loop calls it before it restores or dispatches anything. The ledger records the step, so a restarted coordinator
finds the ledger no longer empty.
"""

from __future__ import annotations

from typing import Protocol

import structlog

from specrl.coordinator.ledger.ledger import Ledger
from specrl.errors import RunInvalid
from specrl.records import StreamPlace, TrainerStatus
from specrl.spec import RunSpec

log = structlog.get_logger(__name__)


class IdentifiedPrompts(Protocol):
    """The part of a prompt stream that a checkpoint records."""

    def __len__(self) -> int:
        """Number of prompts in one epoch."""

    def identity(self) -> str:
        """Digest of the stream. Two streams with the same digest have the same problem at every position."""


async def resume_from_checkpoint(
    ledger: Ledger, status: TrainerStatus, spec: RunSpec, prompts: IdentifiedPrompts
) -> int:
    """Start an empty ledger after the trainer's checkpoint. Returns the checkpoint's step, 0 without a checkpoint.

    Raises RunInvalid when this run cannot continue from the checkpoint.
    """
    if status.step == 0:
        return 0
    check_stream_place(status, spec, prompts)
    await ledger.begin_after(status.step)
    log.info("run_resumed_from_checkpoint", step=status.step)
    return status.step


def place_of_checkpoint(step: int, spec: RunSpec, prompts: IdentifiedPrompts) -> StreamPlace:
    """Return the position in the prompt stream that belongs to a checkpoint of this step."""
    return StreamPlace(step * spec.schedule.prompts_per_step, len(prompts), prompts.identity())


def check_stream_place(status: TrainerStatus, spec: RunSpec, prompts: IdentifiedPrompts) -> None:
    """Raise RunInvalid unless the checkpoint was made with this run's prompt stream and promptsPerStep."""
    place = status.stream
    # The empty store has no batches to replay, so a trainer that is past its checkpoint could not recover those steps.
    if status.step != status.checkpoint_step:
        raise RunInvalid(
            "the trainer must be at its checkpoint when the store is empty, got "
            f"step={status.step} and a checkpoint of {status.checkpoint_step}; start the trainer again"
        )
    if place is None:
        raise RunInvalid(
            f"the checkpoint of step {status.step} must record its position in the prompt stream, got none; start a "
            "new run with model.path at the exported policy"
        )
    check_same_stream(status.step, place, spec, prompts)


def check_same_stream(step: int, place: StreamPlace, spec: RunSpec, prompts: IdentifiedPrompts) -> None:
    """Raise RunInvalid unless a checkpoint's place is that of this run's prompt stream and promptsPerStep.

    step: of the checkpoint. The launcher calls it, too, before anything is written.
    """
    if place.identity != prompts.identity():
        raise RunInvalid(
            f"the prompt stream must be that of the checkpoint of step {step}, {place.problems} problems "
            f"with identity {place.identity}, got {len(prompts)} with {prompts.identity()}; keep prompts.source and "
            "prompts.shuffleSeed as they were, or start a new run with model.path at the exported policy"
        )
    if place.cursor != step * spec.schedule.prompts_per_step:
        raise RunInvalid(
            f"schedule.promptsPerStep must be {place.cursor / step:g}, as before the checkpoint of step {step}, got "
            f"{spec.schedule.prompts_per_step}; start again with schedule.promptsPerStep={place.cursor / step:g}"
        )
