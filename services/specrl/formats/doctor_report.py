"""What `specrl doctor --json` prints: the findings about this machine and this installation."""

from __future__ import annotations

from enum import StrEnum

from pydantic import computed_field

from specrl.formats.reports import ReportModel


class FindingState(StrEnum):
    """How a finding affects runs. PROBLEM: it would stop one. WARNING: it may slow one down, or stop some runs."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


class Finding(ReportModel):
    """One fact about this machine or this installation."""

    name: str
    """What was examined, such as `torch` or `shared memory`. Several findings may have one name: one for each GPU."""
    state: FindingState
    """ok; warning: it may slow a run down, or stop some runs; problem: it would stop a run on this machine."""
    value: str
    """What was found, with units."""
    remedy: str = ""
    """What to change. Empty if the state is ok."""


class DoctorReport(ReportModel):
    """All findings of one `specrl doctor`."""

    findings: list[Finding]
    """In the order of the text output: software, GPUs, machine, run file."""

    @computed_field  # type: ignore[prop-decorator] # mypy has no decorated properties
    @property
    def problems(self) -> int:
        """Number of findings whose state is problem. The exit code is 1 unless it is 0."""
        return sum(finding.state is FindingState.PROBLEM for finding in self.findings)
