"""What users see, rendered from canned reports."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from specrl.coordinator.report import PassAt, Status, StepReport, ValidationReport
from specrl.launcher.check_progress import CheckProgress
from specrl.launcher.follow import Follower
from specrl.launcher.rows import (
    COLUMNS,
    Columns,
    counter_lines,
    plain_step,
    plain_validation,
    printable,
    step_notices,
    summary_lines,
)
from specrl.launcher.view import LiveView, PlainView, View, live_area, view_for

if TYPE_CHECKING:
    from specrl.launcher.reports import CoordinatorReports

KEY_ERROR = "KeyError at my_rewards.py:12"


def a_step(**changes: Any) -> StepReport:
    report = {
        "step": 3,
        "policyVersion": 3,
        "stages": {"data": 0.01, "prepare": 0.2, "generation": 2.0, "logprob": 0.29, "train": 1.5},
        "exposedGeneration": 2.0,
        "reward": 0.4375,
        "validationReward": 0.25,
        "rollouts": 32,
        "tokens": 4096,
        "meanLength": 128.0,
        "acceptanceLength": 2.345,
        "policyLagMax": 1,
        "policyLagMean": 0.5,
        "loss": 0.1,
        "gradNorm": 1.0,
        "learningRate": 1e-3,
        "entropy": 1.0,
        "clipFraction": 0.0,
        "importanceWeightMean": 1.0,
        "effectiveSampleSize": 1.0,
        "mismatchMeanAbs": 0.0,
        "mismatchMaxAbs": 0.0,
        "mismatchKl": 0.0,
        "mismatchTokens": 10,
    }
    return StepReport.model_validate(report | changes)


def a_status(**changes: Any) -> Status:
    status = {
        "run": "tiny",
        "phase": "training",
        "detail": "training",
        "done": 1,
        "total": 4,
        "step": 3,
        "steps": 20,
        "policyVersion": 3,
        "replicas": [
            {"id": "gen-0", "state": "serving", "policyVersion": 3, "liveRollouts": 7},
            {
                "id": "gen-1",
                "state": "suspect",
                "policyVersion": 2,
                "liveRollouts": 0,
                "reason": "it is " + "late " * 30,
            },
        ],
        "trainer": "ready",
        "rolloutsCollected": 12,
        "rolloutsWanted": 32,
        "counters": {"requeued": 2, "poisoned": 0},
    }
    return Status.model_validate(status | changes)


def a_finished_status(**changes: Any) -> Status:
    summary = {
        "steps": 20,
        "firstValidationReward": 0.12,
        "lastValidationReward": 0.48,
        "firstReward": 0.2,
        "lastReward": 0.6,
        "rewardSteps": 5,
        "firstAcceptanceLength": 1.9,
        "lastAcceptanceLength": 2.6,
        "policyLagMax": 1,
        "rolloutsTrained": 640,
        "promptsTrained": 80,
        "discardedForAge": 0,
        "exposedGenerationShare": 0.31,
        "policyPath": "/runs/tiny-1/export/policy",
        "drafterPath": "/runs/tiny-1/export/drafter",
        "checkpointPath": "/runs/tiny-1/checkpoints/step-20",
    }
    return a_status(phase="finished", detail="finished", summary=summary | changes)


def a_console(width: int = 120, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, record=True, **options)


def test_live_area_shows_phase_replicas_trainer_and_progress() -> None:
    console = a_console()
    console.print(live_area("tiny-1", {"page": "http://127.0.0.1:8000"}, a_status()))
    text = console.export_text()
    for part in (
        "tiny-1",
        "http://127.0.0.1:8000",
        "training",
        "gen-0 serving v3 (7 live)",
        "gen-1 suspect v2 (0 live): it is late",
        "ready",
        "rollouts sampled again after their replica was lost: 2",
        "12/32",
        "3/20",
    ):
        assert part in text
    assert "refused by their checks" not in text


def test_live_area_before_the_coordinator_answers_is_no_error() -> None:
    console = a_console()
    console.print(live_area("tiny-1", {}, None))
    assert "the coordinator is starting" in console.export_text()


def test_bars_of_nothing_are_not_drawn() -> None:
    console = a_console()
    console.print(live_area("tiny-1", {}, a_status(done=0, total=0, rolloutsWanted=0, steps=0, step=0)))
    assert "/0" not in console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_rows_fit_the_terminal_and_line_up_with_their_header(width: int) -> None:
    columns = Columns(width)
    header, row = columns.header().plain, columns.step(a_step()).plain
    assert len(header) == len(row) <= width
    assert header.split()[0] == "step"
    assert len(header.split()) == len(row.split())


def test_wide_row_has_every_column_in_order() -> None:
    header, row = Columns(200).header().plain.split(), Columns(200).step(a_step()).plain.split()
    assert header == [column.title for column in COLUMNS]
    assert row == ["3", "0.438", "0.250", "0.01", "0.20", "2.00", "0.29", "1.50", "50%", "2.35", "1", "3", "4096"]


def test_what_was_not_measured_is_a_dash() -> None:
    row = Columns(200).step(a_step(validationReward=None, acceptanceLength=None)).plain.split()
    assert row[2] == row[9] == "-"


def test_plain_line_says_everything_without_a_header() -> None:
    assert plain_step(a_step()) == (
        "step 3 reward 0.438 validation reward 0.250 data 0.01s prepare 0.20s generation 2.00s logprob 0.29s "
        "train 1.50s exposed 50% acceptance 2.35 lag 1 version 3 tokens 4096"
    )


def test_plain_line_leaves_out_what_was_not_measured() -> None:
    line = plain_step(a_step(validationReward=None, acceptanceLength=None))
    assert "validation" not in line
    assert "acceptance" not in line


def show_a_run(view: View) -> None:
    view.begin("tiny-1", {"folder": "/runs/tiny-1"})
    view.show(None)
    view.show(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.show(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.validation(ValidationReport(policy_version=0, reward=0.125, problems=64, seconds=1.0))
    view.show(a_status())
    view.step(a_step(step=1, validationReward=None))
    view.show(a_status(detail="writing"))
    view.message("gen-0 ended and is started again")
    view.end(a_finished_status(), {"logs": "/runs/tiny-1/logs"})
    view.close()


def test_plain_view_prints_each_thing_once_as_one_line() -> None:
    console = a_console(width=20)
    show_a_run(PlainView(console))
    lines = console.export_text().splitlines()
    assert lines[:5] == [
        "run tiny-1: folder /runs/tiny-1",
        "waiting: waiting for peers",
        "version 0 validated: mean reward 0.125 on 64 problems",
        "training",
        plain_step(a_step(step=1, validationReward=None)),
    ]
    assert lines[5] == "gen-0 ended and is started again"
    assert "logs: /runs/tiny-1/logs" in lines


def test_plain_view_writes_no_control_characters() -> None:
    output = io.StringIO()
    view = view_for(Console(file=output, force_terminal=True, color_system=None), is_plain=True)
    view.message("evil \x1b[2J\x07 [bold]name[/bold]")
    show_a_run(view)
    assert all(letter.isprintable() for letter in output.getvalue().replace("\n", ""))
    assert "[bold]name[/bold]" in output.getvalue()


def test_output_that_is_no_terminal_is_plain() -> None:
    assert isinstance(view_for(Console(file=io.StringIO()), is_plain=False), PlainView)
    assert isinstance(view_for(a_console(force_terminal=True), is_plain=False), LiveView)


def test_live_view_scrolls_rows_under_one_header_and_ends_with_the_summary() -> None:
    console = a_console(force_terminal=True)
    show_a_run(LiveView(console))
    text = console.export_text()
    assert text.count("reward valid") == 1
    assert text.index("version 0 validated") < text.index("0.438") < text.index("started again")
    assert "0.120 -> 0.480 (+0.360)" in text
    assert "/runs/tiny-1/export/drafter" in text


def test_summary_compares_first_with_last() -> None:
    lines = dict(summary_lines(a_finished_status()))
    assert lines["validation reward"] == "0.120 -> 0.480 (+0.360)"
    assert lines["reward"] == "0.200 -> 0.600 (+0.400), means of the first and of the last 5 steps"
    assert lines["acceptance length"] == "1.90 -> 2.60 (+0.70) tokens per verification"
    assert lines["exposed generation"] == "31% of wall time"
    assert lines["greatest policy lag"] == "1 steps"
    assert lines["discarded for age"] == "0 rollouts"
    assert lines["checkpoint"] == "/runs/tiny-1/checkpoints/step-20"


def test_what_was_measured_once_is_not_compared_with_itself() -> None:
    """A run of one validation and one step said "0.485 -> 0.485 (+0.000)": it looked like a run that learnt nothing."""
    once = {"firstValidationReward": None, "firstReward": None, "rewardSteps": 0, "firstAcceptanceLength": None}
    lines = dict(summary_lines(a_finished_status(**once)))
    assert lines["validation reward"] == "0.480, measured once: too few to compare"
    assert lines["reward"] == "0.600, measured once: too few to compare"
    assert lines["acceptance length"] == "2.60 tokens per verification, measured once: too few to compare"


def test_groups_that_teach_nothing_and_prompts_given_up_are_said_with_their_reason() -> None:
    """A constant reward, and a reward that fails on some prompts, left no word on the terminal."""
    step = a_step(failed={"000003-00001": KEY_ERROR, "000003-00002": KEY_ERROR}, groups=4, groupsWithoutSignal=4)
    assert step_notices(step) == [
        f"step 3: 2 prompts given up: {KEY_ERROR} (2)",
        "step 3: 4 of 4 groups teach nothing: all rewards are equal within each",
    ]
    assert step_notices(a_step(groups=4, groupsWithoutSignal=3)) == []
    assert step_notices(a_step(groups=0, groupsWithoutSignal=0)) == []
    lines = dict(summary_lines(a_finished_status(groups=80, groupsWithoutSignal=80, givenUp={KEY_ERROR: 2})))
    assert lines["without signal"] == "80 of 80 groups teach nothing: all rewards are equal within each"
    assert lines["given up"] == f"2 prompts given up: {KEY_ERROR} (2)"


def test_a_validation_says_what_was_not_judged_and_whose_interval_is_whose() -> None:
    """Rewards up to 7 showed the interval of pass@1; answers that failed were counted as problems of accuracy 1."""
    report = ValidationReport(
        policy_version=4,
        reward=7.1875,
        reward_low=5.5,
        reward_high=8.875,
        problems=32,
        answers=32,
        seconds=1.0,
        failures={KEY_ERROR: 4},
    )
    assert plain_validation(report) == (
        "version 4 validated: mean reward 7.188 (5.50 to 8.88) on 32 problems; "
        f"28 of 32 graded, 4 failed: {KEY_ERROR} (4)"
    )
    rate = PassAt(k=1, rate=0.25, low=0.1, high=0.5, problems=8)
    right_or_wrong = ValidationReport(policy_version=0, reward=0.25, problems=8, seconds=1.0, pass_at=[rate])
    assert plain_validation(right_or_wrong).endswith("mean reward 0.250 on 8 problems, pass@1 0.250 (0.10 to 0.50)")


def test_what_went_wrong_is_said_in_words_with_units_and_reasons() -> None:
    """`ungraded 36, failedPrompts 2` looked harmless."""
    status = a_status(
        counters={"ungraded": 36, "failedPrompts": 2, "poisoned": 0},
        verdictFailures={KEY_ERROR: 30, "the worker was killed": 6},
        givenUp={KEY_ERROR: 2},
    )
    assert counter_lines(status) == [
        "rollouts without a verdict, through no fault of an answer; sampled again: 36",
        "prompts given up after 5 attempts: 2",
        f"verdicts failed by reason: {KEY_ERROR} (30), the worker was killed (6)",
        f"prompts given up by reason: {KEY_ERROR} (2)",
    ]


class Reported:
    """A coordinator that reports what it is given."""

    url = ""

    def __init__(self, steps: Sequence[StepReport], validations: Sequence[ValidationReport], **status: Any) -> None:
        self._steps, self._validations, self._status = steps, validations, status

    def status(self) -> Status:
        return a_status(step=len(self._steps), **self._status)

    def steps(self, after: int) -> list[StepReport]:
        return [report for report in self._steps if report.step > after]

    def validations(self) -> list[ValidationReport]:
        return [*self._validations]


def test_the_first_failure_of_each_kind_is_told_once_and_validations_that_failed_have_their_row() -> None:
    console = a_console(width=200)
    reports = Reported([], [], verdictFailures={KEY_ERROR: 1})
    follower = Follower(cast("CoordinatorReports", reports), PlainView(console))
    follower.turn()
    reports._status = {"verdictFailures": {KEY_ERROR: 9, "the worker was killed": 1}}
    reports._steps = [a_step(step=1, policyVersion=1, failed={"000001-00000": KEY_ERROR})]
    reports._validations = [
        ValidationReport(policy_version=1, reward=0.25, problems=4, answers=4, seconds=1.0, failures={KEY_ERROR: 3})
    ]
    follower.turn()
    follower.turn()
    lines = console.export_text().splitlines()
    assert [line for line in lines if line.startswith("grading failed")] == [
        f"grading failed: {KEY_ERROR} (said once for each reason)",
        "grading failed: the worker was killed (said once for each reason)",
    ]
    assert lines.count(f"step 1: 1 prompt given up: {KEY_ERROR} (1)") == 1
    assert sum("1 of 4 graded, 3 failed" in line for line in lines) == 1, "its step's row shows the reward alone"


def test_summary_of_a_run_without_steps_speaks_of_none() -> None:
    nothing = dict.fromkeys(
        [f"{end}{what}" for end in ("first", "last") for what in ("ValidationReward", "Reward", "AcceptanceLength")]
    )
    lines = dict(summary_lines(a_finished_status(steps=0, policyPath="", **nothing)))
    assert set(lines) == {"steps", "drafter", "checkpoint"}


def test_control_characters_of_others_become_spaces() -> None:
    assert printable("a\x1b[31m\nb\u2028c") == "a [31m b c"


@pytest.mark.parametrize(
    ("view", "shown"),
    [
        (PlainView, ["checking references: 20 of 100", "checking references: 40 of 100"]),
        (LiveView, ["20/100", "30/100", "40/100"]),
    ],
)
def test_a_check_is_shown_once_it_takes_longer_than_a_second(
    view: type[PlainView | LiveView], shown: list[str]
) -> None:
    """100,000 references would be checked in silence, for minutes."""
    output = io.StringIO()
    seen = view(Console(file=output, width=100, force_terminal=True, color_system=None))
    seconds = iter([0.0, 0.9, 1.1, 5.0, 11.2])
    progress = CheckProgress(seen, lambda: next(seconds))
    for done in range(0, 50, 10):
        progress(done, 100)
    seen.close()
    found = re.findall(r"checking references: \d+ of \d+|\d+/\d+", output.getvalue())
    assert list(dict.fromkeys(found)) == shown  # what is shown live is drawn again at its end
