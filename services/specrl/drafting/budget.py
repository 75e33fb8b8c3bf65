"""Chooses the tokens of a step that the drafter is trained on, within a compute budget, and splits them into updates.

Each step trains on another part of its batch. It makes several small updates, because a small model learns more from
them than from one large update (docs/decisions/0029).

Pure: the choice depends only on lengths and the step's number, so all ranks and all repetitions choose alike. The
budget is counted in floating-point operations, not in seconds, so a run's result does not depend on machine load.

A start is a position that the drafter drafts from (see `online.py`). A completion of T tokens has T - 1 starts.

Called by the trainer's drafter step.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrl.drafting.drafter import Drafter
from specrl.models.policy_config import PolicyConfig

# Cost of training in forward passes; a backward pass costs two.
# Per step: forward, backward, and a pass for log-probabilities. Most steps make none, but still give the drafter its
# share of one.
POLICY_FORWARDS = 4
DRAFTER_FORWARDS = 3  # forward and backward

# The drafter's budget as a share of the policy's operations in a step with that pass, which is 4 % of a step without.
# At 3 % a step with the pass takes at most 7 % longer on CPUs. Of these, 4 % are fixed: the head's optimizer, and
# keeping the hidden states (benchmarks/adaptation.py). Steps without the pass were not measured.
ONLINE_SHARE = 0.03

UPDATE_STARTS = 100  # starts per update, roughly: with fewer, the gradient is mostly noise
MAX_UPDATES = 16  # per step


@dataclass(frozen=True)
class RolloutLengths:
    """A rollout's group, and the lengths of its prompt and completion in tokens."""

    group_id: str
    prompt: int
    completion: int


@dataclass(frozen=True)
class TrainingSlice:
    """A training slice: the first `length` tokens of the rollout at `index` of the batch.

    The first `context` of these tokens are attended to, but not trained on.
    """

    index: int
    context: int
    length: int

    @property
    def completion_length(self) -> int:
        """Number of tokens that count as the completion: one more than the starts."""
        return self.length - self.context


def estimate_policy_flops(policy: PolicyConfig, prompt: int, completion: int) -> float:
    """Count the floating-point operations of training the policy on one rollout, lengths in tokens.

    Two operations per weight and token, plus the attention scores.
    """
    tokens = prompt + completion
    attention = policy.hidden_size * policy.head_dim * 2 * (policy.num_heads + policy.num_groups)
    layer = attention + 3 * policy.hidden_size * policy.active_intermediate_size
    scores = 2 * policy.num_heads * policy.head_dim * tokens / 2  # causal: half of all pairs
    # Logits are computed for completion tokens only.
    forward = policy.num_layers * (layer + scores) * tokens + policy.hidden_size * policy.vocab_size * completion
    return POLICY_FORWARDS * 2.0 * forward


def estimate_drafter_flops(drafter: Drafter, passes: int, context: int, starts: int) -> float:
    """Count the floating-point operations of training on the last `starts` starts of `context` tokens.

    passes: draft tokens per start, see `online.py`. Targets cost nothing: the policy's pass has computed them. The
    operations of a drafter that makes fewer per second than the policy count for more.
    """
    return DRAFTER_FORWARDS * drafter.estimate_forward_flops(passes, context, starts) / drafter.relative_speed


def choose_slices(
    samples: Sequence[RolloutLengths],
    step: int,
    cost: Callable[[int, int], float],
    budget: float,
    most_starts: int | None = None,
) -> list[TrainingSlice]:
    """Choose training slices from the rollouts, in the order of `rotate_turns`, until the budget is spent.

    cost(tokens, starts): price of training on so many starts at the end of so many tokens; must rise with `starts`.
    budget: in the unit of `cost`. most_starts: of one slice, which bounds the memory that it needs; None: any number.
    Of a rollout with more starts a part is taken, from another place at each step.

    If the last rollout does not fit, a part of it is taken, from another place at each step. So long rollouts are
    trained on, too. If the context alone of the first rollout does not fit, a part of its beginning is taken. Returns
    the slices by ascending index.
    """
    found: list[TrainingSlice] = []
    left = budget
    for index in rotate_turns([sample.group_id for sample in samples], step):
        sample = samples[index]
        starts = sample.completion - 1
        tokens = sample.prompt + sample.completion
        if starts < 1:
            continue
        wanted = min(starts, most_starts or starts)
        # The most starts of this rollout that the rest of the budget pays for.
        count = bisect_right(range(1, wanted + 1), left, key=lambda n: cost(tokens, n))
        # Seeded by step and index, so that all ranks draw the same place.
        first = int(np.random.default_rng([step, index]).integers(starts - count + 1))
        if count == 0 and not found:
            count = bisect_right(range(1, wanted + 1), left, key=lambda n: cost(sample.prompt + n + 1, n))
            first = 0
            tokens = sample.prompt + count + 1
        if count == 0:
            break
        found.append(TrainingSlice(index, sample.prompt + first, sample.prompt + first + count + 1))
        left -= cost(tokens, count)
        if count < wanted:
            break
    return sorted(found, key=lambda lesson: lesson.index)


def split_into_updates(lessons: Sequence[TrainingSlice]) -> list[list[TrainingSlice]]:
    """Split a step's slices into updates. Without slices there is one empty update.

    The split does not depend on the number of ranks.
    """
    starts = sum(lesson.completion_length - 1 for lesson in lessons)
    count = max(1, min(MAX_UPDATES, len(lessons), round(starts / UPDATE_STARTS)))
    return [list(lessons[number::count]) for number in range(count)]


def rotate_turns(group_ids: Sequence[str], step: int) -> list[int]:
    """Order the rollouts of a batch: one rollout of each group, then the second of each, and so on.

    The order rotates with the step. With P groups of G rollouts, each group comes first once in P steps, and each
    rollout once in P * G steps.
    """
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(index)
    if not groups:
        return []
    members = list(groups.values())
    turn = step % len(members)
    place = step // len(members)
    rotated = [group[place % len(group) :] + group[: place % len(group)] for group in members[turn:] + members[:turn]]
    longest = max(len(group) for group in rotated)
    return [group[number] for number in range(longest) for group in rotated if number < len(group)]
