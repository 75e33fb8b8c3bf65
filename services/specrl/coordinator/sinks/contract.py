"""What a sink is. One suite holds all of them to it (tests/contract/test_sink_contract.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from specrl.coordinator.report import Phase, StepReport, ValidationReport
from specrl.spec import RunSpec


@dataclass(frozen=True)
class SinkRun:
    """The run that a sink shows. run_id: the same after every restart, and no other run's."""

    spec: RunSpec
    directory: Path
    run_id: str

    @property
    def name(self) -> str:
        """That of the run's folder: runs of one run file are told apart by it."""
        return self.directory.resolve().name

    def settings(self) -> dict[str, Any]:
        """The resolved run file, as JSON. It holds no secret."""
        return self.spec.model_dump(mode="json", by_alias=True)


@dataclass(frozen=True)
class Received:
    """How far a sink is: its last step, 0 before the first; its last validation's version, -1 before the first."""

    step: int = 0
    version: int = -1


class Sink(Protocol):
    """An open connection to where steps are shown. Called by one thread; raises whatever its library raises.

    Opening it takes up the run's own record where there is one. What was given and is not `received` is given again.
    """

    def received(self) -> Received:
        """What it holds of this run; asked once, after opening."""

    def step(self, report: StepReport) -> None:
        """Take a step; ascending, each once."""

    def validation(self, report: ValidationReport) -> None:
        """Take a validation; in the order of their versions."""

    def flush(self) -> None:
        """Have what was taken where it is kept. May block for as long as its library does."""

    def close(self, phase: Phase | None) -> None:
        """Let go. phase: in which the run ended; None when only the connection is given up, after a failure."""


def numbers(report: StepReport) -> dict[str, float]:
    """A step's numbers by name: `reward`, `stages/generation`, `accepted_per_position/1`. What is null is left out."""
    total = report.stages.total
    found: dict[str, float] = {"exposed_generation_share": report.exposed_generation / total if total else 0.0}
    for name, value in report.model_dump(
        exclude={"step", "cursor", "ahead", "failed", "left_out", "verifier_errors", "checksum"}
    ).items():
        parts: dict[str, Any] = {name: value}
        if isinstance(value, dict):
            parts = {f"{name}/{part}": number for part, number in value.items()}
        elif isinstance(value, list):
            first = 0 if name == "policy_lags" else 1
            parts = {f"{name}/{place}": number for place, number in enumerate(value, first)}
        found |= {part: float(number) for part, number in parts.items() if number is not None}
    return found


def validation_numbers(report: ValidationReport) -> dict[str, float]:
    """A validation as numbers by name: mean reward, each pass@k, both with the ends of their interval; seconds."""
    found = {
        "validation/reward": report.reward,
        "validation/failed": float(report.failed),
        "validation/seconds": report.seconds,
    }
    if report.reward_low is not None and report.reward_high is not None:
        found |= {"validation/reward_low": report.reward_low, "validation/reward_high": report.reward_high}
    for item in report.pass_at:
        name = f"validation/pass_at_{item.k}"
        found |= {name: item.rate, f"{name}_low": item.low, f"{name}_high": item.high}
    return found
