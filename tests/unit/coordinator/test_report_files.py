"""metrics.jsonl has one line per step, also after crashes and write errors."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from specrl.coordinator.observe.report_files import ReportFiles
from specrl.files import LINES_BYTES
from specrl.formats.reports import Phase, PhaseSeconds, StatusReport, StepReport, ValidationReport


def a_report(step: int) -> StepReport:
    numbers = {name: 0 for name, field in StepReport.model_fields.items() if field.is_required()}
    return StepReport.model_validate(numbers | {"step": step, "policy_version": step, "phases": PhaseSeconds()})


def steps(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_step_that_is_appended_twice_has_one_line(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.append_steps([a_report(1), a_report(2)])
    files.append_steps([a_report(2), a_report(3)])
    again = ReportFiles(tmp_path)
    assert again.last_step == 3
    again.append_steps([a_report(3), a_report(4)])
    assert steps(tmp_path) == [1, 2, 3, 4]
    assert [report.step for report in again.read_before(3)] == [1, 2]


def test_a_truncated_last_line_is_overwritten(tmp_path: Path) -> None:
    ReportFiles(tmp_path).append_steps([a_report(1)])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "policyVer')
    files = ReportFiles(tmp_path)
    assert files.last_step == 1
    files.append_steps([a_report(2)])
    assert steps(tmp_path) == [1, 2]


def test_a_file_that_could_not_be_read_at_the_start_keeps_its_lines(tmp_path: Path) -> None:
    """It counted as empty, so the next step overwrote it from its beginning."""
    ReportFiles(tmp_path).append_steps([a_report(1), a_report(2)])
    lines = tmp_path / "metrics.jsonl"
    aside = lines.rename(tmp_path / "aside")
    lines.symlink_to(lines)  # cannot be read: a link to itself
    files = ReportFiles(tmp_path)
    files.append_steps([a_report(2), a_report(3)])
    lines.unlink()
    aside.rename(lines)
    files.append_steps([a_report(2), a_report(3), a_report(4)])
    assert steps(tmp_path) == [1, 2, 3, 4]


def test_a_file_that_is_too_large_to_be_read_is_left_as_it_is(tmp_path: Path) -> None:
    ReportFiles(tmp_path).append_steps([a_report(1)])
    lines = tmp_path / "metrics.jsonl"
    os.truncate(lines, LINES_BYTES + 1)
    ReportFiles(tmp_path).append_steps([a_report(2)])
    assert lines.stat().st_size == LINES_BYTES + 1


def test_lines_that_could_not_be_written_are_written_with_the_next(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    files = ReportFiles(folder)  # a folder that is not there refuses every write, as a full disk does
    for _ in range(2):
        files.append_steps([a_report(1)])
        files.write_status(StatusReport(run="run", phase=Phase.TRAINING))
    assert files.last_step == 0
    folder.mkdir()
    files.append_steps([a_report(1), a_report(2)])
    files.write_status(StatusReport(run="run", phase=Phase.TRAINING))
    assert steps(folder) == [1, 2]
    assert json.loads((folder / "status.json").read_text())["phase"] == "training"
    assert capfd.readouterr().out.count("report_files_delayed") == 2  # once of each file


def test_a_page_of_steps_is_read_without_the_rest(tmp_path: Path) -> None:
    files = ReportFiles(tmp_path)
    files.append_steps([a_report(step) for step in range(1, 8)])
    assert [report.step for report in files.read_page(2, 99, 3)] == [3, 4, 5]
    again = ReportFiles(tmp_path)
    again.append_steps([a_report(8)])
    assert [report.step for report in again.read_page(5, 8, 9)] == [6, 7]
    assert [report.step for report in again.read_page(7, 99, 9)] == [8]
    (tmp_path / "metrics.jsonl").unlink()
    assert again.read_page(0, 99, 9) == []


def test_every_validation_has_a_line_including_the_one_before_the_first_step(tmp_path: Path) -> None:
    kept = [ValidationReport(policy_version=version, reward=0.5, problems=8, seconds=1.0) for version in (0, 3, 6)]
    ReportFiles(tmp_path).append_validations(kept[:2])
    files = ReportFiles(tmp_path)
    files.append_validations(kept)
    files.append_validations(kept)
    lines = (tmp_path / "validations.jsonl").read_text().splitlines()
    assert [json.loads(line)["policyVersion"] for line in lines] == [0, 3, 6]
