"""A report's figures follow from its step reports."""

from __future__ import annotations

import pytest
from tests.unit.report.runs import a_step

from specrl.formats import reports
from specrl.formats.reports import PhaseSeconds, ValidationReport
from specrl.report.figures import CAUSES, RunFigures, all_validations


def test_the_phases_are_means_and_their_shares_sum_to_one() -> None:
    longer = PhaseSeconds(data=0.5, prepare=1.0, generation=24.0, logprob=1.5, train=3.0)
    found = RunFigures([a_step(1), a_step(2, phases=longer, exposed_generation=24.0)])
    assert found.find_phase("generation").mean_s == 14.0
    assert found.step_s == 20.0
    assert sum(phase.share for phase in found.phase_times) == pytest.approx(1.0)
    assert found.exposed_share == pytest.approx(28 / 40)
    assert found.exposed_by_cause == {"bufferWait": 6.0, "syncDrain": 2.0}
    times = {time.name: (time.mean_s, time.share) for time in found.generation_times}
    assert times == {"exposed": (14.0, 0.7), "hidden": (5.0, 0.25), "under way": (8.5, 0.425)}


def test_every_cause_has_a_description() -> None:
    assert set(CAUSES) == set(reports.CAUSES)


def test_a_step_without_drafts_does_not_count_towards_acceptance() -> None:
    silent = a_step(2, acceptance_length=None, accepted_per_position=[], draft_length=None)
    found = RunFigures([a_step(1), silent])
    assert found.acceptance_length == 2.0
    assert found.accepted_per_position == (0.7, 0.3)
    assert RunFigures([silent]).acceptance_length is None


def test_a_step_with_short_drafts_does_not_count_towards_later_positions() -> None:
    short = a_step(2, accepted_per_position=[0.5])
    assert RunFigures([a_step(1), short]).accepted_per_position == (0.6, 0.3)


def test_a_step_without_compared_tokens_does_not_count_towards_the_mismatch() -> None:
    steps = [a_step(1, mismatch_kl=0.004, mismatch_tokens=10), a_step(2, mismatch_kl=0.0, mismatch_tokens=0)]
    assert RunFigures(steps).mismatch_kl == 0.004
    assert RunFigures(steps[1:]).mismatch_kl is None


def test_lag_counts_of_different_lengths_are_summed_by_lag() -> None:
    found = RunFigures([a_step(1, policy_lags=[8]), a_step(2, policy_lags=[1, 2, 5])])
    assert found.policy_lags == (9, 2, 5)


def test_a_validations_own_line_wins_over_its_steps_report() -> None:
    kept = [ValidationReport(policy_version=version, reward=0.1, problems=50, seconds=1.0) for version in (0, 2)]
    steps = [a_step(1), a_step(2, validation_reward=0.9), a_step(4, validation_reward=0.4)]
    found = all_validations(steps, kept, problems=7)
    assert [(r.policy_version, r.reward, r.problems) for r in found] == [(0, 0.1, 50), (2, 0.1, 50), (4, 0.4, 7)]
