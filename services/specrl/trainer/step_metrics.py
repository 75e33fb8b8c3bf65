"""Exports a trained step's figures as Prometheus metrics, at rank 0. Write-only: no decision reads them.

Called by `service.py` after each step.
"""

from __future__ import annotations

from specrl.records import TrainMetrics
from specrl.telemetry import metrics


def export_step(step: int, trained: TrainMetrics) -> None:
    """Set the metrics of a step that was trained or skipped."""
    metrics.TRAINER_STEP.set(step)
    metrics.TRAINER_STEPS_SKIPPED.inc(trained.is_skipped)
    # Such a step trained nothing. Its zeros would look like measurements.
    if trained.tokens == 0 or trained.updates == 0:
        return
    metrics.TRAINER_PHASE_SECONDS.labels("logprob").observe(trained.logprob_seconds)
    metrics.TRAINER_PHASE_SECONDS.labels("train").observe(trained.train_seconds)
    metrics.TRAINER_TOKENS.inc(trained.tokens)
    for name, value in trained.known_values().items():
        if name in metrics.TRAINER_FIGURES:
            metrics.TRAINER_FIGURES[name].set(value)
    # clip_fraction counts both bounds of the objective's clip.
    metrics.TRAINER_CLIP_FRACTION.labels("low").set(trained.clip_fraction - trained.clip_fraction_high)
    metrics.TRAINER_CLIP_FRACTION.labels("high").set(trained.clip_fraction_high)
    metrics.TRAINER_CLIP_FRACTION.labels("importance").set(trained.importance_capped_fraction)
    if trained.drafter is not None:
        metrics.TRAINER_DRAFTER_GRAD_NORM.set(trained.drafter.grad_norm)
        for position, probability in enumerate(trained.drafter.acceptance_per_position):
            metrics.TRAINER_DRAFTER_ACCEPTANCE.labels(str(position)).set(probability)
