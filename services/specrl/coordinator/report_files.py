"""The files that people and programs read beside a run: metrics.jsonl, validations.jsonl and status.json.

metrics.jsonl has one line a step, validations.jsonl one a validation; sinks (`coordinator/sinks`) and `specrl report`
read them. They show what the store holds; nothing is read back to decide anything. So a disk that is full delays them,
and stops nothing: lines that could not be written are written with the next, and a line that was cut short is written
over.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog
from pydantic import ValidationError

from specrl.coordinator.report import Report, Status, StepReport, ValidationReport
from specrl.files import write_text
from specrl.telemetry import metrics

METRICS, VALIDATIONS = "metrics.jsonl", "validations.jsonl"


log = structlog.get_logger(__name__)


class ReportFiles:
    """The files of one run."""

    def __init__(self, directory: Path) -> None:
        """Takes the files up where they end, a last line without its end left out."""
        self._steps = _Lines(directory / METRICS, StepReport, lambda report: report.step)
        self._validations = _Lines(directory / VALIDATIONS, ValidationReport, lambda report: report.policy_version)
        self._status = directory / "status.json"
        self._behind: set[str] = set()

    @property
    def last_step(self) -> int:
        """The last step that has its line; 0 before the first."""
        return max(self._steps.last, 0)

    def append(self, reports: Sequence[StepReport]) -> None:
        """Add a line for each step that has none yet. reports: ascending."""
        self._write(METRICS, lambda: self._steps.append(reports))

    def append_validations(self, reports: Sequence[ValidationReport]) -> None:
        """The same for validations, in the order of their versions."""
        self._write(VALIDATIONS, lambda: self._validations.append(reports))

    def write_status(self, status: Status) -> None:
        """Replace status.json, in one piece."""
        self._write(
            self._status.name, lambda: write_text(self._status, status.model_dump_json(by_alias=True, indent=1))
        )

    def before(self, step: int) -> list[StepReport]:
        """Reports of the steps before `step`, ascending; of a step that is there twice, the later line."""
        found = {report.step: report for report in self._steps.read() if report.step < step}
        return [found[known] for known in sorted(found)]

    def page(self, after: int, before: int, limit: int) -> list[StepReport]:
        """The first `limit` reports of steps > `after` and < `before`, ascending; the rest of the file is not read."""
        return self._steps.read_some([step for step in range(after + 1, before) if step in self._steps][:limit])

    def _write(self, name: str, write: Callable[[], None]) -> None:
        """Say once of each file that the disk refuses it, until it is written again."""
        try:
            write()
            self._behind.discard(name)
        except OSError as error:
            if name not in self._behind:
                log.warning("report_files_delayed", file=name, reason=str(error))
            self._behind.add(name)


class _Lines[R: Report]:
    """A file of one line a report, ascending by a number that no two share.

    last: the number of the last line, -1 before the first.
    """

    def __init__(self, path: Path, kind: type[R], number: Callable[[R], int]) -> None:
        self._path, self._kind, self._number = path, kind, number
        written = path.read_bytes() if path.exists() else b""
        self._end = written.rfind(b"\n") + 1
        self._places = self._places_in(written[: self._end])
        self.last = max(self._places, default=-1)

    def __contains__(self, number: int) -> bool:
        return number in self._places

    def append(self, reports: Sequence[R]) -> None:
        """Add a line for each report that has none yet. Raises OSError; the next call writes what this one did not."""
        new = [report for report in reports if self._number(report) > self.last]
        lines = [report.model_dump_json(by_alias=True).encode() + b"\n" for report in new]
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            file.seek(self._end)
            file.write(b"".join(lines))
            file.truncate()
        for report, line in zip(new, lines, strict=True):
            self._places[self._number(report)] = self._end, len(line)
            self._end += len(line)
        self.last = self._number(new[-1]) if new else self.last

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
