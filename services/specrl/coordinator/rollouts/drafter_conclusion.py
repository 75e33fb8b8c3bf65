"""Says how a drafter's initialisation went: a report, with one sentence for people. Called by `drafter_init.py`."""

from __future__ import annotations

from collections.abc import Sequence

from specrl.coordinator.rollouts.drafter_schedule import (
    AnswersGiven,
    AnswersPoint,
    Forecast,
    StopReason,
    estimate_error,
    forecast_doubling,
    list_points,
)
from specrl.formats.reports import DrafterAnswersPoint, DrafterInitReport
from specrl.formats.statistics.pass_rates import NORMAL_95
from specrl.records import DrafterEpochMetrics, DrafterMetrics
from specrl.spec.trainer import DrafterInitialisation

_FIELD = "trainer.drafter.initialisation"


def build_report(
    plan: DrafterInitialisation,
    finished: Sequence[DrafterEpochMetrics],
    answers: AnswersGiven,
    held_out_prompts: int,
    reason: StopReason,
) -> DrafterInitReport:
    """Build the report of an initialisation that has ended. finished: at least one epoch."""
    last = finished[-1]
    points = list_points(finished)
    error = estimate_error(last.held_out, answers.held_out_drafts) if last.held_out is not None else 0.0
    forecast = forecast_doubling(points, error)
    held_out = [item.held_out for item in finished if item.held_out is not None]
    return DrafterInitReport(
        rollouts=last.epoch.rollouts,
        loss_per_epoch=[round(item.trained.loss, 4) for item in finished],
        held_out_length_per_epoch=[round(item.acceptance_length, 3) for item in held_out],
        trained_accepted_per_position=_round_shares(last.trained),
        trained_acceptance_length=round(last.trained.acceptance_length, 3),
        held_out_prompts=held_out_prompts,
        held_out_accepted_per_position=_round_shares(last.held_out) if last.held_out is not None else [],
        held_out_acceptance_length=round(last.held_out.acceptance_length, 3) if last.held_out is not None else None,
        held_out_error=round(NORMAL_95 * error, 3) if last.held_out is not None else None,
        points=[
            DrafterAnswersPoint(rollouts=it.rollouts, epochs=it.epochs, held_out_acceptance_length=round(it.length, 3))
            for it in points
        ],
        stop_reason=reason.value,
        expected_gain=round(forecast.gain, 3) if forecast is not None else None,
        expected_gain_low=round(forecast.low, 3) if forecast is not None else None,
        expected_gain_high=round(forecast.high, 3) if forecast is not None else None,
        conclusion="; ".join(
            (
                _describe_reached(last, len(finished), held_out_prompts, NORMAL_95 * error),
                f"it ended because {_describe_reason(plan, reason, last)}",
                _describe_forecast(points, forecast),
            )
        ),
    )


def _round_shares(metrics: DrafterMetrics) -> list[float]:
    return [round(share, 4) for share in metrics.accepted_per_position]


def _describe_reached(last: DrafterEpochMetrics, epochs: int, held_out_prompts: int, half: float) -> str:
    trained_on = f"{epochs} epochs, the last on {last.epoch.rollouts} answers"
    if last.held_out is None:
        return (
            f"the drafter reached acceptance length {last.trained.acceptance_length:.2f} on its own answers "
            f"after {trained_on}"
        )
    return (
        f"the drafter reached acceptance length {last.held_out.acceptance_length:.2f} +- {half:.2f} on "
        f"{held_out_prompts} held-out prompts after {trained_on}"
    )


def _describe_reason(plan: DrafterInitialisation, reason: StopReason, last: DrafterEpochMetrics) -> str:
    own = f"{last.trained.acceptance_length:.2f} on its own answers"
    gain = f"less than {_FIELD}.minGain={plan.min_gain}"
    match reason:
        case StopReason.NOTHING_HELD_OUT:
            return f"all {plan.epochs} epochs are trained (nothing is held out: {_FIELD}.heldOut)"
        case StopReason.LITTLE_GAIN:
            return f"epochs gained {gain}, and it has only {own}, so that more answers would hardly help"
        case StopReason.ANSWERS_GAIN_LITTLE:
            return f"the last increase of answers gained {gain}"
        case StopReason.EPOCHS_SPENT:
            return f"{_FIELD}.epochs={plan.epochs} are trained"
        case StopReason.PROMPTS_SPENT:
            return (
                f"{_FIELD}.maxPrompts={plan.most_prompts} are answered, although it has {own}, so that more would help"
            )
        case StopReason.TIME_SPENT:
            return f"{_FIELD}.budgetS={plan.budget_s} s have passed"


def _describe_forecast(points: Sequence[AnswersPoint], forecast: Forecast | None) -> str:
    if forecast is None:
        return "what twice the answers would bring is not known from one number of answers"
    measured = " and ".join(f"{point.length:.2f} with {point.rollouts}" for point in points)
    return (
        f"twice the answers would probably bring {forecast.gain:+.2f} ({forecast.low:+.2f} to {forecast.high:+.2f}), "
        f"by a line through {measured} answers"
    )
