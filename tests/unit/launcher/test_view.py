"""The output that users see, rendered from fixed reports."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import pytest
from rich.console import Console

from specrl.formats.durations import format_duration
from specrl.formats.reports import PassAt, StatusReport, StepReport, ValidationReport
from specrl.launcher.local_run import describe_stopping
from specrl.launcher.terminal.check_progress import CheckProgress, open_fetch_display
from specrl.launcher.terminal.rows import (
    COLUMNS,
    StepTable,
    counter_lines,
    format_step,
    format_validation,
    make_printable,
    step_notices,
    summary_lines,
)
from specrl.launcher.terminal.run_follower import RunFollower
from specrl.launcher.terminal.view import LiveView, PlainView, View, choose_view, live_area

if TYPE_CHECKING:
    from specrl.launcher.coordinator_client import CoordinatorReports

KEY_ERROR = "KeyError at my_rewards.py:12"


def a_step(**changes: Any) -> StepReport:
    report = {
        "step": 3,
        "policyVersion": 3,
        "phases": {"data": 0.01, "prepare": 0.2, "generation": 2.0, "logprob": 0.29, "train": 1.5},
        "exposedGeneration": 2.0,
        "generationUnderWay": 3.0,
        "hiddenGeneration": 1.25,
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


def a_status(**changes: Any) -> StatusReport:
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
        "rolloutsGrading": 5,
        "rolloutsWanted": 32,
        "counters": {"requeued": 2, "poisoned": 0},
    }
    return StatusReport.model_validate(status | changes)


def a_finished_status(**changes: Any) -> StatusReport:
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
        "unaccountedRollouts": 0,
        "exposedGenerationShare": 0.31,
        "exposedGeneration": 12.4,
        "generationUnderWay": 36.0,
        "hiddenGeneration": 25.0,
        "weightSyncSeconds": 1.5,
        "policyPath": "/runs/tiny-1/export/policy",
        "drafterPath": "/runs/tiny-1/export/drafter",
        "checkpointPath": "/runs/tiny-1/checkpoints/step-20",
    }
    return a_status(phase="finished", detail="finished", summary=summary | changes)


def a_console(width: int = 120, **options: Any) -> Console:
    return Console(file=io.StringIO(), width=width, record=True, **options)


def test_plain_output_is_never_silent_for_long() -> None:
    """A start on a busy machine printed nothing for minutes."""
    console = Console(file=io.StringIO(), width=200)
    now = 0.0
    view = PlainView(console, lambda: now)
    replica = {"id": "gen-0", "state": "joining", "policyVersion": -1, "liveRollouts": 0}
    fields = {"phase": "waiting", "detail": "waiting for weights", "replicas": [replica], "trainer": "absent"}
    status = StatusReport.model_validate({"run": "a", **fields})
    for now in range(60):
        view.show_status(None if now < 25 else status)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "the coordinator is starting (10 s since the start)",
        "the coordinator is starting (20 s since the start)",
        "waiting for weights",
        "waiting for weights, replicas gen-0 joining (0 live), trainer absent (35 s since the start)",
        "waiting for weights, replicas gen-0 joining (0 live), trainer absent (45 s since the start)",
        "waiting for weights, replicas gen-0 joining (0 live), trainer absent (55 s since the start)",
    ]


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
        "rollouts requeued because their replica was lost: 2",
        "grading 5 rollouts",
        "12/32",
        "3/20",
    ):
        assert part in text
    assert "failed a record check" not in text


def test_the_live_area_works_before_the_coordinator_answers() -> None:
    console = a_console()
    console.print(live_area("tiny-1", {}, None))
    assert "the coordinator is starting" in console.export_text()


def test_the_live_area_does_not_say_the_phase_twice() -> None:
    """It showed `stopped  stopped; step 3 is saved`."""
    console = a_console()
    console.print(live_area("tiny-1", {}, a_status(phase="stopped", detail="stopped; step 3 is saved")))
    text = console.export_text()
    assert "stopped; step 3 is saved" in text
    assert "stopped  stopped" not in text


@pytest.mark.parametrize(
    ("phase", "said"),
    [("waiting", "no step has begun"), ("training", "finishes its step"), ("finished", "has finished")],
)
def test_a_stop_names_a_running_step_only_if_the_run_trains(phase: str, said: str) -> None:
    """Ctrl-C during the start said that the trainer finishes its step."""
    assert said in describe_stopping(a_status(phase=phase))
    assert "no step has begun" in describe_stopping(None)


def test_bars_with_a_total_of_zero_are_not_drawn() -> None:
    console = a_console()
    console.print(live_area("tiny-1", {}, a_status(done=0, total=0, rolloutsWanted=0, steps=0, step=0)))
    assert "/0" not in console.export_text()


@pytest.mark.parametrize("width", [40, 60, 80, 100, 200])
def test_rows_fit_the_terminal_and_line_up_with_their_header(width: int) -> None:
    columns = StepTable(width)
    header = columns.header_row().plain
    row = columns.step_row(a_step()).plain
    assert len(header) == len(row) <= width
    assert header.split()[0] == "step"
    assert len(header.split()) == len(row.split())


def test_wide_row_has_every_column_in_order() -> None:
    header = StepTable(200).header_row().plain.split()
    row = StepTable(200).step_row(a_step()).plain.split()
    assert header == [column.title for column in COLUMNS]
    assert row[:5] == ["3", "0.438", "0/0", "0.250", "0.01"]
    assert row[5:] == ["0.20", "2.00", "0.29", "1.50", "50%", "2.35", "1", "3", "4096"]


def test_a_missing_measurement_is_a_dash() -> None:
    row = StepTable(200).step_row(a_step(validationReward=None, acceptanceLength=None)).plain.split()
    assert row[3] == row[10] == "-"


def test_plain_line_says_everything_without_a_header() -> None:
    assert format_step(a_step()) == (
        "step 3 reward 0.438 validation reward 0.250 data 0.01s prepare 0.20s generation 2.00s logprob 0.29s "
        "train 1.50s exposed 50% hidden 1.25s acceptance 2.35 lag 1 version 3 tokens 4096 (1024 per second)"
    )


def test_the_plain_line_leaves_out_missing_measurements() -> None:
    line = format_step(a_step(validationReward=None, acceptanceLength=None))
    assert "validation" not in line
    assert "acceptance" not in line


def test_each_reward_has_its_mean_in_the_plain_line_and_a_column_where_there_is_room() -> None:
    step = a_step(rewards={"answer": 0.5, "a-very-long-name": 1}, validationRewards={"answer": 0.25})
    assert " reward 0.438 (answer 0.500, a-very-long-name 1.000) " in format_step(step)
    assert " validation reward 0.250 (answer 0.250) " in format_step(step)
    wide = StepTable(200, step.rewards)
    assert wide.header_row().plain.split()[:6] == ["step", "reward", "answer", "a-very-lon..", "signal", "valid"]
    assert wide.step_row(step).plain.split()[1:6] == ["0.438", "0.500", "1.000", "0/0", "0.250"]
    assert "answer" not in StepTable(60, step.rewards).header_row().plain
    validation = ValidationReport(policy_version=0, reward=0.5, rewards={"answer": 0.25}, problems=64, seconds=1.0)
    assert format_validation(validation) == "version 0 validated: mean reward 0.500 (answer 0.250) on 64 problems"


def test_the_table_of_a_terminal_has_a_column_for_each_reward() -> None:
    console = a_console(width=160, force_terminal=True)
    view = LiveView(console)
    view.show_step(a_step(rewards={"answer": 0.5, "tags": 0.25}))
    view.show_step(a_step(step=8, rewards={"tags": 0.75}))
    head, first, second = console.export_text().splitlines()
    assert head.split()[:4] == ["step", "reward", "answer", "tags"]
    assert first.split()[2:4] == ["0.500", "0.250"]
    assert second.split()[2:4] == ["-", "0.750"]


def test_the_summary_has_each_reward() -> None:
    lines = dict(summary_lines(a_finished_status(firstRewards={"tags": 0.25}, lastRewards={"tags": 0.75, "late": 1})))
    assert lines["reward tags"] == "0.250 -> 0.750 (+0.500)"
    assert lines["reward late"] == "1.000 (measured once, so no comparison)"


def test_a_validation_is_shown_whole_and_without_control_characters() -> None:
    """It was cut at the terminal's width, with the reasons of failed answers at its end."""
    console = a_console(width=80)
    view = LiveView(console)
    failures = {"KeyError\x1b[31m at my_rewards.py:12": 4}
    report = {"policyVersion": 3, "reward": 0.5, "problems": 64, "seconds": 1.0, "answers": 64, "failures": failures}
    view.show_validation(ValidationReport.model_validate(report))
    view.close()
    text = " ".join(console.export_text().split())
    assert "4 failed: KeyError" in text
    assert "at my_rewards.py:12" in text
    assert "\x1b[31m" not in text


