"""A run whose store knows nothing, and whose trainer has a checkpoint: it goes on from that alone.

So a store may be lost, or a run begun with the checkpoint of another. The checkpoint says how far steps have settled
the stream of prompts; what follows is trained next, and nothing again. What was sampled and not trained is lost.
Called before anything is restored, given out or published. Once the store knows where it was begun, a restarted
coordinator finds it there.
"""

from __future__ import annotations

import structlog

from specrl.coordinator.board import CHECKPOINTS
from specrl.coordinator.parts import Parts, PromptStream
from specrl.coordinator.progress import Progress
from specrl.coordinator.report import Phase
from specrl.coordinator.trainer_link import TrainerLink
from specrl.errors import RunInvalid
from specrl.records import StreamPlace, TrainerStatus
from specrl.spec import RunSpec

log = structlog.get_logger(__name__)


async def take_up(parts: Parts, link: TrainerLink) -> Progress:
    """How far the run has come, before its first step here. Waits for the trainer if the store knows no step.

    Raises RunInvalid when the trainer's checkpoint is none that this run can go on from.
    """
    store = parts.store
    if store.trained() or await store.batch(1) is not None:
        return parts.board.progress(parts.spec.schedule.prompts_per_step)
    parts.board.say(Phase.WAITING, "waiting for the trainer, which may have a checkpoint", 0, 1)
    status = await link.found()
    if status.step == 0:
        return Progress()
    progress = progress_of(status, parts.spec, parts.prompts)
    await store.set_fact(CHECKPOINTS, [status.step, status.step])
    await store.begin_after(progress)
    log.info("checkpoint_taken_up", step=status.step, cursor=progress.cursor, says_so=status.stream is not None)
    return progress


def place_of(progress: Progress, prompts: PromptStream) -> StreamPlace:
    """What a checkpoint of this step keeps."""
    return StreamPlace(progress.cursor, tuple(sorted(progress.ahead)), len(prompts), prompts.identity())


def progress_of(status: TrainerStatus, spec: RunSpec, prompts: PromptStream) -> Progress:
    """How far a trainer's checkpoint has come with the stream of this run. Raises RunInvalid.

    One that does not say, of a version before, is taken for that of a run with order InOrder: P prompts a step.
    """
    settled, place = status.step * spec.schedule.prompts_per_step, status.stream
    if status.step != status.checkpoint_step:
        raise RunInvalid(
            "a trainer must stand at its checkpoint when the store is empty, got "
            f"step={status.step} and a checkpoint of {status.checkpoint_step}; start the trainer again"
        )
    if place is None:
        log.warning("checkpoint_without_stream_found", step=status.step, taken_for=settled)
        return Progress(status.step, settled)
    if place.identity != prompts.identity():
        raise RunInvalid(
            f"the stream of prompts must be that of the checkpoint of step {status.step}, {place.problems} problems "
            f"with identity {place.identity}, got {len(prompts)} with {prompts.identity()}; keep prompts.source and "
            "prompts.shuffleSeed as they were, or begin anew with model.path at the exported policy"
        )
    if place.settled != settled:
        raise RunInvalid(
            f"schedule.promptsPerStep must be {place.settled / status.step:g}, as before the checkpoint of step "
            f"{status.step}, got {spec.schedule.prompts_per_step}; keep it"
        )
    return Progress(status.step, place.cursor, frozenset(place.ahead))
