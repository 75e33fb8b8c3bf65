"""The interface of a sink. tests/contract/test_sink_contract.py tests every implementation against it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.spec import RunSpec


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink shows. run_id: unique to the run, and the same after every restart."""

    spec: RunSpec
    directory: Path
    run_id: str

    @property
    def display_name(self) -> str:
        """Name of the run's folder, which distinguishes runs of the same run file."""
        return self.directory.resolve().name

    def dump_settings(self) -> dict[str, Any]:
        """Return the resolved run file as JSON. It contains no secrets, only where they are read from."""
        return self.spec.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class SinkProgress:
    """The last step that a sink already has (0: none), and the last validation's policy version (-1: none)."""

    step: int = 0
    version: int = -1


class ReportSink(Protocol):
    """An open connection to a tool that shows reports. Used by one thread. Raises whatever its library raises.

    Opening a sink continues the run's existing record, if it has one. Reports that it lost are sent again.
    """

    def read_progress(self) -> SinkProgress:
        """Return what the sink already has of this run. Called once, right after opening."""

    def add_step(self, report: StepReport) -> None:
        """Add a step. Steps arrive in ascending order, each once."""

    def add_validation(self, report: ValidationReport) -> None:
        """Add a validation. Validations arrive in ascending order of policy version."""

    def flush(self) -> None:
        """Make everything added so far durable. May block as long as its library does."""

    def close(self, phase: Phase | None) -> None:
        """Close the sink. phase: the phase in which the run ended; None after a failure, if it will be opened again."""


def flatten_step(report: StepReport) -> dict[str, float]:
    """Flatten a step's numbers: `reward`, `phases/generation`, `accepted_per_position/1`. Nulls are omitted.

    With several sources, those of each follow as `sources/NAME/reward` and so on.
    """
    found: dict[str, float] = {"exposed_generation_share": report.phases.exposed_share}
    left_out = {"step", "failed", "left_out", "verifier_errors", "checksum", "sources"}
    for name, value in report.model_dump(exclude=left_out).items():
        parts: dict[str, Any] = {name: value}
        if isinstance(value, dict):
            parts = {f"{name}/{part}": number for part, number in value.items()}
        elif isinstance(value, list):
            # Policy lags count from 0; positions of a draft from 1.
            first = 0 if name == "policy_lags" else 1
            parts = {f"{name}/{place}": number for place, number in enumerate(value, first)}
        found |= {part: float(number) for part, number in parts.items() if number is not None}
    for name, part in report.sources.items():
        found |= {f"sources/{name}/{field}": float(number) for field, number in part.model_dump().items()}
    return found


def flatten_validation(report: ValidationReport) -> dict[str, float]:
    """Flatten a validation's numbers: mean reward and pass@k with their intervals, failed answers, seconds.

    With several sources, those of each follow as `validation/NAME/reward` and so on.
    """
    found = {"validation/seconds": report.seconds} | _flatten_scores(report, "validation")
    for name, part in report.sources.items():
        found |= _flatten_scores(part, f"validation/{name}")
    return found


def _flatten_scores(report: ValidationReport, prefix: str) -> dict[str, float]:
    found = {f"{prefix}/reward": report.reward, f"{prefix}/failed": float(report.failed_count)}
    if report.reward_low is not None and report.reward_high is not None:
        found |= {f"{prefix}/reward_low": report.reward_low, f"{prefix}/reward_high": report.reward_high}
    found |= {f"{prefix}/rewards/{name}": value for name, value in report.rewards.items()}
    for item in report.pass_at:
        name = f"{prefix}/pass_at_{item.k}"
        found |= {name: item.rate, f"{name}_low": item.low, f"{name}_high": item.high}
    return found
