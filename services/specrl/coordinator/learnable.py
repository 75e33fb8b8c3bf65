"""Whether a step has anything to learn from: at least one verdict that is the verifier's own judgement. Pure.

A reward function that always raises, or a judge that is away, would otherwise train a policy on nothing to the run's
end, and be called a success. Groups whose rewards are all equal are another matter: those verdicts are meant.
"""

from __future__ import annotations

from specrl.coordinator.reasons import Reasons, given_up_in_words, reasons_in_words
from specrl.coordinator.scheduler import Choice
from specrl.errors import NothingGraded
from specrl.records import GradedRollout, Reward


def fault_of(reward: Reward) -> str:
    """Why a reward is not the verifier's judgement of the answer: it is missing, or 0 because the verifier raised.

    Empty for every other reward.
    """
    return reward.failure or reward.error


def check_learnable(choice: Choice[GradedRollout]) -> None:
    """Raise NothingGraded when all prompts of a step were given up, or its verifier raised on all of its rollouts.

    Called before any of it is durable, so that a run that is resumed with a repaired verifier tries the step again.
    """
    faults = [fault_of(item.reward) for _, items in choice.groups for item in items]
    if not all(faults):
        return
    given_up, raised = Reasons(reason for _, reason in choice.failures), Reasons(faults)
    said = []
    if given_up.total:
        said.append(given_up_in_words(given_up.counts))
    if raised.total:
        said.append(f"{raised.total} rollouts on which the verifier failed: {reasons_in_words(raised.counts)}")
    raise NothingGraded(
        f"step {choice.step} must have a graded rollout to learn from, got none: {'; '.join(said)}; repair what fails, "
        "then resume the run, which tries this step again"
    )
