"""One step of the run: the policy's updates on a batch, then the drafter's. Called by `backend.py`.

The step has two phases:
    logprob   compute log-probabilities of the reference; and the proximal ones, if `needs_logprob_pass`
    train     forward and backward passes and updates of the policy; then updates of the drafter, on states and logits
              of the first of these passes, which also finds the proximal log-probabilities if the first phase did not

Shapes: T sampled tokens of a micro-batch, N rollouts of the batch or entries of `SUMS`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import torch
import torch.distributed as dist

from specrl.batching import compute_advantages
from specrl.drafting import budget
from specrl.records import Batch, TrainMetrics
from specrl.records.rollout import FloatArray
from specrl.spec.trainer import KlPlace
from specrl.trainer.losses import divergence
from specrl.trainer.losses.policy_loss import SUMS, LossTerms, PolicyLoss, SampledTokens
from specrl.trainer.losses.sequences import Sequences
from specrl.trainer.megatron_backend.policy.lessons import Lesson, TaughtLessons
from specrl.trainer.megatron_backend.policy.tensors import MicroBatch
from specrl.trainer.megatron_backend.training import drafter_training, logprobs
from specrl.trainer.megatron_backend.training.batches import cut_micro_batches
from specrl.trainer.megatron_backend.training.models import RankModels
from specrl.trainer.memory.exhaustion import OF_DRAFTER, OF_PASSES, OF_STATE, report_exhaustion

# Computes the loss of a micro-batch from its number, and log-probabilities [T] and entropies [T] of its sampled tokens.
ComputeLoss = Callable[[int, torch.Tensor, torch.Tensor], LossTerms]


def train_policy_step(models: RankModels, batch: Batch) -> TrainMetrics:
    """Train one step; see `TrainerBackend.train_step`. The batch must have rollouts and be of the next step."""
    spec = models.spec
    groups = models.groups

    # Phase logprob.
    started = time.perf_counter()
    cuts = cut_micro_batches(models, batch.rollouts)
    proximal = logprobs.ProximalMeasures()
    with report_exhaustion("a pass for log-probabilities", OF_PASSES):
        if logprobs.needs_logprob_pass(spec.trainer):
            proximal = logprobs.compute_proximal(models, cuts)
        reference = logprobs.compute_reference(models, cuts)
    cuts = _subtract_divergence(models, batch, cuts, proximal.logprobs, reference)
    logprob_s = time.perf_counter() - started

    # Phase train.
    started = time.perf_counter()
    tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
    drafter = models.drafter if spec.trainer.drafter.online else None
    chosen = drafter_training.choose_step_lessons(models, drafter, batch) if drafter is not None else []
    parts = budget.split_into_updates(chosen)
    dealt = drafter_training.deal_lessons(models, drafter, batch.rollouts, parts) if drafter is not None else []
    lessons = drafter_training.sort_into_cuts(models, dealt, cuts)
    policy_loss = PolicyLoss(spec.trainer.loss, spec.generation.sampling.max_tokens, tokens, len(batch.rollouts))

    def compute_policy_loss(number: int, policy_T: torch.Tensor, entropy_T: torch.Tensor) -> LossTerms:
        proximal.keep_first(number, policy_T, entropy_T)
        cut = cuts[number]
        sampled = SampledTokens(
            proximal_T=proximal.logprobs[number],
            sampler_T=cut.sampler_T,
            advantage_T=cut.advantage_T,
            sequences=Sequences(cut.sequence_T, len(cut.indices)),
            reference_T=reference[number] if reference else None,
        )
        return policy_loss(policy_T, sampled)

    norms, found, taught = _make_updates(models, batch.step, cuts, compute_policy_loss, lessons)
    drafter_metrics = None
    if drafter is not None:
        with report_exhaustion("the drafter's updates", OF_DRAFTER):
            drafter_metrics = drafter_training.update_drafter(models, drafter, parts, dealt, taught)
    train_s = time.perf_counter() - started

    # Figures. Sums over this rank's tokens are reduced over ranks; means are taken afterwards.
    mismatch = [  # empty at all stages but the last
        divergence.measure_mismatch(proximal_T, cut.sampler_T, cut.is_current_T)
        for cut, proximal_T in zip(cuts, proximal.logprobs, strict=False)
    ]
    difference, kl, compared, entropy = groups.reduce_over_data(
        [
            sum(float(item.abs_sum) for item in mismatch),
            sum(float(item.kl_sum) for item in mismatch),
            sum(float(item.tokens) for item in mismatch),
            sum(float(entropy) for entropy in proximal.entropies),
        ]
    )
    (worst,) = groups.reduce_over_data(
        [max((float(item.abs_max) for item in mismatch), default=0.0)], dist.ReduceOp.MAX
    )
    seen = max(1, len(norms)) * tokens  # tokens over all updates: each sees the whole batch
    return TrainMetrics(
        loss=found["loss"] / max(1, len(norms)),
        grad_norm=norms[0] if norms else 0.0,
        learning_rate=models.learning_rate(batch.step),
        tokens=tokens,
        logprob_seconds=logprob_s,
        train_seconds=train_s,
        mismatch_mean_abs=difference / max(1, compared),
        mismatch_max_abs=worst,
        mismatch_kl=kl / max(1, compared),
        mismatch_tokens=int(compared),
        importance_weight_mean=found["weight"] / seen,
        clip_fraction=found["clipped"] / seen,
        entropy=entropy / tokens,
        effective_sample_size=divergence.compute_effective_sample_size(found["weight"], found["weight_square"], seen),
        drafter=drafter_metrics,
        clip_fraction_high=found["clipped_high"] / seen,
        importance_capped_fraction=found["bounded"] / seen,
        masked_fraction=found["masked"] / seen,
        reference_kl=found["reference_kl"] / seen if models.reference is not None else None,
        **_measure_sets(batch, tokens),
        updates=len(norms),
        is_skipped=models.state.skipped_in_a_row > 0,
    ).replace_non_finite()


def _measure_sets(batch: Batch, tokens: int) -> dict[str, float]:
    """Measure the sampling sets of a batch. Returns figures by name; none if its rollouts have no sets."""
    sets = [item.rollout.sets for item in batch.rollouts if item.rollout.sets is not None]
    if not sets:
        return {}
    return {
        "sampling_set_tokens": sum(len(item.ids_M) for item in sets) / tokens,
        "sampling_set_bytes": sum(item.size_bytes for item in sets) / tokens,
        "certain_fraction": sum(int((item.sizes_N == 1).sum()) for item in sets) / tokens,
    }


def _subtract_divergence(
    models: RankModels,
    batch: Batch,
    cuts: list[MicroBatch],
    proximal: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
) -> list[MicroBatch]:
    """Subtract the divergence from rewards, with referenceKl.place Reward, and recompute the advantages.

    Returns the micro-batches with these advantages; without change for any other place.
    """
    settings = models.spec.trainer.loss
    groups = models.groups
    kl = settings.reference_kl
    if kl is None or kl.place is not KlPlace.REWARD:
        return cuts
    # An advantage depends on the whole group or batch, so every rank needs the divergence of every rollout.
    costs_N = torch.zeros(len(batch.rollouts), dtype=torch.float64, device=groups.device)
    for cut, proximal_T, reference_T in zip(cuts, proximal, reference, strict=False):  # none before the last stage
        cost_T = divergence.estimate_reference_kl(proximal_T, reference_T, kl.estimator).double()
        costs_N[list(cut.indices)] = Sequences(cut.sequence_T, len(cut.indices)).sum_tokens(cost_T)
    dist.all_reduce(groups.broadcast_from_last_stage(costs_N), group=groups.data.group)
    # A divergence that is not finite is replaced here, since advantages must be finite. The step is skipped anyway: the
    # same log-probabilities make its gradients non-finite.
    charged_N = np.array([item.reward for item in batch.rollouts]) - float(kl.coefficient) * costs_N.cpu().numpy()
    charged_N = np.nan_to_num(charged_N, posinf=0.0, neginf=0.0).astype(np.float32)
    sizes = [len(list(group)) for _, group in groupby(batch.rollouts, lambda item: item.rollout.group_id)]
    rewards: list[FloatArray] = np.split(charged_N, np.cumsum(sizes)[:-1])
    advantage_N = torch.from_numpy(np.concatenate(compute_advantages(rewards, settings.advantages))).to(groups.device)
    return [replace(cut, advantage_T=advantage_N[list(cut.indices)][cut.sequence_T]) for cut in cuts]


def _make_updates(
    models: RankModels, step: int, cuts: Sequence[MicroBatch], loss: ComputeLoss, lessons: Sequence[Sequence[Lesson]]
) -> tuple[list[float], dict[str, float], TaughtLessons]:
    """Make the step's updates of the policy. Stops at the first whose gradients are not finite, on all ranks alike.

    Returns the gradient norms of the updates that were made, and `SUMS` summed over updates and ranks. Also returns
    this rank's lessons, with what the first update's passes kept for them.

    Raises TrainerFailed after too many consecutive skipped steps.
    """
    norms: list[float] = []
    taught: TaughtLessons = []
    sums_N = torch.zeros(len(SUMS), dtype=torch.float64, device=models.groups.device)
    is_skipped = False
    while len(norms) < models.spec.trainer.optimizer.updates_per_step and not is_skipped:
        # Only the first update keeps lessons: they must be of the version that the step starts from.
        with report_exhaustion("forward and backward passes", OF_PASSES):
            found_N, kept = _accumulate_gradients(models, cuts, loss, [] if norms else lessons)
        taught += kept
        with report_exhaustion("the optimizer's update", OF_STATE):
            norm = models.policy.update_weights(models.learning_rate(step))
        is_skipped = norm is None
        if norm is not None:
            norms.append(norm)
            sums_N += found_N
    models.count_updates(step, len(norms), is_skipped=is_skipped)
    sums = models.groups.reduce_over_data(sums_N.tolist())
    return norms, dict(zip(SUMS, sums, strict=True)), taught


def _accumulate_gradients(
    models: RankModels, cuts: Sequence[MicroBatch], loss: ComputeLoss, lessons: Sequence[Sequence[Lesson]]
) -> tuple[torch.Tensor, TaughtLessons]:
    """Compute the policy's gradients. Returns this rank's `SUMS`, and its lessons with what was kept for them."""
    models.policy.zero_gradients()
    sums_N = torch.zeros(len(SUMS), dtype=torch.float64, device=models.groups.device)

    def compute_and_sum(number: int, policy_T: torch.Tensor, entropy_T: torch.Tensor) -> torch.Tensor:
        terms = loss(number, policy_T, entropy_T)
        sums_N.add_(terms.sums_N)
        return terms.loss

    taught = models.policy.run_micro_batches(
        cuts, compute_and_sum, models.sampling_temperature, is_training=True, lessons=lessons
    )
    return sums_N, taught
