"""What users see, rendered from canned reports."""

from __future__ import annotations

import io
from typing import Any

import pytest
from rich.console import Console

from specrl.coordinator.report import Status, StepReport, ValidationReport
from specrl.launcher.rows import COLUMNS, Columns, plain_step, printable, summary_lines
from specrl.launcher.view import LiveView, PlainView, View, live_area, view_for


def a_step(**changes: Any) -> StepReport:
    report = {
        "step": 3,
        "policyVersion": 3,
        "stages": {"data": 0.01, "prepare": 0.2, "generation": 2.0, "logprob": 0.29, "train": 1.5},
        "exposedGeneration": 2.0,
        "reward": 0.4375,
        "validationAccuracy": 0.25,
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
        "firstAccuracy": 0.12,
        "lastAccuracy": 0.48,
        "firstReward": 0.2,
        "lastReward": 0.6,
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
        "requeued 2",
        "12/32",
        "3/20",
    ):
        assert part in text
    assert "poisoned" not in text


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
    row = Columns(200).step(a_step(validationAccuracy=None, acceptanceLength=None)).plain.split()
    assert row[2] == row[9] == "-"


def test_plain_line_says_everything_without_a_header() -> None:
    assert plain_step(a_step()) == (
        "step 3 reward 0.438 accuracy 0.250 data 0.01s prepare 0.20s generation 2.00s logprob 0.29s train 1.50s "
        "exposed 50% acceptance 2.35 lag 1 version 3 tokens 4096"
    )


def test_plain_line_leaves_out_what_was_not_measured() -> None:
    line = plain_step(a_step(validationAccuracy=None, acceptanceLength=None))
    assert "accuracy" not in line
    assert "acceptance" not in line


def show_a_run(view: View) -> None:
    view.begin("tiny-1", {"folder": "/runs/tiny-1"})
    view.show(None)
    view.show(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.show(a_status(phase="waiting", detail="waiting for peers", step=0))
    view.validation(ValidationReport(policy_version=0, accuracy=0.125, problems=64, seconds=1.0))
    view.show(a_status())
    view.step(a_step(step=1, validationAccuracy=None))
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
        "version 0 validated: accuracy 0.125 on 64 problems",
        "training",
        plain_step(a_step(step=1, validationAccuracy=None)),
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
    assert lines["validation accuracy"] == "0.120 -> 0.480 (+0.360)"
    assert lines["reward"] == "0.200 -> 0.600 (+0.400)"
    assert lines["acceptance length"] == "1.90 -> 2.60 (+0.70) tokens per verification"
    assert lines["exposed generation"] == "31% of wall time"
    assert lines["greatest policy lag"] == "1 steps"
    assert lines["discarded for age"] == "0 rollouts"
    assert lines["checkpoint"] == "/runs/tiny-1/checkpoints/step-20"


def test_summary_of_a_run_without_steps_speaks_of_none() -> None:
    nothing = dict.fromkeys(
        [f"{end}{what}" for end in ("first", "last") for what in ("Accuracy", "Reward", "AcceptanceLength")]
    )
    lines = dict(summary_lines(a_finished_status(steps=0, policyPath="", **nothing)))
    assert set(lines) == {"steps", "drafter", "checkpoint"}


def test_control_characters_of_others_become_spaces() -> None:
    assert printable("a\x1b[31m\nb\u2028c") == "a [31m b c"
