"""Validates the rollouts of a batch, and splits a batch into this rank's micro-batches.

Called by every module of this package that runs the policy, and by `backend.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from specrl.errors import RecordInvalid
from specrl.models.policy_config import PolicyConfig
from specrl.records import TrainRollout
from specrl.spec.trainer import Routing
from specrl.trainer import micro_batches
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch, build_micro_batch
from specrl.trainer.megatron_backend.training.models import RankModels


def check_rollouts(rollouts: Sequence[TrainRollout], config: PolicyConfig) -> None:
    """Raise RecordInvalid, on all ranks alike, for rollouts that the forward pass would fail on."""
    if not rollouts:
        raise RecordInvalid("rollouts must not be empty, got none; send the groups of the step")
    for item in rollouts:
        item.check(config.max_length, config.vocab_size, config.experts_shape)


def check_experts(rollouts: Sequence[TrainRollout], routing: Routing) -> None:
    """Raise RecordInvalid for rollouts without experts if the run replays routing.

    Not called for a warm-up or Score, whose rollouts need none.
    """
    missing = [item.rollout.rollout_id for item in rollouts if item.rollout.experts_SLK is None and not item.is_outline]
    if missing and routing is Routing.REPLAY:
        raise RecordInvalid(
            f"rollouts must have the sampler's experts with trainer.routing Replay, got none in {missing[0]}; "
            "use replicas that were started with this run file"
        )


def check_sets(rollouts: Sequence[TrainRollout], *, is_truncated: bool) -> None:
    """Raise RecordInvalid for rollouts without sampling sets if the run samples with top-p or top-k.

    Not called for a warm-up or Score, whose rollouts may have been sampled otherwise.
    """
    if is_truncated:
        for item in rollouts:
            if not item.is_outline:
                item.rollout.check_recorded_sets()


def plan_cuts(models: RankModels, rollouts: Sequence[TrainRollout]) -> list[list[list[int]]]:
    """Plan the micro-batches of every data parallel rank: the indices of their rollouts. Only lengths matter."""
    return micro_batches.plan_batch(models.spec.trainer, _count_tokens(rollouts))


def cut_micro_batches(models: RankModels, rollouts: Sequence[TrainRollout]) -> list[MicroBatch]:
    """Split a batch into micro-batches. Returns those of this data parallel rank."""
    groups = models.groups
    context = groups.context.size
    cuts = plan_cuts(models, rollouts)[groups.data.rank]
    lengths = [micro_batches.compute_padded_length(length, context) for length in _count_tokens(rollouts)]
    # Context parallelism splits a pass into equal chunks, and sequence parallelism splits each rank's tokens.
    multiple = math.lcm(micro_batches.compute_padded_length(1, context), groups.tensor.size * context)
    sizes = micro_batches.compute_padded_sizes(cuts, lengths, multiple, is_even=groups.pipeline.size > 1)
    return [
        build_micro_batch(rollouts, indices, models.state.step, groups, tokens)
        for indices, tokens in zip(cuts, sizes, strict=True)
    ]


def _count_tokens(rollouts: Sequence[TrainRollout]) -> list[int]:
    """Count the tokens of each rollout, prompt plus completion."""
    return [len(item.prompt_token_ids) + item.rollout.total_length for item in rollouts]
