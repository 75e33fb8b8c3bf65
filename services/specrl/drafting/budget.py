"""Which of a step's tokens the drafter is trained on: as many as are paid for, another part of the batch at each step.

And in how many updates: a small model learns more from many short steps than from one good one (docs/decisions/0029).

Pure: lengths and the step's number in, the same lessons out on every rank and in every repetition. The price is
counted in floating-point operations, not in seconds, so that a run's result does not depend on the machine's mood.

A start is a position that the drafter drafts from (see `online.py`): a completion of T tokens has T - 1 of them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specrl.drafting.head import HeadConfig
from specrl.drafting.policy_config import PolicyConfig

POLICY_FORWARDS = 4  # of a step: log-probabilities, then forward and backward; a backward pass costs two forward ones
DRAFTER_FORWARDS = 3  # forward and backward
# Of the policy's own operations. The trainer's time then grows by at most 7 % on CPUs: by the operations' share, and by
# what does not shrink with it, the head's optimizer and its hidden states (benchmarks/adaptation.py).
ONLINE_SHARE = 0.03
UPDATE_STARTS = 100  # of an update, about: of fewer its gradient is noise, and too few rows share each weight
MOST_UPDATES = 16  # of a step


@dataclass(frozen=True)
class Sample:
    """What the choice is made by: a rollout's group and its lengths in tokens."""

    group_id: str
    prompt: int
    completion: int


@dataclass(frozen=True)
class Lesson:
    """A part of the rollout at `index` of the batch: its first `length` tokens, of which `context` are only read."""

    index: int
    context: int
    length: int

    @property
    def completion(self) -> int:
        """Tokens that are learnt from as a completion would be: one more than the starts."""
        return self.length - self.context


def policy_flops(policy: PolicyConfig, prompt: int, completion: int) -> float:
    """Floating-point operations of one rollout in a step of the policy: 2 for each weight and token, and attention."""
    tokens = prompt + completion
    attention = policy.hidden_size * policy.head_dim * 2 * (policy.num_heads + policy.num_groups)
    layer = attention + 3 * policy.hidden_size * policy.active_intermediate_size
    scores = 2 * policy.num_heads * policy.head_dim * tokens / 2  # causal: half of all pairs
    forward = policy.num_layers * (layer + scores) * tokens + policy.hidden_size * policy.vocab_size * completion
    return POLICY_FORWARDS * 2.0 * forward


def drafter_flops(head: HeadConfig, passes: int, context: int, starts: int) -> float:
    """Floating-point operations of training the head from `starts` starts at the end of `context` tokens."""
    policy, layer = head.policy, head.shape
    hidden = policy.hidden_size
    queries, keys = layer.num_heads * layer.head_dim, 2 * layer.num_groups * layer.head_dim
    everywhere = hidden * len(head.aux_layers) * hidden + 2 * hidden * keys
    a_pass = (
        2 * hidden * (queries + keys)
        + queries * hidden
        + 3 * hidden * layer.intermediate_size
        + hidden * head.draft_vocab_size
        + 2 * queries * max(0.0, context - starts / 2)
    )
    trained = everywhere * context + passes * a_pass * starts
    return 2.0 * (DRAFTER_FORWARDS * trained + hidden * policy.vocab_size * starts)


def choose_lessons(
    samples: Sequence[Sample], step: int, cost: Callable[[int, int], float], budget: float
) -> list[Lesson]:
    """Rollouts in turn, until cost(tokens, starts) of all of them reaches `budget`; the last one only in part.

    No rollout is too long to be learnt from: of one that does not fit, a stretch is taken, at another place each step.
    cost rises with the starts. Returned by ascending index.
    """
    found: list[Lesson] = []
    left = budget
    for index in turns([sample.group_id for sample in samples], step):
        sample = samples[index]
        starts, tokens = sample.completion - 1, sample.prompt + sample.completion
        if starts < 1:
            continue
        count = bisect_right(range(1, starts + 1), left, key=lambda n: cost(tokens, n))
        if count == 0:
            break
        first = int(np.random.default_rng([step, index]).integers(starts - count + 1))
        found.append(Lesson(index, sample.prompt + first, sample.prompt + first + count + 1))
        left -= cost(tokens, count)
        if count < starts:
            break
    return sorted(found, key=lambda lesson: lesson.index)


def updates(lessons: Sequence[Lesson]) -> list[list[Lesson]]:
    """The lessons of each update of a step, the same on every number of ranks; without lessons one update of none."""
    starts = sum(lesson.completion - 1 for lesson in lessons)
    count = max(1, min(MOST_UPDATES, len(lessons), round(starts / UPDATE_STARTS)))
    return [list(lessons[number::count]) for number in range(count)]


def turns(group_ids: Sequence[str], step: int) -> list[int]:
    """All rollouts of a batch, one of each group before the second of any; at each step another one comes first.

    With P groups of G rollouts every group is first within P steps, every rollout's place within P * G.
    """
    groups: dict[str, list[int]] = {}
    for index, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(index)
    if not groups:
        return []
    members = list(groups.values())
    turn, place = step % len(members), step // len(members)
    rotated = [group[place % len(group) :] + group[: place % len(group)] for group in members[turn:] + members[:turn]]
    longest = max(len(group) for group in rotated)
    return [group[number] for number in range(longest) for group in rotated if number < len(group)]
