"""The rollouts that a run's folder, or its server, still holds, as lines to grade: read, never changed.

They are those that no step has trained yet, and those of steps since the last checkpoint. The store has no references:
each is the one at the rollout's place in the stream of prompts, which is a function of the run file, its data and
what the run has decided about them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from specrl.cli.rewards.completions import Line
from specrl.coordinator.checked_prompts import load_decided_prompts
from specrl.coordinator.scheduler import SlotId
from specrl.coordinator.store import Store, read_store
from specrl.errors import RunInvalid
from specrl.launcher.run_directory import RunDirectory
from specrl.prompts import PromptStream
from specrl.records import GradedRollout, Prompt, wire
from specrl.spec import load_spec
from specrl.trainer import checkpoints


@dataclass(frozen=True)
class StoredRollouts:
    """Rollouts of the run in the folder `name`."""

    name: str
    lines: Sequence[Line]

    @property
    def total(self) -> int:
        """How many there are."""
        return len(self.lines)

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)


def stored_rollouts(directory: RunDirectory, step: int | None) -> StoredRollouts:
    """The rollouts of the prompts of `step`, or of all steps, in stream order. Raises RunInvalid when there are none.

    The run may be under way. Raises also what the store and the data set raise.
    """
    spec = load_spec(directory.run_file)
    if spec.redis is None and not (directory.path / "store.db").exists():
        raise RunInvalid(f"a run must have begun to have rollouts, got {directory.path}, which never did")
    with closing(read_store(spec, directory.path)) as store:
        found = _rollouts(store)
    if not found:
        raise RunInvalid(
            f"{directory.path} must still hold rollouts, got none: a checkpoint of the step that trained them lets "
            "them go; grade while the run is under way, or pass --completions FILE"
        )
    chosen = {slot: graded for slot, graded in found.items() if step in (None, slot.step)}
    if not chosen:
        steps = ", ".join(map(str, sorted({slot.step for slot in found})))
        raise RunInvalid(f"--step must be one whose rollouts {directory.path} still holds, got {step}; it has {steps}")
    prompts = load_decided_prompts(spec, directory.path)
    _check_identity(directory, prompts)
    places = spec.schedule.prompts_per_step
    lines = [
        _line(slot, graded, prompts.prompt((slot.step - 1) * places + slot.index)) for slot, graded in chosen.items()
    ]
    return StoredRollouts(str(directory.path), lines)


def _rollouts(store: Store) -> dict[SlotId, GradedRollout]:
    """In stream order. A batch that is not trained yet has rollouts that the store lists, too."""
    found = {
        SlotId(row.step, row.index, row.sample, row.attempt): wire.graded_from_bytes(row.data)
        for row in store.rollouts()
        if row.step >= 1  # others are not of the stream of prompts: the drafter's
    }
    for data in (data for step in store.batches() for data in store.batch_rollouts(step)):
        graded = wire.graded_from_bytes(data)
        slot = SlotId.parse(graded.rollout.rollout_id)
        if slot is not None:
            found[slot] = graded
    return {slot: found[slot] for slot in sorted(found)}


def _check_identity(directory: RunDirectory, prompts: PromptStream) -> None:
    """The data are those that the newest checkpoint was written with, or a rollout meets another prompt's reference."""
    newest = checkpoints.newest(directory.path)
    place = checkpoints.stream_in(newest) if newest is not None else None
    if place is not None and place.identity != prompts.identity():
        raise RunInvalid(
            f"prompts.source must have the {place.problems} problems that {directory.path} was trained on, got others "
            f"({len(prompts)}): references would be those of other prompts; restore the data"
        )


def _line(slot: SlotId, graded: GradedRollout, prompt: Prompt) -> Line:
    copied = {
        "step": slot.step,
        "index": slot.index,
        "sample": slot.sample,
        "prompt": prompt.text,
        "reference": prompt.answer,
        "completion": graded.rollout.text,
        "rewardInRun": graded.reward.value,
    }
    return Line(f"rollout {slot}", prompt, graded.rollout.text, copied)
