"""When the initialisation of a drafter goes on, asks for more answers, or ends; and what it says at its end."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import pairwise

import numpy as np
import pytest

from specrl.coordinator.rollouts.drafter_conclusion import build_report
from specrl.coordinator.rollouts.drafter_init import PROGRESS_EVERY_S, AnswerProgress, describe_training
from specrl.coordinator.rollouts.drafter_schedule import (
    LAST_RATE,
    AnswersGiven,
    AnswersPoint,
    AskForAnswers,
    Forecast,
    Stop,
    StopReason,
    TrainEpoch,
    choose_next,
    estimate_error,
    forecast_doubling,
    list_points,
)
from specrl.formats.statistics.pass_rates import NORMAL_95
from specrl.records import DrafterEpoch, DrafterEpochMetrics, DrafterMetrics
from specrl.spec.trainer import DrafterInitialisation

DRAFTS = 4000  # held-out drafts; with so many the error of an acceptance length is about 0.05


def of_length(length: float) -> DrafterMetrics:
    """Metrics with this acceptance length, at k = 1."""
    return DrafterMetrics(3.0, 1.0, (length - 1,), 2.0)


def plan_of(**fields: object) -> DrafterInitialisation:
    return DrafterInitialisation.model_validate({"prompts": 100, "epochs": 8, "minGain": "0.02"} | fields)


def run_rule(
    plan: DrafterInitialisation, lengths: Callable[[int, int], tuple[float, float | None]]
) -> tuple[list[DrafterEpochMetrics], list[int], StopReason]:
    """Follow the rule to its end.

    lengths: acceptance length on the answers trained on and on held-out ones, by number of answers and of the epoch on
    them. Returns the epochs, the numbers of prompts, and why it ended.
    """
    finished: list[DrafterEpochMetrics] = []
    prompts = [plan.prompts]
    for _ in range(1000):
        rollouts = prompts[-1] - 10
        decision = choose_next(plan, finished, AnswersGiven(prompts[-1], rollouts, DRAFTS), 2.0 * len(finished))
        match decision:
            case Stop(reason):
                return finished, prompts, reason
            case AskForAnswers(count):
                prompts.append(count)
            case TrainEpoch(epoch):
                assert epoch.rollouts == rollouts
                number = sum(item.epoch.rollouts == rollouts for item in finished)
                own, other = lengths(rollouts, number)
                held_out = of_length(other) if other is not None else None
                finished.append(DrafterEpochMetrics(epoch, of_length(own), held_out))
    pytest.fail("the rule does not end")


def test_epochs_go_on_while_they_gain_and_end_at_the_budget() -> None:
    finished, _, reason = run_rule(plan_of(), lambda _, number: (1.3 + number / 20, 1.3 + number / 20))
    assert (len(finished), reason) == (8, StopReason.EPOCHS_SPENT)
    # The rate falls linearly, without a gap between epochs.
    assert finished[0].epoch.first_rate == 1
    assert finished[-1].epoch.last_rate == pytest.approx(LAST_RATE)
    assert all(one.epoch.last_rate == other.epoch.first_rate for one, other in pairwise(finished))
    assert [item.epoch.uses_cross_entropy for item in finished] == [True] * 4 + [False] * 4


def test_three_epochs_that_gain_little_end_the_training_at_a_tenth_of_the_rate() -> None:
    finished, prompts, reason = run_rule(plan_of(), lambda _, number: (1.6, min(1.4 + number / 10, 1.6)))
    assert (len(finished), prompts, reason) == (6, [100], StopReason.LITTLE_GAIN)
    assert [round(item.epoch.first_rate, 2) for item in finished][-2:] == [0.32, 0.1]
    assert not finished[-1].epoch.uses_cross_entropy


def test_untrained_head_is_not_given_up_while_nothing_of_it_is_accepted() -> None:
    def lengths(_: int, number: int) -> tuple[float, float]:
        return (1.0, 1.0) if number < 5 else (1.5, 1.5)

    finished, _, _ = run_rule(plan_of(), lengths)
    assert finished[-1].held_out == of_length(1.5)


def test_gain_of_zero_asks_for_every_epoch() -> None:
    finished, _, _ = run_rule(plan_of(minGain="0", maxPrompts=100), lambda _, number: (1.6, 1.6 - number / 100))
    assert len(finished) == 8


@pytest.mark.parametrize(("most", "expected"), [(None, [100, 200, 400]), (300, [100, 200, 300]), (100, [100])])
def test_drafter_that_knows_its_own_answers_by_heart_gets_twice_as_many(most: int | None, expected: list[int]) -> None:
    plan = plan_of(maxPrompts=most)
    finished, prompts, reason = run_rule(plan, lambda count, _: (2.5, 1.2 + math.log10(count) / 3))
    assert (prompts, reason) == (expected, StopReason.PROMPTS_SPENT)
    assert len(finished) <= plan.most_epochs
    assert [item.epoch.first_rate == 1 for item in finished].count(True) == len(expected)


def test_no_more_answers_are_asked_for_if_twice_as_many_gained_little() -> None:
    _, prompts, reason = run_rule(plan_of(), lambda _, number: (2.5, 1.5))
    assert (prompts, reason) == ([100, 200], StopReason.ANSWERS_GAIN_LITTLE)


def test_gap_within_the_error_of_few_held_out_drafts_asks_for_nothing() -> None:
    plan = plan_of(epochs=1)
    finished = [DrafterEpochMetrics(DrafterEpoch(90, 1, 0.1), of_length(1.6), of_length(1.5))]
    decisions = [choose_next(plan, finished, AnswersGiven(100, 90, drafts), 0) for drafts in (30, DRAFTS)]
    assert decisions == [Stop(StopReason.EPOCHS_SPENT), AskForAnswers(200)]


def test_without_held_out_prompts_all_epochs_are_trained() -> None:
    finished, prompts, reason = run_rule(plan_of(heldOut="0"), lambda *_: (1.6, None))
    assert (len(finished), prompts, reason) == (8, [100], StopReason.NOTHING_HELD_OUT)


def test_no_epoch_begins_after_the_time_is_spent() -> None:
    finished, _, reason = run_rule(plan_of(budgetS=5), lambda _, number: (1.3 + number, 1.3 + number))
    assert (len(finished), reason) == (3, StopReason.TIME_SPENT)  # 2 s each; the first is always trained
    assert isinstance(choose_next(plan_of(budgetS=5), [], AnswersGiven(100, 90, DRAFTS), 99), TrainEpoch)


def test_error_of_an_acceptance_length_is_that_of_independent_verifications() -> None:
    metrics = DrafterMetrics(1.0, 1.0, (0.6, 0.5, 0.4), 0.0)
    generator = np.random.default_rng(1)
    accepted_N3 = generator.random((200_000, 3)) < np.array(metrics.acceptance_per_position)
    tokens_N = 1 + np.cumprod(accepted_N3, axis=1).sum(axis=1)
    verifications = DRAFTS / metrics.acceptance_length
    assert estimate_error(metrics, DRAFTS) == pytest.approx(tokens_N.std() / math.sqrt(verifications), rel=0.02)
    assert tokens_N.mean() == pytest.approx(metrics.acceptance_length, rel=0.01)


def points_of(*lengths: float) -> list[AnswersPoint]:
    return [AnswersPoint(64 * 2**place, 5, length) for place, length in enumerate(lengths)]


def test_twice_the_answers_are_expected_to_bring_the_slope_of_the_points() -> None:
    assert forecast_doubling(points_of(1.4), 0.02) is None
    two = forecast_doubling(points_of(1.4, 1.5), 0.02)
    assert two is not None
    assert (two.gain, two.high - two.gain) == (pytest.approx(0.1), pytest.approx(NORMAL_95 * 0.02 * math.sqrt(2)))
    three = forecast_doubling(points_of(1.4, 1.5, 1.6), 0.02)
    assert three is not None
    assert three.high - three.low < two.high - two.low
    # Points far from a line say little, however well each of them is known.
    crooked = forecast_doubling(points_of(1.4, 1.9, 1.6), 0.02)
    assert crooked is not None
    assert crooked.low < 0 < crooked.high


def epochs_of(*rows: tuple[int, float, float]) -> Iterator[DrafterEpochMetrics]:
    """Epochs as (answers, length on them, held-out length)."""
    for rollouts, own, held_out in rows:
        yield DrafterEpochMetrics(DrafterEpoch(rollouts, 1, 0.1), of_length(own), of_length(held_out))


def test_report_says_what_was_reached_why_it_ended_and_what_twice_the_answers_would_bring() -> None:
    finished = list(epochs_of((90, 1.5, 1.4), (90, 1.9, 1.5), (190, 1.9, 1.7)))
    report = build_report(
        plan_of(maxPrompts=200), finished, AnswersGiven(200, 190, DRAFTS), 10, StopReason.PROMPTS_SPENT
    )
    assert [point.rollouts for point in report.points] == [90, 190]
    assert report.points[0].epochs == 2
    assert report.held_out_length_per_epoch == [1.4, 1.5, 1.7]
    assert report.held_out_accepted_per_position == [0.7]
    assert report.expected_gain is not None
    assert report.conclusion == (
        "the drafter reached acceptance length 1.70 +- 0.02 on 10 held-out prompts after 3 epochs, the last on 190 "
        "answers; it ended because trainer.drafter.initialisation.maxPrompts=200 are answered, although it has 1.90 on "
        "its own answers, so that more would help; twice the answers would probably bring +0.19 (+0.16 to +0.21), by a "
        "line through 1.50 with 90 and 1.70 with 190 answers"
    )


@pytest.mark.parametrize("reason", StopReason)
def test_every_reason_has_words_and_one_number_of_answers_allows_no_forecast(reason: StopReason) -> None:
    plan = plan_of(budgetS=60)
    report = build_report(plan, list(epochs_of((90, 1.5, 1.4))), AnswersGiven(100, 90, DRAFTS), 10, reason)
    assert report.stop_reason == reason.value
    assert report.expected_gain is None
    assert report.conclusion.endswith("what twice the answers would bring is not known from one number of answers")
    assert report.conclusion.count(";") == 2


def test_progress_of_the_training_names_epoch_answers_acceptance_and_time() -> None:
    finished = list(epochs_of((90, 1.5, 1.4), (90, 1.9, 1.46)))
    assert describe_training([], DrafterEpoch(90, 1, 0.9), 8) == ("drafter: epoch 1 of at most 8 on 90 answers", 0, 8)
    said, done, total = describe_training(finished, DrafterEpoch(90, 0.8, 0.7), 8)
    assert (done, total) == (2, 8)
    assert said == (
        "drafter: epoch 3 of at most 8 on 90 answers, held-out acceptance length 1.46 (+0.06), at most 12 s left on "
        "these answers"
    )
    # On twice the answers, an epoch takes twice as long.
    assert "epoch 1 of at most 8 on 180 answers" in describe_training(finished, DrafterEpoch(180, 1, 0.9), 8)[0]
    assert "at most 32 s left" in describe_training(finished, DrafterEpoch(180, 1, 0.9), 8)[0]


def test_progress_of_the_answers_estimates_the_time_left_every_ten_seconds() -> None:
    now = 0.0
    progress = AnswerProgress(10, 110, lambda: now)
    assert progress.describe(10) == "drafter: the policy answers prompts, 110 answers are needed"
    now = PROGRESS_EVERY_S / 2
    assert "left" not in progress.describe(15)
    now = 20.0
    said = progress.describe(30)  # 20 answers in 20 s; the first 10 were there before
    assert said == "drafter: the policy answers prompts, 30 of 110 answers, about 80 s left"
    now = 21.0
    assert progress.describe(31) == said


def test_points_are_empty_without_held_out_answers() -> None:
    epoch = DrafterEpochMetrics(DrafterEpoch(90, 1, 0.1), of_length(1.5))
    assert list_points([epoch]) == []
    report = build_report(plan_of(), [epoch], AnswersGiven(100, 90, 0), 0, StopReason.NOTHING_HELD_OUT)
    assert (report.held_out_acceptance_length, report.held_out_error) == (None, None)
    assert isinstance(forecast_doubling(points_of(1.0, 1.1), 0.0), Forecast)
