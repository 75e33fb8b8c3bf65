"""What the trainer says of its steps, as Prometheus metrics of rank 0. Nothing reads them to decide anything."""

from __future__ import annotations

from specrl.records import TrainMetrics
from specrl.telemetry import metrics


def show_step(step: int, trained: TrainMetrics) -> None:
    """A step is trained. One without tokens, or without an update, trained nothing, and has few figures."""
    metrics.TRAINER_STEP.set(step)
    metrics.TRAINER_STEPS_SKIPPED.inc(trained.is_skipped)
    if trained.tokens == 0 or trained.updates == 0:
        return
    metrics.TRAINER_STAGE_SECONDS.labels("logprob").observe(trained.logprob_seconds)
    metrics.TRAINER_STAGE_SECONDS.labels("train").observe(trained.train_seconds)
    metrics.TRAINER_TOKENS.inc(trained.tokens)
    metrics.TRAINER_LOSS.set(trained.loss)
    metrics.TRAINER_GRAD_NORM.set(trained.grad_norm)
    metrics.TRAINER_LEARNING_RATE.set(trained.learning_rate)
    metrics.TRAINER_ENTROPY.set(trained.entropy)
    metrics.TRAINER_EFFECTIVE_SAMPLE_SIZE.set(trained.effective_sample_size)
    metrics.TRAINER_IMPORTANCE_WEIGHT.set(trained.importance_weight_mean)
    metrics.TRAINER_CLIP_FRACTION.labels("low").set(trained.clip_fraction - trained.clip_fraction_high)
    metrics.TRAINER_CLIP_FRACTION.labels("high").set(trained.clip_fraction_high)
    metrics.TRAINER_CLIP_FRACTION.labels("importance").set(trained.importance_capped_fraction)
    metrics.TRAINER_MASKED_FRACTION.set(trained.masked_fraction)
    metrics.TRAINER_REFERENCE_KL.set(trained.reference_kl)
    if trained.drafter is not None:
        metrics.TRAINER_DRAFTER_GRAD_NORM.set(trained.drafter.grad_norm)
        for position, probability in enumerate(trained.drafter.acceptance_per_position):
            metrics.TRAINER_DRAFTER_ACCEPTANCE.labels(str(position)).set(probability)
