"""The files that people and programs read beside a run: metrics.jsonl, validations.jsonl and status.json.

metrics.jsonl has one line a step, validations.jsonl one a validation; sinks (`coordinator/sinks`) and `specrl report`
read them. They show what the store holds; nothing is read back to decide anything. So a disk that is full delays them,
and stops nothing: lines that could not be written are written with the next, and a line that was cut short is written
over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import structlog
from pydantic import ValidationError

from specrl.coordinator.report import Report, Status, StepReport, ValidationReport
from specrl.telemetry import metrics

METRICS, VALIDATIONS = "metrics.jsonl", "validations.jsonl"

R = TypeVar("R", bound=Report)

log = structlog.get_logger(__name__)


class ReportFiles:
    """The files of one run."""

    def __init__(self, directory: Path) -> None:
        """Takes the files up where they end, a last line without its end left out."""
        self._steps = _Lines(directory / METRICS, StepReport, lambda report: report.step, self._fell_behind)
        self._validations = _Lines(
            directory / VALIDATIONS, ValidationReport, lambda report: report.policy_version, self._fell_behind
        )
        self._status = directory / "status.json"
        self._is_behind = False

    @property
    def last_step(self) -> int:
        """The last step that has its line; 0 before the first."""
        return max(self._steps.last, 0)

    def append(self, reports: Sequence[StepReport]) -> None:
        """Add a line for each step that has none yet. reports: ascending."""
        self._is_behind = not self._steps.append(reports)

    def append_validations(self, reports: Sequence[ValidationReport]) -> None:
        """The same for validations, in the order of their versions."""
        self._is_behind = not self._validations.append(reports)

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
        found = {report.step: report for report in self._steps.read() if report.step < step}
        return [found[known] for known in sorted(found)]

    def page(self, after: int, before: int, limit: int) -> list[StepReport]:
        """The first `limit` reports of steps > `after` and < `before`, ascending; the rest of the file is not read."""
        return self._steps.read_some([step for step in range(after + 1, before) if step in self._steps][:limit])

    def _fell_behind(self, error: OSError) -> None:
        if not self._is_behind:
            log.warning("report_files_delayed", reason=str(error))
        self._is_behind = True


class _Lines(Generic[R]):
    """A file of one line a report, ascending by a number that no two share.

    last: the number of the last line, -1 before the first.
    """

    def __init__(
        self, path: Path, kind: type[R], number: Callable[[R], int], fell_behind: Callable[[OSError], None]
    ) -> None:
        self._path, self._kind, self._number, self._fell_behind = path, kind, number, fell_behind
        written = path.read_bytes() if path.exists() else b""
        self._end = written.rfind(b"\n") + 1
        self._places = self._places_in(written[: self._end])
        self.last = max(self._places, default=-1)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def append(self, reports: Sequence[R]) -> bool:
        """Add a line for each report that has none yet; false when the disk refuses, and the next call tries again."""
        new = [report for report in reports if self._number(report) > self.last]
        lines = [report.model_dump_json(by_alias=True).encode() + b"\n" for report in new]
        try:
            with self._path.open("r+b" if self._path.exists() else "wb") as file:
                file.seek(self._end)
                file.write(b"".join(lines))
                file.truncate()
        except OSError as error:
            self._fell_behind(error)
            return False
        for report, line in zip(new, lines, strict=True):
            self._places[self._number(report)] = self._end, len(line)
            self._end += len(line)
        self.last = self._number(new[-1]) if new else self.last
        return True

    def read(self) -> list[R]:
        try:
            written = self._path.read_bytes()[: self._end]
        except OSError:
            return []
        return self._parsed(written)

    def read_some(self, numbers: Sequence[int]) -> list[R]:
        """Those with these numbers, which are there, and no other; none of them when the file cannot be read."""
        try:
            with self._path.open("rb") as file:
                return [report for number in numbers for report in self._parsed(self._line(file, number))]
        except OSError:
            return []

    def _line(self, file: BinaryIO, number: int) -> bytes:
        place, length = self._places[number]
        file.seek(place)
        return file.read(length)

    def _places_in(self, lines: bytes) -> dict[int, tuple[int, int]]:
        """Where each report is, as offset and length in bytes; of one that is there twice, the later one."""
        places, offset = {}, 0
        for line in lines.splitlines(keepends=True):
            places.update({self._number(report): (offset, len(line)) for report in self._parsed(line)})
            offset += len(line)
        return places

    def _parsed(self, lines: bytes) -> list[R]:
        found = []
        for line in lines.splitlines():
            try:
                found.append(self._kind.model_validate_json(line))
            except ValidationError:  # another version's, or a disk's: it is only shown
                metrics.FILES_PASSED_OVER.labels("report").inc()
        return found
