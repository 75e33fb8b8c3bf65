"""`specrl report`: the figures of a run, or of two side by side, as one HTML page and as Markdown."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specrl.cli.options import RUNS, Runs
from specrl.launcher import run_directory
from specrl.report import comparison, render, sections
from specrl.report.reading import read


def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")],
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Compare it with this run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE",
            help="Folder, or file that ends in .html or .md. Default: the folder of (the first) RUN.",
        ),
    ] = None,
    runs: Runs = RUNS,
) -> None:
    """Write what a run cost and brought: stages of a step, exposed generation, speculation, lag, reward, validation.

    Both an HTML page without any request and the same as Markdown. The run may be under way, or interrupted.
    """
    first = run_directory.find(run, runs)
    if other is None:
        document, name = sections.document(read(first)), "report"
    else:
        second = run_directory.find(other, runs)
        document, name = comparison.document(read(first), read(second)), f"report-with-{second.name}"
    for path in render.write(document, out or first.path, name):
        typer.echo(path)