def show_a_run(view: View) -> None:
    view.show_start("tiny-1", {"folder": "/runs/tiny-1"})
    view.show_status(None)
    view.show_status(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.show_status(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.show_validation(ValidationReport(policy_version=0, reward=0.125, problems=64, seconds=1.0))
    view.show_status(a_status())
    view.show_step(a_step(step=1, validationReward=None))
    view.show_status(a_status(detail="writing"))
    view.show_message("gen-0 ended and is started again")
    view.show_summary(a_finished_status(), {"logs": "/runs/tiny-1/logs"})
    view.close()


def test_the_plain_view_prints_one_line_per_event() -> None:
    console = a_console(width=20)
    show_a_run(PlainView(console))
    lines = console.export_text().splitlines()
    assert lines[:5] == [
        "run tiny-1: folder /runs/tiny-1",
        "waiting for peers",
        "version 0 validated: mean reward 0.125 on 64 problems",
        "training",
        format_step(a_step(step=1, validationReward=None)),
    ]
    assert lines[5] == "gen-0 ended and is started again"
    assert "logs: /runs/tiny-1/logs" in lines


def test_plain_view_writes_no_control_characters() -> None:
    output = io.StringIO()
    view = choose_view(Console(file=output, force_terminal=True, color_system=None), is_plain=True)
    view.show_message("evil \x1b[2J\x07 [bold]name[/bold]")
    show_a_run(view)
    assert all(letter.isprintable() for letter in output.getvalue().replace("\n", ""))
    assert "[bold]name[/bold]" in output.getvalue()


def test_output_to_anything_but_a_terminal_is_plain() -> None:
    assert isinstance(choose_view(Console(file=io.StringIO()), is_plain=False), PlainView)
    assert isinstance(choose_view(a_console(force_terminal=True), is_plain=False), LiveView)


def test_live_view_scrolls_rows_under_one_header_and_ends_with_the_summary() -> None:
    console = a_console(force_terminal=True)
    show_a_run(LiveView(console))
    text = console.export_text()
    assert text.count("reward  signal valid") == 1
    assert text.index("version 0 validated") < text.index("0.438") < text.index("started again")
    assert "0.120 -> 0.480 (+0.360)" in text
    assert "/runs/tiny-1/export/drafter" in text


def test_summary_compares_first_with_last() -> None:
    lines = dict(summary_lines(a_finished_status()))
    assert lines["validation reward"] == "0.120 -> 0.480 (+0.360)"
    assert lines["reward"] == "0.200 -> 0.600 (+0.400), means of the first and of the last 5 steps"
    assert lines["acceptance length"] == "1.90 -> 2.60 (+0.70) tokens per verification"
    assert lines["exposed generation"] == "31% of wall time, 12.4 s"
    assert lines["hidden generation"] == "25.0 s of 36.0 s under way"
    assert lines["weight sync"] == "1.50 s"
    assert lines["largest policy lag"] == "1 steps"
    assert lines["unaccounted for"] == "0 rollouts"
    assert lines["checkpoint"] == "/runs/tiny-1/checkpoints/step-20"


def test_a_single_measurement_is_not_compared_with_itself() -> None:
    """A run of one step used to show "0.485 -> 0.485 (+0.000)", like a run that learned nothing."""
    once = {"firstValidationReward": None, "firstReward": None, "rewardSteps": 0, "firstAcceptanceLength": None}
    lines = dict(summary_lines(a_finished_status(**once)))
    assert lines["validation reward"] == "0.480 (measured once, so no comparison)"
    assert lines["reward"] == "0.600 (measured once, so no comparison)"
    assert lines["acceptance length"] == "2.60 tokens per verification (measured once, so no comparison)"


def test_groups_without_a_signal_and_prompts_given_up_are_reported_with_reasons() -> None:
    """The terminal used to say nothing about a constant reward, or about a reward that fails on some prompts."""
    step = a_step(failed={"000003-00001": KEY_ERROR, "000003-00002": KEY_ERROR}, groups=4, groupsWithoutSignal=4)
    assert step_notices(step) == [
        f"step 3: 2 prompts given up: {KEY_ERROR} (2)",
        "step 3: 4 of 4 groups have no training signal: the rewards within each group are equal",
    ]
    assert step_notices(a_step(groups=4, groupsWithoutSignal=3)) == []
    assert step_notices(a_step(groups=0, groupsWithoutSignal=0)) == []
    lines = dict(summary_lines(a_finished_status(groups=80, groupsWithoutSignal=80, givenUp={KEY_ERROR: 2})))
    assert lines["without signal"] == "80 of 80 groups have no training signal: the rewards within each group are equal"
    assert lines["given up"] == f"2 prompts given up: {KEY_ERROR} (2)"


def test_summary_counts_completions_on_which_the_verifier_failed() -> None:
    status = a_finished_status()
    assert "verifier errors" not in dict(summary_lines(status))
    failed = status.model_copy(update={"counters": {"verifierErrors": 3}})
    assert dict(summary_lines(failed))["verifier errors"].startswith("3 completions on which the verifier raised")


def test_a_validation_reports_ungraded_answers_and_an_interval_for_each_figure() -> None:
    """Rewards up to 7 used to show the interval of pass@1, and failed answers counted as problems with accuracy 1."""
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
    assert format_validation(report) == (
        "version 4 validated: mean reward 7.188 (5.50 to 8.88) on 32 problems; "
        f"28 of 32 graded, 4 failed: {KEY_ERROR} (4)"
    )
    rate = PassAt(k=1, rate=0.25, low=0.1, high=0.5, problems=8)
    right_or_wrong = ValidationReport(policy_version=0, reward=0.25, problems=8, seconds=1.0, pass_at=[rate])
    assert format_validation(right_or_wrong).endswith("mean reward 0.250 on 8 problems, pass@1 0.250 (0.10 to 0.50)")
    several = right_or_wrong.model_copy(update={"sources": {"math": report, "code": right_or_wrong}})
    assert format_validation(several).endswith("(0.10 to 0.50), math 7.188 on 32, code 0.250 on 8")


def test_events_are_reported_in_words_with_units_and_reasons() -> None:
    """The terminal used to say `ungraded 36, failedPrompts 2`, which looked harmless."""
    status = a_status(
        counters={"ungraded": 36, "failedPrompts": 2, "poisoned": 0},
        verdictFailures={KEY_ERROR: 30, "the worker was killed": 6},
        givenUp={KEY_ERROR: 2},
    )
    assert counter_lines(status) == [
        "rollouts that could not be graded and were sampled again: 36",
        "prompts given up after too many attempts: 2",
        f"verdicts failed, by reason: {KEY_ERROR} (30), the worker was killed (6)",
        f"prompts given up, by reason: {KEY_ERROR} (2)",
    ]


class StubReports:
    """A coordinator that reports what it is given."""

    url = ""

    def __init__(self, steps: Sequence[StepReport], validations: Sequence[ValidationReport], **status: Any) -> None:
        self._steps = steps
        self._validations = validations
        self._status = status

    def fetch_status(self) -> StatusReport:
        return a_status(step=len(self._steps), **self._status)

    def fetch_steps(self, after: int) -> list[StepReport]:
        return [report for report in self._steps if report.step > after]

    def fetch_validations(self) -> list[ValidationReport]:
        return [*self._validations]


def test_the_validation_of_the_initial_policy_is_shown_before_the_first_step() -> None:
    """With a policy lag it ends during the first step, and was printed after that step's row."""
    console = a_console(width=200)
    validations = [ValidationReport(policy_version=it, reward=0.25, problems=4, seconds=1.0) for it in (0, 2)]
    reports = StubReports([], validations[:0])
    follower = RunFollower(cast("CoordinatorReports", reports), PlainView(console))
    follower.show_updates()
    reports._steps = [a_step(step=step, policyVersion=step) for step in (1, 2, 3)]
    reports._validations = validations
    follower.show_updates()
    lines = [" ".join(line.split()[:2]) for line in console.export_text().splitlines() if "reward" in line]
    assert lines == ["version 0", "step 1", "step 2", "step 3"], "the row of step 2 has its validation"


def test_each_failure_reason_is_shown_once_and_failed_validations_have_a_row() -> None:
    console = a_console(width=200)
    reports = StubReports([], [], verdictFailures={KEY_ERROR: 1})
    follower = RunFollower(cast("CoordinatorReports", reports), PlainView(console))
    follower.show_updates()
    reports._status = {"verdictFailures": {KEY_ERROR: 9, "the worker was killed": 1}}
    reports._steps = [a_step(step=1, policyVersion=1, failed={"000001-00000": KEY_ERROR})]
    reports._validations = [
        ValidationReport(policy_version=1, reward=0.25, problems=4, answers=4, seconds=1.0, failures={KEY_ERROR: 3})
    ]
    follower.show_updates()
    follower.show_updates()
    lines = console.export_text().splitlines()
    assert [line for line in lines if line.startswith("grading failed")] == [
        f"grading failed: {KEY_ERROR} (each reason is shown once)",
        "grading failed: the worker was killed (each reason is shown once)",
    ]
    assert lines.count(f"step 1: 1 prompt given up: {KEY_ERROR} (1)") == 1
    assert sum("1 of 4 graded, 3 failed" in line for line in lines) == 1, "its step's row shows the reward alone"


def test_the_terminal_says_when_drafting_is_switched_off_and_on() -> None:
    """Its steps have no acceptance length, which nothing explained."""
    console = a_console(width=200)
    replica = {"id": "gen-0", "state": "serving", "policyVersion": 1, "liveRollouts": 4}
    reports = StubReports([], [])
    follower = RunFollower(cast("CoordinatorReports", reports), PlainView(console))
    for state in ("drafting", "off", "off", "trial", "off", "drafting", "drafting"):
        reports._status = {"replicas": [{**replica, "drafting": state}]}
        follower.show_updates()
    lines = [line for line in console.export_text().splitlines() if "drafting" in line]
    assert lines == [
        "gen-0 has switched drafting off, which would not pay now; draftLength: Fixed keeps it on",
        "gen-0 has switched drafting on again",
    ]


def test_the_plain_line_estimates_the_time_that_is_left() -> None:
    """Plain output, and so any log of a run, had no speed and no estimate."""
    console = a_console(width=300)
    phases = [{"train": 60.0}, {"train": 120.0}]
    steps = [a_step(step=step, phases=phases[step - 1]) for step in (1, 2)]
    RunFollower(cast("CoordinatorReports", StubReports(steps, [])), PlainView(console)).show_updates()
    lines = [line for line in console.export_text().splitlines() if line.startswith("step")]
    assert [line.partition("per second) ")[2] for line in lines] == ["about 19 min left", "about 27 min left"]


@pytest.mark.parametrize(("seconds", "text"), [(45, "45 s"), (719, "12 min"), (11_100, "3 h 05 min")])
def test_durations_have_the_unit_that_a_reader_expects(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


def test_a_warning_is_shown_once_with_what_to_try() -> None:
    """Rewards and gradients of 0 were rows like any other. It was taken from the last notice, whatever that was."""
    console = a_console(width=300)
    reports = StubReports([], [])
    follower = RunFollower(cast("CoordinatorReports", reports), PlainView(console))
    for since in (None, 11, 11, None, 20):
        reports._status = {"notices": ["heads stay"], "warnings": [f"since step {since}: try this"] if since else []}
        follower.show_updates()
    lines = [line for line in console.export_text().splitlines() if "warning" in line]
    assert lines == ["warning: since step 11: try this", "warning: since step 20: try this"]


def test_a_replica_that_is_given_up_is_shown_once_with_its_reason() -> None:
    """Replicas were refused and admitted again for ever, and the reason was in a log or nowhere."""
    console = a_console(width=300)
    reports = StubReports([], [], replicasGivenUp={"gen-1": "an update must hold the policy's tensors"})
    follower = RunFollower(cast("CoordinatorReports", reports), PlainView(console))
    for _ in range(2):
        follower.show_updates()
    lines = [line for line in console.export_text().splitlines() if "given up" in line]
    assert lines == ["gen-1 is given up: an update must hold the policy's tensors"]


def test_the_row_of_a_step_shows_how_many_groups_have_a_signal() -> None:
    assert "reward 0.438 without signal 2 of 16 groups" in format_step(a_step(groups=16, groupsWithoutSignal=2))
    assert "without signal" not in format_step(a_step(groups=16, groupsWithoutSignal=0))
    assert "14/16" in StepTable(200).step_row(a_step(groups=16, groupsWithoutSignal=2)).plain


def test_the_summary_of_a_run_without_steps_mentions_none() -> None:
    nothing = dict.fromkeys(
        [f"{end}{what}" for end in ("first", "last") for what in ("ValidationReward", "Reward", "AcceptanceLength")]
    )
    lines = dict(summary_lines(a_finished_status(steps=0, policyPath="", **nothing)))
    assert set(lines) == {"steps", "drafter", "checkpoint"}


def test_control_characters_become_spaces() -> None:
    assert make_printable("a\x1b[31m\nb\u2028c") == "a [31m b c"


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
    """Checking 100,000 references takes minutes, which used to pass without any output."""
    output = io.StringIO()
    seen = view(Console(file=output, width=100, force_terminal=True, color_system=None))
    seconds = iter([0.0, 0.9, 1.1, 5.0, 11.2])
    progress = CheckProgress(seen, lambda: next(seconds))
    for done in range(0, 50, 10):
        progress(done, 100)
    seen.close()
    found = re.findall(r"checking references: \d+ of \d+|\d+/\d+", output.getvalue())
    assert list(dict.fromkeys(found)) == shown  # the live area is drawn once more when it closes


@pytest.mark.parametrize(
    ("view", "shown"), [(PlainView, "fetching team/tiny: 1.0 MiB of 2.00 GiB"), (LiveView, "1/2048")]
)
def test_the_progress_of_fetching_is_shown(view: type[PlainView | LiveView], shown: str) -> None:
    output = io.StringIO()
    seen = view(Console(file=output, width=100, force_terminal=True, color_system=None))
    with open_fetch_display(seen) as display:
        display.show("fetching team/tiny", 1 << 20, 2 << 30)
    assert shown in output.getvalue()
