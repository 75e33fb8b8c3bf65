"""Writes metrics.jsonl, validations.jsonl and status.json in the run's folder.

metrics.jsonl has one line per step, validations.jsonl one per validation. Sinks (`observe/sinks`) and `specrl report`
read them. They copy what the store holds, and nothing reads them to decide anything. So a full disk only delays them:
missing lines are written with the next ones, and a truncated last line is overwritten. A file that exists and cannot be
read is not written until it can be: the store has only the newest of its reports.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import structlog
from pydantic import ValidationError

from specrl.files import LINES_BYTES, check_regular, open_regular, write_text
from specrl.formats.reports import StatusReport, StepReport, ValidationReport
from specrl.telemetry import metrics

METRICS = "metrics.jsonl"
VALIDATIONS = "validations.jsonl"

log = structlog.get_logger(__name__)


class ShownFileWrites:
    """Writes to files that are only shown. A full disk stops nothing: it is logged once until the file is written."""

    def __init__(self) -> None:
        self._behind: set[str] = set()

    def try_write(self, name: str, write: Callable[[], None]) -> bool:
        """Call `write`, which raises OSError if the file of this name cannot be written. Returns whether it could."""
        try:
            write()
        except OSError as error:
            if name not in self._behind:
                log.warning("report_files_delayed", file=name, reason=str(error))
            self._behind.add(name)
            return False
        self._behind.discard(name)
        return True


class ReportFiles:
    """The files of one run."""

    def __init__(self, directory: Path) -> None:
        """Find the end of each existing file. A last line without a newline was truncated and does not count."""
        self._steps = _ReportLines(directory / METRICS, StepReport)
        self._validations = _ReportLines(directory / VALIDATIONS, ValidationReport)
        self._status = directory / "status.json"
        self._writes = ShownFileWrites()

    @property
    def last_step(self) -> int:
        """The last step that has a line; 0 before the first."""
        return max(self._steps.last, 0)

    def append_steps(self, reports: Sequence[StepReport]) -> None:
        """Append a line for each step that has none yet. reports: ascending."""
        self._writes.try_write(METRICS, lambda: self._steps.append_new(reports))

    def append_validations(self, reports: Sequence[ValidationReport]) -> None:
        """Append a line for each validation that has none yet. reports: by ascending version."""
        self._writes.try_write(VALIDATIONS, lambda: self._validations.append_new(reports))

    def write_status(self, status: StatusReport) -> None:
        """Replace status.json atomically."""
        self._writes.try_write(
            self._status.name, lambda: write_text(self._status, status.model_dump_json(by_alias=True, indent=1))
        )

    def read_before(self, step: int) -> list[StepReport]:
        """Read the reports of steps < `step`, ascending. If a step has two lines, the later one counts."""
        found = {report.step: report for report in self._steps.read_all() if report.step < step}
        return [found[known] for known in sorted(found)]

    def read_page(self, after: int, before: int, limit: int) -> list[StepReport]:
        """Read the first `limit` reports of steps > `after` and < `before`, ascending, without the rest of the file."""
        return self._steps.read_some([step for step in range(after + 1, before) if step in self._steps][:limit])


class _ReportLines[R: (StepReport, ValidationReport)]:
    """A file with one line per report, in ascending order of the policy version, which is unique.

    last: the version of the last line; -1 without lines.
    """

    def __init__(self, path: Path, kind: type[R]) -> None:
        self._path = path
        self._kind: type[R] = kind
        self._end = 0
        self._places: dict[int, tuple[int, int]] = {}
        self.last = -1
        self._is_located = False
        with suppress(OSError):  # `append_new` tries again
            self._locate_end()

    def _locate_end(self) -> None:
        """Find the lines of the file, and their end, where the next one is written.

        Raises OSError if there is a file that cannot be read: where its lines end is then unknown.
        """
        written = b""
        with suppress(FileNotFoundError):
            check_regular(self._path, LINES_BYTES)
            with open_regular(self._path) as file:
                written = file.read()
        self._end = written.rfind(b"\n") + 1  # everything after it is a truncated line
        self._places = self._locate_lines(written[: self._end])
        self.last = max(self._places, default=-1)
        self._is_located = True

    def __contains__(self, version: int) -> bool:
        return version in self._places

    def append_new(self, reports: Sequence[R]) -> None:
        """Append a line for each report that has none yet. Raises OSError; the next call then writes the same lines."""
        if not self._is_located:
            self._locate_end()
        new = [report for report in reports if report.policy_version > self.last]
        lines = [report.model_dump_json(by_alias=True).encode() + b"\n" for report in new]
        with self._path.open("r+b" if self._path.exists() else "wb") as file:
            # Overwrite what an earlier failed write may have left after the last complete line.
            file.seek(self._end)
            file.write(b"".join(lines))
            file.truncate()
        # Only now that the file is written and closed: after an error, `_end` and `last` still describe the old file.
        for report, line in zip(new, lines, strict=True):
            self._places[report.policy_version] = self._end, len(line)
            self._end += len(line)
            self.last = report.policy_version

    def read_all(self) -> list[R]:
        try:
            with open_regular(self._path) as file:
                written = file.read(self._end)
        except OSError:
            return []
        return self._parse_lines(written)

    def read_some(self, versions: Sequence[int]) -> list[R]:
        """Read the reports of these versions, which must exist. Returns none when the file cannot be read."""
        lines = []
        try:
            with open_regular(self._path) as file:
                for version in versions:
                    offset, length = self._places[version]
                    file.seek(offset)
                    lines.append(file.read(length))
        except OSError:
            return []
        return self._parse_lines(b"".join(lines))

    def _locate_lines(self, lines: bytes) -> dict[int, tuple[int, int]]:
        """Locate each report: version to offset and length in bytes. Of a version's lines, the last one counts."""
        places = {}
        offset = 0
        for line in lines.splitlines(keepends=True):
            places.update({report.policy_version: (offset, len(line)) for report in self._parse_lines(line)})
            offset += len(line)
        return places

    def _parse_lines(self, lines: bytes) -> list[R]:
        found = []
        for line in lines.splitlines():
            try:
                found.append(self._kind.model_validate_json(line))
            except ValidationError:  # written by another version, or damaged; skipped, since it is only displayed
                metrics.FILES_SKIPPED.labels("report").inc()
        return found
