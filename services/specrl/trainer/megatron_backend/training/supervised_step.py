"""One supervised step: an optimizer step on the cross-entropy of completions. Called by `backend.py` for `trainer/sft`.

Shapes: T sampled tokens of a micro-batch.
"""

from __future__ import annotations

import time

import torch

from specrl.records import Batch
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.megatron_backend.training.batches import cut_micro_batches
from specrl.trainer.megatron_backend.training.models import RankModels


def train_supervised_step(models: RankModels, batch: Batch) -> SupervisedMetrics:
    """Train one step; see `TrainerBackend.train_supervised`. The batch must have rollouts and be of the next step."""
    started = time.perf_counter()
    policy = models.policy
    cuts = cut_micro_batches(models, batch.rollouts)
    tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
    nats = torch.zeros((), dtype=torch.float64, device=models.groups.device)

    def compute_cross_entropy(_number: int, logprob_T: torch.Tensor, _entropy_T: torch.Tensor) -> torch.Tensor:
        found = -logprob_T.sum()
        nats.add_(found.detach())
        return found / tokens  # tokens of the whole batch: gradients are summed over ranks

    policy.zero_gradients()
    # Temperature 1: given completions were not sampled at the run's temperature.
    policy.run_micro_batches(cuts, compute_cross_entropy, temperature=1.0, is_training=True)
    rate = models.learning_rate(batch.step)
    norm = policy.update_weights(rate)
    models.count_updates(batch.step, 0 if norm is None else 1, is_skipped=norm is None)
    (total,) = models.groups.reduce_over_data([float(nats)])
    seconds = time.perf_counter() - started
    if norm is None:
        return SupervisedMetrics(0.0, 0.0, rate, tokens, seconds, is_skipped=True)
    return SupervisedMetrics(total / tokens, norm, rate, tokens, seconds)
