"""`specrl doctor`: examines this machine and this installation, for bug reports and before a first run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from specrl.cli.options import RUNS, AsJson, Runs
from specrl.formats.doctor_report import DoctorReport, FindingState
from specrl.launcher.doctor.examination import examine, list_probes

WIDTH = 80
"""Columns of the text: what fits into an issue without wrapping."""


def examine_machine(
    file: Annotated[
        Path | None,
        typer.Argument(metavar="[FILE]", help="Run file whose store is checked, too. Nothing of it is started."),
    ] = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Print what a bug report needs: versions, driver, GPUs, limits, folders, ports and the sandbox.

    Each finding is ok, a warning or a problem, with a remedy. A problem would stop a run on this machine; the exit code
    is then 1. It takes seconds, loads no model, and changes nothing.
    """
    report = examine(list_probes(runs, file))
    typer.echo(report.model_dump_json(by_alias=True, indent=2) if as_json else "\n".join(render_report(report)))
    if report.problems:
        raise typer.Exit(1)


def render_report(report: DoctorReport) -> Iterator[str]:
    """Yield the lines of the text: two aligned columns, and a last line that counts warnings and problems."""
    indent = max(len(finding.name) for finding in report.findings) + 2
    for finding in report.findings:
        is_ok = finding.state is FindingState.OK
        yield from _fill_column(finding.name, finding.value if is_ok else f"{finding.state}: {finding.value}", indent)
        if finding.remedy:
            yield from _fill_column("", f"-> {finding.remedy}", indent)
    warnings = sum(finding.state is FindingState.WARNING for finding in report.findings)
    yield f"{_count(report.problems, 'problem')}, {_count(warnings, 'warning')}"


def _fill_column(name: str, text: str, indent: int) -> Iterator[str]:
    """Yield lines with the name in the first column and the text, wrapped, in the second."""
    # Paths longer than the column stay whole, so that they can be copied.
    lines = [
        part
        for line in text.splitlines()
        for part in textwrap.wrap(line, WIDTH - indent, break_long_words=False, break_on_hyphens=False)
    ]
    for number, line in enumerate(lines):
        yield f"{name if number == 0 else '':<{indent}}{line}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
