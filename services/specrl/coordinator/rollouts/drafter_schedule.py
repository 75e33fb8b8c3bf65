"""Decides how an initialisation of the drafter goes on: one more epoch, more answers, or its end. Pure functions.

    answers --epochs, at falling learning rates--> held-out acceptance length stays
            --better on its own answers than on held-out ones--> twice the answers, and so on --> end

The decision follows from the finished epochs, so an initialisation that was interrupted is decided alike. Only
`budgetS` adds the clock.

Called by `drafter_init.py` and by benchmarks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean

from specrl.formats.statistics.pass_rates import NORMAL_95
from specrl.records import DrafterEpoch, DrafterEpochMetrics, DrafterMetrics
from specrl.spec.trainer import DrafterInitialisation

LAST_RATE = 0.1
"""The learning rate falls linearly to this share of its start over `epochs` epochs."""

RATE_STEP = math.sqrt(LAST_RATE)
"""After an epoch that gained too little, the rate is at most this share of what it was: two such steps reach
LAST_RATE."""

UNTRAINED_LENGTH = 1.1
"""Up to this acceptance length, gains are not judged: a head that still learns is hardly ever accepted at first."""


class StopReason(StrEnum):
    """Why an initialisation ends."""

    NOTHING_HELD_OUT = "nothingHeldOut"
    """All epochs are trained, and no prompt is held out to judge them by."""
    LITTLE_GAIN = "littleGain"
    """Epochs gain little, and the drafter is as good on held-out answers as on its own."""
    ANSWERS_GAIN_LITTLE = "answersGainLittle"
    """Twice the answers gained little."""
    EPOCHS_SPENT = "epochsSpent"
    """All epochs are trained."""
    PROMPTS_SPENT = "promptsSpent"
    """More answers would help, but `maxPrompts` are answered."""
    TIME_SPENT = "timeSpent"
    """`budgetS` has passed."""


@dataclass(frozen=True)
class TrainEpoch:
    """Train this epoch next."""

    epoch: DrafterEpoch


@dataclass(frozen=True)
class AskForAnswers:
    """Sample answers until so many prompts are answered, then decide again."""

    prompts: int


@dataclass(frozen=True)
class Stop:
    """End the initialisation. An initialisation always trains one epoch first."""

    reason: StopReason


@dataclass(frozen=True)
class AnswersGiven:
    """What there is to learn from at present.

    prompts: that were answered. rollouts: answers that are trained on. held_out_drafts: drafts that the held-out
    acceptance is averaged over; 0: nothing is held out.
    """

    prompts: int
    rollouts: int
    held_out_drafts: int


@dataclass(frozen=True)
class AnswersPoint:
    """What so many answers gave. length: held-out acceptance length after the last epoch on them."""

    rollouts: int
    epochs: int
    length: float


@dataclass(frozen=True)
class Forecast:
    """What twice the answers would probably add to the acceptance length, with a 95 % interval."""

    gain: float
    low: float
    high: float


def choose_next(
    plan: DrafterInitialisation, finished: Sequence[DrafterEpochMetrics], answers: AnswersGiven, elapsed_s: float
) -> TrainEpoch | AskForAnswers | Stop:
    """Decide what follows these finished epochs. elapsed_s: seconds that the initialisation has taken."""
    current = [item for item in finished if item.epoch.rollouts == answers.rollouts]
    earlier = finished[: len(finished) - len(current)]
    before = max((length for length in map(_held_out_length, earlier) if length is not None), default=None)
    drops = _count_small_gains(current, float(plan.min_gain))
    is_settled = RATE_STEP**drops < LAST_RATE * 0.99
    if finished and plan.budget_s is not None and elapsed_s >= plan.budget_s:
        return Stop(StopReason.TIME_SPENT)
    if not is_settled and len(current) < plan.epochs:
        return TrainEpoch(_plan_epoch(plan.epochs, len(current), drops, answers.rollouts))
    reached = current[-1].held_out
    if reached is None:
        return Stop(StopReason.NOTHING_HELD_OUT)
    if before is not None and reached.acceptance_length - before < float(plan.min_gain):
        return Stop(StopReason.ANSWERS_GAIN_LITTLE)
    if not _needs_answers(current[-1], float(plan.min_gain), answers.held_out_drafts):
        return Stop(StopReason.LITTLE_GAIN if is_settled else StopReason.EPOCHS_SPENT)
    if answers.prompts >= plan.most_prompts:
        return Stop(StopReason.PROMPTS_SPENT)
    return AskForAnswers(min(2 * answers.prompts, plan.most_prompts))


def _held_out_length(item: DrafterEpochMetrics) -> float | None:
    return item.held_out.acceptance_length if item.held_out is not None else None


def _count_small_gains(current: Sequence[DrafterEpochMetrics], min_gain: float) -> int:
    """Count the epochs that gained less than min_gain over the best of those before them on the same answers."""
    lengths = [length for length in map(_held_out_length, current) if length is not None]
    bests = list(itertools.accumulate(lengths, max))
    return sum(
        length - best < min_gain
        for best, length in zip(bests, lengths[1:], strict=False)
        if best > UNTRAINED_LENGTH and min_gain > 0
    )


def _plan_epoch(epochs: int, number: int, drops: int, rollouts: int) -> DrafterEpoch:
    """Plan epoch `number`, counted from 0, of at most `epochs` on these answers."""
    highest = RATE_STEP**drops
    first, last = (1 - (1 - LAST_RATE) * place / epochs for place in (number, number + 1))
    # Total variation has almost no gradient for an untrained head.
    is_early = number < (epochs + 1) // 2 and drops == 0
    return DrafterEpoch(rollouts, min(highest, first), min(highest, last), is_early)


def _needs_answers(item: DrafterEpochMetrics, min_gain: float, held_out_drafts: int) -> bool:
    """Whether the drafter has learned its own answers by heart: it does clearly better on them than on others.

    Clearly: by more than min_gain, and by more than the 95 % error of the held-out acceptance length.
    """
    assert item.held_out is not None
    error = NORMAL_95 * estimate_error(item.held_out, held_out_drafts)
    return item.trained.acceptance_length - item.held_out.acceptance_length > max(min_gain, error)


def estimate_error(metrics: DrafterMetrics, drafts: int) -> float:
    """Estimate the standard error of an acceptance length that is a mean over the drafts from every token.

    A verification yields X tokens with P(X > j) = prod_(i <= j) a_i, so E[X^2] = 1 + sum_j (2 j + 1) P(X > j). Drafts
    from neighbouring tokens overlap. As many count as independent as there would be verifications.
    """
    length = metrics.acceptance_length
    second_moment = 1 + sum((2 * j + 1) * share for j, share in enumerate(metrics.accepted_per_position, 1))
    return math.sqrt(max(0.0, second_moment - length**2) * length / max(1, drafts))


def list_points(finished: Sequence[DrafterEpochMetrics]) -> list[AnswersPoint]:
    """Return one point for each number of answers, in order. Empty if nothing was held out."""
    points: dict[int, AnswersPoint] = {}
    for item in finished:
        rollouts = item.epoch.rollouts
        if item.held_out is not None:
            epochs = points[rollouts].epochs + 1 if rollouts in points else 1
            points[rollouts] = AnswersPoint(rollouts, epochs, item.held_out.acceptance_length)
    return list(points.values())


def forecast_doubling(points: Sequence[AnswersPoint], error: float) -> Forecast | None:
    """Estimate what twice the answers would add: the slope of a line through length against log2(answers).

    error: standard error of a point. If the points lie farther from the line than that, their own spread counts. All
    points have the same held-out answers, which makes the interval rather too wide; that gains shrink with the number
    of answers makes the estimate rather too high. None with fewer than two points.
    """
    if len(points) < 2:
        return None
    doublings = [math.log2(point.rollouts) for point in points]
    lengths = [point.length for point in points]
    mean_x, mean_y = fmean(doublings), fmean(lengths)
    spread = sum((x - mean_x) ** 2 for x in doublings)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(doublings, lengths, strict=True)) / spread
    if len(points) > 2:
        off = sum((y - mean_y - slope * (x - mean_x)) ** 2 for x, y in zip(doublings, lengths, strict=True))
        error = max(error, math.sqrt(off / (len(points) - 2)))
    half = NORMAL_95 * error / math.sqrt(spread)
    return Forecast(slope, slope - half, slope + half)
