"""Everything that a report is made of, read from a run's folder: whole, under way, interrupted or damaged."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from specrl.coordinator.report import Phase, Status, StepReport, ValidationReport
from specrl.errors import RunInvalid
from specrl.files import SMALL_BYTES, read_object, read_text
from specrl.launcher.reports import read_lines, stored_status
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import RunSpec, load_spec


@dataclass(frozen=True)
class SpeedUp:
    """One row of the comparison that `specrl demo` measures on its finished run. speed: over that of no speculation."""

    mechanism: str
    batch: int
    speed: float
    low: float
    high: float


@dataclass(frozen=True)
class Reading:
    """One run. steps and validations ascend; unreadable: lines of its files that were passed over."""

    name: str
    spec: RunSpec
    status: Status | None
    steps: tuple[StepReport, ...]
    validations: tuple[ValidationReport, ...]
    unreadable: int
    is_driven: bool
    origin: dict[str, str] = field(default_factory=dict)
    speed_ups: tuple[SpeedUp, ...] = ()

    @property
    def standing(self) -> str:
        """How the run stands, in a word or two."""
        phase = self.status.phase if self.status is not None else None
        if phase in (Phase.FINISHED, Phase.FAILED):
            return phase.value
        return "under way" if self.is_driven else "interrupted"


def read(directory: RunDirectory) -> Reading:
    """Read a run. Raises SpecInvalid for its run file, RunInvalid when it trained no step and did not fail either."""
    spec = load_spec(directory.run_file)
    steps, unreadable = read_lines(directory.metrics_file, StepReport)
    validations, torn = read_lines(directory.validations_file, ValidationReport)
    found = Reading(
        name=directory.name,
        spec=spec,
        status=stored_status(directory),
        steps=tuple(sorted({report.step: report for report in steps}.values(), key=lambda report: report.step)),
        validations=tuple({report.policy_version: report for report in validations}.values()),
        unreadable=unreadable + torn,
        is_driven=directory.is_driven(),
        origin=_origin(directory),
        speed_ups=_speed_ups(directory),
    )
    has_failed = found.status is not None and found.status.phase is Phase.FAILED
    if not found.steps and not has_failed:
        lost = f", and {unreadable} lines that cannot be read" if unreadable else ""
        raise RunInvalid(
            f"a run must have trained a step to be reported, got {directory.path}, which is {found.standing} and has "
            f"none in {directory.metrics_file.name}{lost}; see `specrl status {directory.path}`"
        )
    return found


def _origin(directory: RunDirectory) -> dict[str, str]:
    try:
        return {str(name): str(value) for name, value in read_object(directory.origin_file, SMALL_BYTES).items()}
    except (OSError, ValueError):  # a run of a version that wrote none
        return {}


def _speed_ups(directory: RunDirectory) -> tuple[SpeedUp, ...]:
    """Of comparison.json, where the demo has left one."""
    try:
        rows = json.loads(read_text(directory.path / "comparison.json"))
        return tuple(
            SpeedUp(
                str(row["mechanism"]), int(row["batch"]), *(float(row[k]) for k in ("speed", "speedLow", "speedHigh"))
            )
            for row in rows
            if row["mechanism"] != "none"
        )
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ()
