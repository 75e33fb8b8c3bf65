"""metrics.jsonl has one line a step, whatever happened to the process or the disk in between."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specrl.coordinator.report import Phase, StageSeconds, Status, StepReport, ValidationReport
from specrl.coordinator.report_files import ReportFiles


def a_report(step: int) -> StepReport:
    numbers = {name: 0 for name, field in StepReport.model_fields.items() if field.is_required()}
    return StepReport.model_validate(numbers | {"step": step, "stages": StageSeconds()})


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_each_step_has_one_line_however_often_it_is_given(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.append([a_report(1), a_report(2)])
    files.append([a_report(2), a_report(3)])
    again = ReportFiles(tmp_path)
    assert again.last_step == 3
    again.append([a_report(3), a_report(4)])
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert [report.step for report in again.before(3)] == [1, 2]


def test_a_line_that_a_crash_cut_short_is_written_over(tmp_path: Path) -> None:
    ReportFiles(tmp_path).append([a_report(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "policyVer')
    files = ReportFiles(tmp_path)
    assert files.last_step == 1
    files.append([a_report(2)])
    assert steps(tmp_path) == [1, 2]


def test_what_could_not_be_written_comes_with_the_next(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "run"
    files = ReportFiles(folder)  # a folder that is not there refuses every write, as a full disk does
    for _ in range(2):
        files.append([a_report(1)])
        files.write_status(Status(run="run", phase=Phase.TRAINING))
    assert files.last_step == 0
    folder.mkdir()
    files.append([a_report(1), a_report(2)])
    files.write_status(Status(run="run", phase=Phase.TRAINING))
    assert steps(folder) == [1, 2]
    assert json.loads((folder / "status.json").read_text())["phase"] == "training"
    assert capfd.readouterr().out.count("report_files_delayed") == 2  # once of each file


def test_a_page_of_steps_is_read_without_the_rest(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.append([a_report(step) for step in range(1, 8)])
    assert [report.step for report in files.page(2, 99, 3)] == [3, 4, 5]
    again = ReportFiles(tmp_path)
    again.append([a_report(8)])
    assert [report.step for report in again.page(5, 8, 9)] == [6, 7]
    assert [report.step for report in again.page(7, 99, 9)] == [8]
    (tmp_path / "metrics.jsonl").unlink()
    assert again.page(0, 99, 9) == []


def test_a_validation_has_its_line_too_the_one_before_the_first_step_included(tmp_path: Path) -> None:
    kept = [ValidationReport(policy_version=version, reward=0.5, problems=8, seconds=1.0) for version in (0, 3, 6)]
    ReportFiles(tmp_path).append_validations(kept[:2])
    files = ReportFiles(tmp_path)
    files.append_validations(kept)
    files.append_validations(kept)
    lines = (tmp_path / "validations.jsonl").read_text().splitlines()
    assert [json.loads(line)["policyVersion"] for line in lines] == [0, 3, 6]
