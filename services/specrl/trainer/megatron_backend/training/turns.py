"""Splits rollouts into turns, which are the drafter's lessons. Called by `drafter_training.py` and `initialisation.py`.

In vLLM each turn is a separate request, whose prompt is all text before it. The drafter only ever proposes tokens
that the policy samples. So each turn is a completion to learn from, and tool output is context. A lesson must not run
on into tool output, where the drafter is never used.
"""

from __future__ import annotations

from collections.abc import Sequence

from specrl.drafting.budget import TrainingSlice
from specrl.records import TrainRollout


def list_turns(index: int, item: TrainRollout) -> list[TrainingSlice]:
    """Return one lesson per turn of the rollout at `index`. Without tools there is one turn, the completion."""
    prompt = len(item.prompt_token_ids)
    return [TrainingSlice(index, prompt + first, prompt + end) for first, end in item.rollout.turn_spans]


def count_turn_tokens(rollouts: Sequence[TrainRollout]) -> list[int]:
    """Count the sampled tokens of every turn."""
    return [end - first for item in rollouts for first, end in item.rollout.turn_spans]
