"""The figures of a report are those of the steps that it is made from."""

from __future__ import annotations

import pytest
from tests.unit.report.runs import a_step

from specrl.coordinator import exported
from specrl.coordinator.report import StageSeconds, ValidationReport
from specrl.report.figures import CAUSES, all_validations, figures


def test_the_stages_are_means_and_their_shares_sum_to_one() -> None:
    longer = StageSeconds(data=0.5, prepare=1.0, generation=24.0, logprob=1.5, train=3.0)
    found = figures([a_step(1), a_step(2, stages=longer, exposed_generation=24.0)])
    assert found.stage("generation").mean_s == 14.0
    assert found.step_s == 20.0
    assert sum(stage.share for stage in found.stages) == pytest.approx(1.0)
    assert found.exposed_share == pytest.approx(28 / 40)
    assert found.exposed_by_cause == {"buffer_wait": 6.0, "sync_drain": 2.0}


def test_every_cause_that_a_step_reports_has_words() -> None:
    assert set(CAUSES) == set(exported.CAUSES)


def test_a_step_without_drafts_counts_towards_no_acceptance() -> None:
    silent = a_step(2, acceptance_length=None, accepted_per_position=[], draft_length=None)
    found = figures([a_step(1), silent])
    assert found.acceptance_length == 2.0
    assert found.accepted_per_position == (0.7, 0.3)
    assert figures([silent]).acceptance_length is None


def test_a_step_in_which_nothing_was_compared_says_nothing_of_the_mismatch() -> None:
    steps = [a_step(1, mismatch_kl=0.004, mismatch_tokens=10), a_step(2, mismatch_kl=0.0, mismatch_tokens=0)]
    assert figures(steps).mismatch_kl == 0.004
    assert figures(steps[1:]).mismatch_kl is None


def test_lags_of_steps_that_reached_further_are_added_by_place() -> None:
    found = figures([a_step(1, policy_lags=[8]), a_step(2, policy_lags=[1, 2, 5])])
    assert found.policy_lags == (9, 2, 5)


def test_a_validation_of_the_file_is_preferred_to_its_step_and_none_is_lost() -> None:
    kept = [ValidationReport(policy_version=version, reward=0.1, problems=50, seconds=1.0) for version in (0, 2)]
    steps = [a_step(1), a_step(2, validation_reward=0.9), a_step(4, validation_reward=0.4)]
    found = all_validations(steps, kept, problems=7)
    assert [(r.policy_version, r.reward, r.problems) for r in found] == [(0, 0.1, 50), (2, 0.1, 50), (4, 0.4, 7)]
