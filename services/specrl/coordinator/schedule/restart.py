"""Rebuilds the schedule from the store, wherever the coordinator was killed. Pure.

A step writes to the store in this order:

    each graded rollout -> reasons of the prompts that are given up -> the batch -> after training, the report

Rollouts in flight are not stored. They are sampled again with the same seed, unless their replica still has them
(`Scheduler.resume_slot`).

Invariants: a prompt that has failed stays failed, and a graded rollout is trained with its group. A step whose batch is
stored is chosen again with the same content, because all of its groups were finished before the batch was stored.

Called by `rollouts/pipeline.py` at the start of a run, and by the model of a run in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specrl.coordinator.schedule.scheduler import Scheduler, SlotId
from specrl.errors import RunInvalid, VersionConflict


@dataclass(frozen=True)
class FinishedSlot[R]:
    """A slot whose rollout is graded and stored. oldest_version: policy version of its oldest token."""

    slot: SlotId
    result: R
    oldest_version: int


def rebuild_schedule[R](
    scheduler: Scheduler[R], rollouts: Iterable[FinishedSlot[R]], failures: Mapping[int, str]
) -> int:
    """Restore stored rollouts and failures into a new scheduler. Returns how many rollouts were restored.

    failures: reasons by position. May include prompts that are settled, which are ignored. Raises RunInvalid when a
    rollout is too old for its step, as after a change of maxPolicyLag.
    """
    try:
        restored = sum(scheduler.restore_slot(item.slot, item.result, item.oldest_version) for item in rollouts)
    except VersionConflict as error:
        raise RunInvalid(
            f"stored rollouts must be trainable at their steps, got {error}; resume with the run file under which they "
            "were sampled"
        ) from error
    for position, reason in failures.items():
        scheduler.fail_group(position, reason)
    return restored
