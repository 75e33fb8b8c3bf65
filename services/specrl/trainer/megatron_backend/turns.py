"""The turns of rollouts as the drafter's lessons.

vLLM drafts where the policy samples, and a turn is a request of its own whose prompt is all that came before. So a
turn is learnt from as a completion is, and what a tool wrote is context: the drafter is never asked to guess it, and a
lesson that ran on into it would teach guesses at places where none are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrl.drafting.budget import Lesson
from specrl.records import TrainRollout


def turns_of(index: int, item: TrainRollout) -> list[Lesson]:
    """Each turn of the rollout at `index`, whole; without tools the completion."""
    prompt = len(item.prompt_token_ids)
    return [Lesson(index, prompt + first, prompt + end) for first, end in item.rollout.turns]


def turn_lengths(rollouts: Sequence[TrainRollout]) -> list[int]:
    """Sampled tokens of every turn."""
    return [end - first for item in rollouts for first, end in item.rollout.turns]
