"""Checks that a step has at least one valid reward: one that the verifier gave without an error. Pure.

Without this check, a run whose reward function always raises, or whose judge is unreachable, would train on nothing and
still count as a success. Groups with equal rewards pass the check: their rewards carry no signal, but they are valid.
Called by the loop.
"""

from __future__ import annotations

from specrl.coordinator.schedule.scheduler import StepChoice
from specrl.errors import NothingGraded
from specrl.formats.reasons import ReasonCounts, format_given_up, format_reasons
from specrl.records import GradedRollout, Reward


def find_reward_fault(reward: Reward) -> str:
    """Return why a reward is not valid: it is missing, or it is 0 because the verifier raised. Empty if it is valid."""
    return reward.failure or reward.error


def check_learnable(choice: StepChoice[GradedRollout]) -> None:
    """Raise NothingGraded if no rollout of the step has a valid reward.

    Must be called before the batch is stored, so that a run that is resumed with a repaired verifier tries the step
    again.
    """
    faults = [find_reward_fault(item.reward) for _, items in choice.groups for item in items]
    if not all(faults):
        return
    given_up = ReasonCounts(reason for _, reason in choice.failures)
    raised = ReasonCounts(faults)
    said = []
    if given_up.total_failures:
        said.append(format_given_up(given_up.by_reason))
    if raised.total_failures:
        said.append(
            f"{raised.total_failures} rollouts on which the verifier failed: {format_reasons(raised.by_reason)}"
        )
    raise NothingGraded(
        f"step {choice.step} must have a graded rollout to learn from, got none: {'; '.join(said)}; repair what fails, "
        "then resume the run, which tries this step again"
    )
