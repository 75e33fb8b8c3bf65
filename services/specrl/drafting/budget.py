"""Chooses the tokens of a step that the drafter is trained on, splits them into updates, and deals these out to ranks.

Each step trains on another part of its batch. It makes several small updates, because a small model learns more from
them than from one large update (docs/decisions/0029). All ranks wait for the slowest in every update. So a step trains
on many short slices instead of a few whole rollouts, and each update is dealt out evenly (docs/decisions/0059).

Pure: all depends only on lengths and the step's number, so all ranks and all repetitions choose alike. Slices and
updates do not depend on the number of ranks, so what the drafter learns does not, either. The budget is counted in
floating-point operations, not in seconds, so a run's result does not depend on machine load.

A start is a position that the drafter drafts from (see `online.py`). A completion of T tokens has T - 1 starts. A slice
has a context, which is everything before its first start: prompt, earlier turns and earlier tokens of the completion.
The drafter attends to all of it, as it does in vLLM, so the context's states are computed for every slice and get
gradients. Only the loss is limited to the slice's own starts.

Called by the trainer's drafter step.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np

from specrl.drafting.drafter import Drafter
from specrl.drafting.kind import STATE_BYTES, TARGET_BYTES
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
MAX_UPDATES = 12  # per step: with 16, the longest contexts of all updates cost too much of a small batch on 64 ranks
MIN_SLICE_STARTS = 32  # a turn is cut into equal slices of at most so many starts, or more (`choose_slice_starts`)


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


@dataclass(frozen=True)
class LessonCosts:
    """Costs of slices. passes: draft tokens per start. hidden_size, item_bytes: of the policy; bytes of a number."""

    drafter: Drafter
    passes: int
    hidden_size: int
    item_bytes: int

    def estimate_flops(self, tokens: int, starts: int) -> float:
        """See `estimate_drafter_flops`."""
        return estimate_drafter_flops(self.drafter, self.passes, tokens, starts)

    @property
    def target_bytes(self) -> int:
        """Bytes of the targets of one start."""
        return len(self.drafter.draft_ids_K) * self.item_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one token."""
        inputs = self.drafter.inputs
        return (len(inputs.aux_layers) + inputs.embedding + inputs.normed) * self.hidden_size * self.item_bytes


def choose_step_slices(
    costs: LessonCosts,
    samples: Sequence[RolloutLengths],
    step: int,
    policy_flops: float,
    token_budget: int | None = None,
) -> list[TrainingSlice]:
    """Choose the training slices of a step, within its budget: a number of starts, or else `ONLINE_SHARE`.

    policy_flops: of the policy in this step. In both cases targets and states keep within `TARGET_BYTES` and
    `STATE_BYTES`.
    """
    budget = ONLINE_SHARE * policy_flops if token_budget is None else token_budget

    def estimate_cost(tokens: int, starts: int) -> float:
        price = costs.estimate_flops(tokens, starts) if token_budget is None else starts
        memory = max(starts * costs.target_bytes / TARGET_BYTES, tokens * costs.state_bytes / STATE_BYTES)
        return max(price, budget * memory)

    slice_starts = choose_slice_starts(samples, costs.estimate_flops)
    most_starts = min(slice_starts, costs.drafter.limits.starts or slice_starts)
    return choose_slices(samples, step, estimate_cost, budget, most_starts)


def choose_slice_starts(samples: Sequence[RolloutLengths], cost: Callable[[int, int], float]) -> int:
    """Choose how many starts a slice of this batch has: as many as cost what their context costs, on average.

    With fewer, most operations would be of contexts; with more, ranks could not share an update evenly.
    cost(tokens, starts): as in `choose_slices`.
    """
    context = round(fmean(sample.prompt + sample.completion / 2 for sample in samples))
    larger = range(MIN_SLICE_STARTS + 1, max(sample.completion for sample in samples))
    limit = 2 * cost(context, 0)
    return MIN_SLICE_STARTS + bisect_right(larger, limit, key=lambda n: cost(context + n, n))


