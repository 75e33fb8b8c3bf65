"""Computes log-probabilities of sampled tokens, without gradient, at the run's sampling temperature.

Called by `policy_step.py` before a step's updates, where they are needed then, and by `backend.py` for the call Score.

Shapes: T sampled tokens of a micro-batch, N of one rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from specrl.records import TrainRollout
from specrl.spec.trainer import KlPlace, Trainer
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch
from specrl.trainer.megatron_backend.training.batches import cut_micro_batches
from specrl.trainer.megatron_backend.training.models import RankModels


@dataclass
class ProximalMeasures:
    """What the policy that a step starts from finds, of each micro-batch, at the last pipeline stage.

    logprobs: [T] of each micro-batch, without gradient. entropies: of each, the sum over its tokens, in nats.
    """

    logprobs: list[torch.Tensor] = field(default_factory=list)
    entropies: list[torch.Tensor] = field(default_factory=list)

    def keep_first(self, number: int, logprob_T: torch.Tensor, entropy_T: torch.Tensor) -> None:
        """Keep what the first pass over a micro-batch finds. Later passes are of a policy that has been updated."""
        if number == len(self.logprobs):
            self.logprobs.append(logprob_T.detach())
            self.entropies.append(entropy_T.double().sum())


def needs_logprob_pass(trainer: Trainer) -> bool:
    """Whether a step computes proximal log-probabilities before its updates, in a pass of its own.

    In the first update they equal the policy's, which the training pass computes. Weights and masks need those of whole
    rollouts, and a micro-batch has whole rollouts. But all updates share them, and so do the advantages of a batch, if
    rewards contain the divergence.
    """
    kl = trainer.loss.reference_kl
    return trainer.optimizer.updates_per_step > 1 or (kl is not None and kl.place is KlPlace.REWARD)


def compute_proximal(models: RankModels, cuts: Sequence[MicroBatch]) -> ProximalMeasures:
    """Measure every micro-batch under the current policy."""
    found = ProximalMeasures()
    models.policy.run_micro_batches(cuts, found.keep_first, models.sampling_temperature)
    return found


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
