"""Reads reports from a run's folder at any time: its last status, its steps, its coordinator's address.

The coordinator writes these files (`run_directory` lists them). A missing or damaged file counts as absent. The last
line of `metrics.jsonl` is skipped when a crash cut it short. Used by commands and reports on runs that have ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from specrl.files import LINES_BYTES, SMALL_BYTES, check_regular, open_regular, parse_object, read_object
from specrl.formats.reports import StatusReport, StepReport
from specrl.formats.rollout_samples import RolloutSample
from specrl.launcher.run_directory import RunDirectory


def read_stored_status(directory: RunDirectory) -> StatusReport | None:
    """Return the last status that the coordinator wrote; None when it wrote none."""
    try:
        return parse_report(StatusReport, read_object(directory.status_file))
    except (OSError, ValueError):
        return None


def read_outcome(directory: RunDirectory) -> dict[str, Any]:
    """Return how the last launch ended: `exitCode`, and `error` or null. Empty if it runs, or if it was killed."""
    try:
        return read_object(directory.outcome_file, SMALL_BYTES)
    except (OSError, ValueError):
        return {}


def read_stored_steps(directory: RunDirectory) -> list[StepReport]:
    """Return the reports of all steps in order. A step that a restart repeated appears once, as reported last."""
    found, _ = read_report_lines(directory.metrics_file, StepReport)
    return [*{step.step: step for step in found}.values()]


def read_stored_rollouts(directory: RunDirectory) -> list[RolloutSample]:
    """Return the samples of a run's rollouts, by step. One that a restart repeated appears once, as written last."""
    found = dict[str, RolloutSample]()
    for file in (directory.older_rollouts_file, directory.rollouts_file):
        samples, _ = read_report_lines(file, RolloutSample)
        found |= {sample.id: sample for sample in samples}
    return sorted(found.values(), key=lambda sample: sample.step)


def read_report_lines[R: BaseModel](file: Path, kind: type[R]) -> tuple[list[R], int]:
    """Parse the lines of a JSONL file as reports. Returns the reports, and the number of lines that are not reports.

    A last line without a newline is ignored: the coordinator is still writing it.
    """
    try:
        check_regular(file, LINES_BYTES)
        with open_regular(file) as lines:
            # readline with a limit: a damaged file without newlines must not fill the memory.
            whole = [line for line in iter(lambda: lines.readline(SMALL_BYTES), b"") if line.endswith(b"\n")]
    except OSError:  # most often there is no such file yet
        return [], 0
    found = [parse_report(kind, _parse_line(line)) for line in whole]
    return [report for report in found if report is not None], found.count(None)


def read_http_address(directory: RunDirectory) -> str | None:
    """Return the address at which the coordinator serves its page; None when it has not started."""
    try:
        address = read_object(directory.endpoints_file, SMALL_BYTES).get("http")
    except (OSError, ValueError):
        return None
    return str(address) if address else None


def parse_report[R: BaseModel](kind: type[R], content: Any) -> R | None:
    """Parse a report from decoded JSON; None when it is not a report of this kind."""
    try:
        return kind.model_validate(content)
    except ValidationError:
        return None


def parse_reports[R: BaseModel](kind: type[R], content: Any) -> list[R]:
    """Parse a decoded JSON list of reports, dropping items that are not reports."""
    found = [parse_report(kind, item) for item in content] if isinstance(content, list) else []
    return [report for report in found if report is not None]


def _parse_line(line: bytes) -> Any:
    try:
        return parse_object(line)
    except ValueError:
        return None