def choose_slices(
    samples: Sequence[RolloutLengths],
    step: int,
    cost: Callable[[int, int], float],
    budget: float,
    most_starts: int | None = None,
) -> list[TrainingSlice]:
    """Choose training slices from the rollouts, in the order of `rotate_turns`, until the budget is spent.

    cost(tokens, starts): price of training on so many starts at the end of so many tokens; must rise with `starts`.
    budget: in the unit of `cost`. most_starts: of one slice; None: any number.

    A rollout with more starts is cut into slices of equal length. It gives one of them, another at each step. Once all
    rollouts have given one, each gives the next. Of the last slice a part is taken that the budget pays for. If the
    context alone of the first slice does not fit, a part of the rollout's beginning is taken. Returns the slices by
    ascending index, then by place.
    """
    found: list[TrainingSlice] = []
    left = budget
    for index, first, end in _list_slices(samples, step, most_starts):
        wanted = range(1, end - first + 1)
        # The most starts of this slice that the rest of the budget pays for.
        tokens = end + 1
        count = bisect_right(wanted, left, key=lambda n: cost(tokens, n))
        if count == 0 and not found:
            prompt = samples[index].prompt
            count = bisect_right(wanted, left, key=lambda n: cost(prompt + n + 1, n))
            tokens = prompt + count + 1
        else:
            tokens -= _draw_place(step, index, len(wanted) - count + 1)
        if count == 0:
            break
        found.append(TrainingSlice(index, tokens - count - 1, tokens))
        left -= cost(tokens, count)
        if count < len(wanted):
            break
    return sorted(found, key=lambda lesson: (lesson.index, lesson.context))


def _list_slices(
    samples: Sequence[RolloutLengths], step: int, most_starts: int | None
) -> Iterator[tuple[int, int, int]]:
    """Yield all slices in the order of training: index, tokens of context, tokens of context and starts."""
    counts = [-(-(sample.completion - 1) // (most_starts or max(1, sample.completion))) for sample in samples]
    order = rotate_turns([sample.group_id for sample in samples], step)
    for turn in range(max(counts, default=0)):
        for index in order:
            if turn < counts[index]:
                place = (_draw_place(step, index, counts[index]) + turn) % counts[index]
                starts = samples[index].completion - 1
                first, end = (samples[index].prompt + starts * edge // counts[index] for edge in (place, place + 1))
                yield index, first, end


def _draw_place(step: int, index: int, places: int) -> int:
    """Draw a number below `places`, the same one on all ranks."""
    return int(np.random.default_rng([step, index]).integers(places))


def split_into_updates(lessons: Sequence[TrainingSlice]) -> list[list[TrainingSlice]]:
    """Split a step's slices into updates. Without slices there is one empty update.

    Neighbours are in different updates. The split does not depend on the number of ranks.
    """
    starts = sum(lesson.completion_length - 1 for lesson in lessons)
    count = max(1, min(MAX_UPDATES, len(lessons), round(starts / UPDATE_STARTS)))
    return [list(lessons[number::count]) for number in range(count)]


def deal_update(
    costs: Sequence[float], homes: Sequence[int], replicas: int, learners: int, *, may_move: bool
) -> list[tuple[int, int]]:
    """Deal the slices of one update out, so that no rank has much more to do than the others.

    costs: of each slice. homes: the data parallel replica that has each slice's states. learners: ranks of a replica
    that share its slices. Returns the replica that learns from each slice, and the number of the learner in it.

    A slice stays at home, unless its learner would then have more than an equal share, and more than the largest slice
    costs. may_move: otherwise it always stays.
    """
    limit = max(sum(costs) / (replicas * learners), *costs, 0.0) if may_move else math.inf
    loads = {(replica, learner): 0.0 for replica in range(replicas) for learner in range(learners)}
    dealt: dict[int, tuple[int, int]] = {}
    for number in sorted(range(len(costs)), key=lambda n: (-costs[n], n)):
        at_home = [(homes[number], learner) for learner in range(learners)]
        place = min(at_home, key=lambda it: (loads[it], it))
        if loads[place] + costs[number] > limit:
            place = min(loads, key=lambda it: (loads[it], it))
        loads[place] += costs[number]
        dealt[number] = place
    return [dealt[number] for number in range(len(costs))]


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
