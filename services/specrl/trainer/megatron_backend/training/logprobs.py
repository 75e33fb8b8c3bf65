"""Computes log-probabilities of sampled tokens, without gradient, at the run's sampling temperature.

Called by `policy_step.py` before a step's updates, and by `backend.py` for the call Score.

Shapes: T sampled tokens of a micro-batch, N of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from specrl.records import TrainRollout
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch
from specrl.trainer.megatron_backend.training.batches import cut_micro_batches
from specrl.trainer.megatron_backend.training.models import RankModels


def compute_proximal(models: RankModels, cuts: Sequence[MicroBatch]) -> tuple[list[torch.Tensor], float]:
    """Compute log-probabilities [T] of every micro-batch under the current policy, and the sum of entropies in nats.

    Only the last pipeline stage has them. Other stages return an empty list and 0.
    """
    found: list[torch.Tensor] = []
    entropies: list[float] = []

    def keep_logprobs(_number: int, logprob_T: torch.Tensor, entropy_T: torch.Tensor) -> None:
        found.append(logprob_T)
        entropies.append(float(entropy_T.double().sum()))

    models.policy.run_micro_batches(cuts, keep_logprobs, models.sampling_temperature)
    return found, sum(entropies)


def compute_reference(models: RankModels, cuts: Sequence[MicroBatch]) -> list[torch.Tensor]:
    """Compute log-probabilities [T] of every micro-batch under the reference.

    Returns an empty list if there is no reference, and at all stages but the last.
    """
    found: list[torch.Tensor] = []
    if models.reference is not None:

        def keep_reference(_number: int, logprob_T: torch.Tensor, _entropy_T: torch.Tensor) -> None:
            found.append(logprob_T)

        models.reference.run_micro_batches(cuts, keep_reference, models.sampling_temperature)
    return found


def compute_scores(models: RankModels, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
    """Compute log-probabilities [N] of each rollout's sampled tokens. Returns them at every rank."""
    groups = models.groups
    counts = [item.rollout.sampled_length for item in rollouts]
    ends = np.cumsum([0, *counts])
    # Each data parallel rank fills in its own rollouts. The sum over ranks is exact, since all others add zero.
    whole = torch.zeros(int(ends[-1]), device=groups.device)
    cuts = cut_micro_batches(models, rollouts)

    def keep_scores(number: int, logprob_T: torch.Tensor, _entropy_T: torch.Tensor) -> None:
        parts = logprob_T.split([counts[i] for i in cuts[number].indices])
        for index, part in zip(cuts[number].indices, parts, strict=True):
            whole[ends[index] : ends[index + 1]] = part

    models.policy.run_micro_batches(cuts, keep_scores, models.sampling_temperature)
    dist.all_reduce(groups.broadcast_from_last_stage(whole), group=groups.data.group)
    return [part.cpu().numpy() for part in torch.split(whole, counts)]
