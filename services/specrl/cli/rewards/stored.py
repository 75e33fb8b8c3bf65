"""The rollouts that a run's store still holds, as lines to grade. They are read and never changed.

These are the rollouts that no step has trained yet, and those of steps since the last checkpoint. The store has no
references. A rollout's place in the stream of prompts determines its reference. The stream is a function of the run
file, its data, and the run's decisions about them. Called by `cli.rewards.command`.
"""

from __future__ import annotations

from contextlib import closing

from specrl.cli.rewards.completions import CompletionLine, Completions
from specrl.coordinator.ledger import Store, open_store_reader
from specrl.coordinator.rollouts.checked_prompts import load_decided_prompts
from specrl.coordinator.schedule.scheduler import SlotId
from specrl.errors import RunInvalid
from specrl.launcher.run_directory import RunDirectory
from specrl.prompts import PromptStream
from specrl.records import GradedRollout, Prompt, wire
from specrl.spec import load_spec
from specrl.trainer.checkpointing import checkpoints


def load_stored_rollouts(directory: RunDirectory, step: int | None) -> Completions:
    """Return the rollouts of step `step`, or of all steps, in stream order.

    The run may be active. Raises RunInvalid when there are none, and what the store and the data set raise.
    """
    spec = load_spec(directory.run_file)
    if spec.redis is None and not (directory.path / "store.db").exists():
        raise RunInvalid(f"RUN must have started, got {directory.path}, which has no state; start it first")
    with closing(open_store_reader(spec, directory.path)) as store:
        found = _read_rollouts(store)
    if not found:
        raise RunInvalid(
            f"RUN must still hold rollouts, got {directory.path} with none, since a checkpoint deletes those of the "
            "steps before it; grade while the run is active, or pass --completions FILE"
        )
    chosen = {slot: graded for slot, graded in found.items() if step in (None, slot.step)}
    if not chosen:
        steps = ", ".join(map(str, sorted({slot.step for slot in found})))
        raise RunInvalid(f"--step must be a step whose rollouts the run still holds, got {step}; it holds {steps}")
    prompts = load_decided_prompts(spec, directory.path)
    _check_identity(directory, prompts)
    # A prompt's position in the stream decides its step, so step and index give the position back.
    places = spec.schedule.prompts_per_step
    lines = [
        _rollout_line(slot, graded, prompts.prompt((slot.step - 1) * places + slot.index))
        for slot, graded in chosen.items()
    ]
    return Completions(str(directory.path), len(lines), lines)


def _read_rollouts(store: Store) -> dict[SlotId, GradedRollout]:
    """Read all rollouts in stream order. The store lists the rollouts of an untrained batch twice."""
    found = {
        SlotId(row.step, row.index, row.sample, row.attempt): wire.graded_from_bytes(row.data)
        for row in store.read_rollouts()
        if row.step >= 1  # lower steps are rollouts for the drafter, which are not from the stream of prompts
    }
    for data in (data for step in store.list_batch_steps() for data in store.read_batch_rollouts(step)):
        graded = wire.graded_from_bytes(data)
        slot = SlotId.from_name(graded.rollout.rollout_id)
        if slot is not None:
            found[slot] = graded
    return {slot: found[slot] for slot in sorted(found)}


def _check_identity(directory: RunDirectory, prompts: PromptStream) -> None:
    """Check that the data are those of the newest checkpoint. Otherwise references would be those of other prompts."""
    newest = checkpoints.find_newest(directory.path)
    place = checkpoints.read_stream_place(newest) if newest is not None else None
    if place is not None and place.identity != prompts.identity():
        raise RunInvalid(
            f"prompts.source must have the {place.problems} problems that {directory.path} was trained on, got "
            f"{len(prompts)} others, whose references do not belong to its rollouts; restore the data"
        )


def _rollout_line(slot: SlotId, graded: GradedRollout, prompt: Prompt) -> CompletionLine:
    copied = {
        "step": slot.step,
        "index": slot.index,
        "sample": slot.sample,
        "prompt": prompt.text,
        "reference": prompt.answer,
        "completion": graded.rollout.text,
        "rewardInRun": graded.reward.value,
    }
    return CompletionLine(f"rollout {slot}", prompt, graded.rollout.text, copied)
