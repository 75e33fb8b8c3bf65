"""The files that people and programs read beside a run: metrics.jsonl, one line a step, and status.json.

They show what the store holds; nothing is read back to decide anything. So a disk that is full delays them, and stops
nothing: lines that could not be written are written with the next, and a line that was cut short is written over.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import structlog
from pydantic import ValidationError

from specrl.coordinator.report import Status, StepReport
from specrl.telemetry import metrics

log = structlog.get_logger(__name__)


class ReportFiles:
    """Both files of one run."""

    def __init__(self, directory: Path) -> None:
        """Takes up metrics.jsonl where it ends, a last line without its end left out."""
        self._metrics, self._status = directory / "metrics.jsonl", directory / "status.json"
        self._is_behind = False
        written = self._metrics.read_bytes() if self._metrics.exists() else b""
        self._end = written.rfind(b"\n") + 1
        self.last_step = max((report.step for report in _parsed(written[: self._end])), default=0)

    def append(self, reports: Sequence[StepReport]) -> None:
        """Add a line for each step that has none yet. reports: ascending."""
        new = [report for report in reports if report.step > self.last_step]
        lines = "".join(report.model_dump_json(by_alias=True) + "\n" for report in new).encode()
        try:
            with self._metrics.open("r+b" if self._metrics.exists() else "wb") as file:
                file.seek(self._end)
                file.write(lines)
                file.truncate()
        except OSError as error:
            self._fell_behind(error)
            return
        self._end += len(lines)
        self.last_step = new[-1].step if new else self.last_step
        self._is_behind = False

    def write_status(self, status: Status) -> None:
        """Replace status.json, in one piece."""
        part = self._status.with_suffix(".json.part")
        try:
            part.write_text(status.model_dump_json(by_alias=True, indent=1), encoding="utf-8")
            part.replace(self._status)
        except OSError as error:
            self._fell_behind(error)

    def before(self, step: int) -> list[StepReport]:
        """Reports of the steps before `step`, ascending; of a step that is there twice, the later line."""
        try:
            written = self._metrics.read_bytes()[: self._end]
        except OSError:
            return []
        found = {report.step: report for report in _parsed(written) if report.step < step}
        return [found[known] for known in sorted(found)]

    def _fell_behind(self, error: OSError) -> None:
        if not self._is_behind:
            log.warning("report_files_delayed", reason=str(error))
        self._is_behind = True


def _parsed(lines: bytes) -> list[StepReport]:
    found = []
    for line in lines.splitlines():
        try:
            found.append(StepReport.model_validate_json(line))
        except ValidationError:  # another version's, or a disk's: it is only shown
            metrics.FILES_PASSED_OVER.labels("report").inc()
    return found
