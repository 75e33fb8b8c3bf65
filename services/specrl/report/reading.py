"""Reads a run's folder for a report. The run may be finished, failed, interrupted or in progress.

Damaged lines and files are skipped and counted, so that a report never fails for them.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property

from specrl.errors import RunInvalid
from specrl.files import SMALL_BYTES, read_object, read_text
from specrl.formats.reports import Phase, StatusReport, StepReport, ValidationReport
from specrl.hub import FetchedSource, read_sources
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.run_state import read_run_state
from specrl.launcher.stored_reports import read_report_lines, read_stored_status
from specrl.report.figures import RunFigures
from specrl.spec import RunSpec, load_spec


@dataclass(frozen=True)
class SpeedUp:
    """One row of the comparison of mechanisms that `specrl demo` measures after its run.

    batch: live rollouts. speed: median generation speed divided by that without speculation; low and high: its range.
    """

    mechanism: str
    batch: int
    speed: float
    low: float
    high: float


@dataclass(frozen=True)
class LoadedRun:
    """The content of one run's folder.

    steps, validations: ascending. unreadable: number of lines that were ignored. is_driven: whether a coordinator or
    launcher still holds the run's lock. origin: versions and machine, by name.
    sources: what the run file named on the hub.
    """

    name: str
    path: str
    spec: RunSpec
    status: StatusReport | None
    steps: tuple[StepReport, ...]
    validations: tuple[ValidationReport, ...]
    unreadable: int
    is_driven: bool
    origin: dict[str, str] = field(default_factory=dict)
    sources: tuple[FetchedSource, ...] = ()
    speed_ups: tuple[SpeedUp, ...] = ()

    @cached_property
    def figures(self) -> RunFigures:
        """The figures of its steps."""
        return RunFigures(self.steps)

    @property
    def error(self) -> str | None:
        """Why the run failed; None unless it did."""
        return self.status.error if self.status is not None and self.run_state == "failed" else None

    @property
    def run_state(self) -> str:
        """State of the run: finished, failed, in progress or interrupted."""
        phase = self.status.phase if self.status is not None else None
        if phase in (Phase.FINISHED, Phase.FAILED):
            return phase.value
        return "in progress" if self.is_driven else "interrupted"


def load_run(directory: RunDirectory) -> LoadedRun:
    """Read a run's folder.

    Raises SpecInvalid for an invalid run file, and RunInvalid for a run that trained no step and did not fail.
    """
    spec = load_spec(directory.run_file)
    steps, unreadable = read_report_lines(directory.metrics_file, StepReport)
    validations, torn = read_report_lines(directory.validations_file, ValidationReport)
    found = LoadedRun(
        name=directory.name,
        spec=spec,
        path=str(directory.path),
        status=_read_status(directory),
        # A step that was written twice, for example after a write error, counts once, with the later line.
        steps=tuple(sorted({report.step: report for report in steps}.values(), key=lambda report: report.step)),
        validations=tuple({report.policy_version: report for report in validations}.values()),
        unreadable=unreadable + torn,
        is_driven=directory.has_launcher(),
        origin=_read_origin(directory),
        sources=_read_sources(directory),
        speed_ups=_read_speed_ups(directory),
    )
    has_failed = found.status is not None and found.status.phase is Phase.FAILED
    if not found.steps and not has_failed:
        lost = f", and {unreadable} unreadable lines" if unreadable else ""
        raise RunInvalid(
            f"a run must have trained a step to be reported, got {directory.path}, which is {found.run_state} and has "
            f"none in {directory.metrics_file.name}{lost}; see `specrl status {directory.path}`"
        )
    return found


def _read_status(directory: RunDirectory) -> StatusReport | None:
    """Read the last status, corrected by how the last launch ended. None if the coordinator has written none."""
    stored = read_stored_status(directory)
    if stored is None:
        return None
    # The report shows the replicas that the run had.
    return read_run_state(directory).model_copy(update={"replicas": stored.replicas})


def _read_origin(directory: RunDirectory) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in read_object(directory.origin_file, SMALL_BYTES).items()}
    except (OSError, ValueError):  # missing or damaged; the report then says "not recorded"
        return {}


def _read_sources(directory: RunDirectory) -> tuple[FetchedSource, ...]:
    try:
        return read_sources(directory.path)
    except RunInvalid:  # damaged; the run file has the folders, with their commits
        return ()


def _read_speed_ups(directory: RunDirectory) -> tuple[SpeedUp, ...]:
    """Read comparison.json, which only the demo writes. Returns nothing if it is missing or damaged."""
    try:
        rows = json.loads(read_text(directory.path / "comparison.json"))
        return tuple(
            SpeedUp(
                str(row["mechanism"]), int(row["batch"]), *(float(row[k]) for k in ("speed", "speedLow", "speedHigh"))
            )
            for row in rows
            if row["mechanism"] != "none"  # the baseline, whose speed is 1 by definition
        )
    except (OSError, ValueError, OverflowError, KeyError, TypeError, RecursionError):  # the last for deeply nested JSON
        return ()
