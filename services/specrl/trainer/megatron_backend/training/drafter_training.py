"""Trains the drafter in every step of the policy, and measures it.

In a step it learns from states and logits of the step's own forward passes: `choose_step_lessons`, `deal_lessons` and
`update_drafter`, called by `policy_step.py`. Before the first step it learns from extra passes (`initialisation.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import structlog
import torch
import torch.distributed as dist

from specrl.drafting import budget
from specrl.drafting.budget import LessonCosts, TrainingSlice
from specrl.drafting.online import DrafterTrainer, combine_updates
from specrl.drafting.packing import LessonBatch
from specrl.drafting.registry import KINDS
from specrl.errors import CheckpointInvalid
from specrl.models.policy_config import PolicyConfig
from specrl.records import Batch, DrafterMetrics, TrainRollout
from specrl.trainer.megatron_backend.policy.lessons import Lesson, TaughtLessons, count_learners
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch
from specrl.trainer.megatron_backend.training.batches import check_rollouts, cut_micro_batches, plan_cuts
from specrl.trainer.megatron_backend.training.models import RankModels
from specrl.trainer.megatron_backend.training.turns import count_turn_tokens, list_turns

log = structlog.get_logger(__name__)

# -- beside a step -----------------------------------------------------------------------------------------------------


def choose_step_lessons(models: RankModels, drafter: DrafterTrainer, batch: Batch) -> list[TrainingSlice]:
    """Choose the lessons that the drafter learns from in this step, within its budget. Equal at every rank."""
    turns = [turn for index, item in enumerate(batch.rollouts) for turn in list_turns(index, item)]
    samples = [
        budget.RolloutLengths(batch.rollouts[turn.index].rollout.group_id, turn.context, turn.completion_length)
        for turn in turns
    ]
    token_budget = models.spec.trainer.drafter.token_budget
    flops = sum(_estimate_policy_flops(models.config, item) for item in batch.rollouts)
    chosen = budget.choose_step_slices(
        LessonCosts(drafter.model, drafter.passes, models.config.hidden_size, models.policy.dtype.itemsize),
        samples,
        batch.step,
        flops,
        token_budget,
    )
    if not chosen and models.groups.rank == 0 and any(sample.completion > 1 for sample in samples):
        log.warning("drafter_budget_exceeded", step=batch.step, token_budget=token_budget)
    return [replace(lesson, index=turns[lesson.index].index) for lesson in chosen]


def _estimate_policy_flops(config: PolicyConfig, item: TrainRollout) -> float:
    """Estimate the policy's floating point operations for one rollout in a step."""
    # Tool output is computed as the prompt is: it predicts no sampled token.
    sampled = item.rollout.sampled_length
    given = len(item.prompt_token_ids) + item.rollout.total_length - sampled
    return budget.estimate_policy_flops(config, given, sampled)


def deal_lessons(
    models: RankModels,
    drafter: DrafterTrainer,
    rollouts: Sequence[TrainRollout],
    parts: Sequence[Sequence[TrainingSlice]],
    *,
    may_move: bool = True,
) -> list[Lesson]:
    """Deal lessons over all ranks. Equal at every rank.

    parts: the lessons by update. Each part is dealt out by itself, so that the ranks share the work of every update.
    may_move: to another replica than the one whose passes have the lesson's states.
    """
    places = {
        index: (home, cut, row)
        for home, cuts in enumerate(plan_cuts(models, rollouts))
        for cut, indices in enumerate(cuts)
        for row, index in enumerate(indices)
    }
    learners = count_learners(drafter.model, models.groups)
    found = []
    for part in parts:
        costs = [
            budget.estimate_drafter_flops(drafter.model, drafter.passes, item.length, item.completion_length - 1)
            for item in part
        ]
        homes = [places[item.index][0] for item in part]
        dealt = budget.deal_update(costs, homes, models.groups.data.size, learners, may_move=may_move)
        found += [Lesson(*places[item.index], item, *to) for item, to in zip(part, dealt, strict=True)]
    return found


def sort_into_cuts(models: RankModels, lessons: Sequence[Lesson], cuts: Sequence[MicroBatch]) -> list[list[Lesson]]:
    """Sort the lessons whose states this replica's passes have into its micro-batches."""
    found: list[list[Lesson]] = [[] for _ in cuts]
    for lesson in lessons:
        if lesson.home == models.groups.data.rank:
            found[lesson.cut].append(lesson)
    return found


def update_drafter(
    models: RankModels,
    drafter: DrafterTrainer,
    parts: Sequence[Sequence[TrainingSlice]],
    dealt: Sequence[Lesson],
    taught: TaughtLessons,
) -> DrafterMetrics:
    """Make the step's updates of the drafter, each on a part of the lessons. A collective of all ranks.

    parts: of all ranks, by update. dealt: of all ranks. taught: what this rank's passes have kept.
    """
    taught = models.policy.exchange_lessons(taught, dealt)
    done = []
    for part in parts:
        drafter.begin_update([lesson.completion_length for lesson in part])
        chosen = set(part)
        rows = [([i for i, lesson in enumerate(some) if lesson.slice in chosen], batch) for some, batch in taught]
        held = [batch.select_sequences(places) for places, batch in rows if places]
        if held:
            drafter.accumulate_gradients(LessonBatch.join_batches(held))
        done.append(drafter.finish_update(group=dist.group.WORLD))
    return combine_updates(done)


# -- outside of a step ------------------------------------------------------------------------------------------------


@torch.no_grad()
def evaluate_drafter(models: RankModels, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
    """See `TrainerBackend.evaluate_drafter`."""
    drafter = require_drafter(models, rollouts)
    drafter.begin_update(count_turn_tokens(rollouts))
    for batch in collect_turns(models, drafter, rollouts):
        drafter.accumulate_gradients(batch)
    return combine_updates([drafter.finish_measurement(dist.group.WORLD)])


def collect_turns(
    models: RankModels, drafter: DrafterTrainer, rollouts: Sequence[TrainRollout]
) -> Iterator[LessonBatch]:
    """Run the policy, and yield this rank's share of the rollouts' turns as lessons. A collective.

    A few micro-batches at a time, because the logits of all rollouts may be larger than memory.
    """
    cuts = cut_micro_batches(models, rollouts)
    turns = [turn for index, item in enumerate(rollouts) for turn in list_turns(index, item)]
    # Where the states are: an initialisation goes through all turns, and so gives the ranks equal shares anyway.
    lessons = sort_into_cuts(models, deal_lessons(models, drafter, rollouts, [turns], may_move=False), cuts)
    together = models.groups.pipeline.size  # fewer would leave stages idle, and Megatron's interleaved schedule fails
    for first in range(0, len(cuts), together):
        some = slice(first, first + together)
        taught = models.policy.run_micro_batches(cuts[some], None, models.sampling_temperature, lessons=lessons[some])
        yield from (batch for _, batch in taught)


def require_drafter(models: RankModels, rollouts: Sequence[TrainRollout]) -> DrafterTrainer:
    """Check the rollouts and return the drafter. Raises RecordInvalid, and CheckpointInvalid if there is no drafter."""
    check_rollouts(rollouts, models.config)
    if models.drafter is None:
        raise CheckpointInvalid(
            f"generation.speculation must be {' or '.join(KINDS)} to train a drafter, got "
            f"{models.spec.generation.speculation.kind}; change the run file"
        )
    return models.drafter
