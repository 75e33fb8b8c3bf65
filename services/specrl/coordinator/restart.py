"""A schedule built again from what is durable, after the coordinator was killed anywhere.

What is durable, in the order in which a step's life writes it: every graded rollout; the reason of a prompt that is
given up; the batch of the next step, which names the places of the stream that it settles; and, once that step is
trained, its report with the stream's progress. What is in flight is not: it is sampled again, under the same seed.

So what was chosen stays chosen, what has failed stays failed, and a rollout that was graded is trained with its group.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from specrl.coordinator.scheduler import Scheduler, SlotId
from specrl.errors import RunInvalid


@dataclass(frozen=True)
class Finished[R]:
    """A slot whose rollout is graded and stored."""

    slot: SlotId
    result: R
    oldest_version: int


@dataclass(frozen=True)
class Remains[R]:
    """What is durable of steps that are not trained.

    failures: reasons by place in the stream; those of settled prompts may be among them.
    batch: places of the stream that the stored batch of the next step settles; None before it is stored.
    """

    rollouts: Sequence[Finished[R]]
    failures: Mapping[int, str]
    batch: Sequence[int] | None


def take_up[R](scheduler: Scheduler[R], remains: Remains[R]) -> int:
    """Put what remains into a new scheduler; returns how many rollouts that were. Raises RunInvalid.

    A stored batch may have been sent, so its places are chosen again before anything else is decided.
    """
    restored = sum(scheduler.restore(item.slot, item.result, item.oldest_version) for item in remains.rollouts)
    for position, reason in remains.failures.items():
        scheduler.fail(position, reason)
    if remains.batch is not None:
        scheduler.choose_again(remains.batch)
    if not scheduler.has_kept_deadlines():
        raise RunInvalid(
            f"stored rollouts must be trainable within maxPolicyLag={scheduler.shape.max_policy_lag} of step "
            f"{scheduler.trained + 1}, got older ones; resume with the run file that they were sampled under"
        )
    return restored
