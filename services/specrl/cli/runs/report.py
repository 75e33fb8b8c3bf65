"""`specrl report`: writes the figures of a run, or of two side by side, as a page, as Markdown or as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specrl.cli.options import RUNS, AsJson, Runs
from specrl.formats.reports import ReportModel
from specrl.launcher import run_directory
from specrl.report import comparison, export, render, sections
from specrl.report.reading import load_run


def write_report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Run folder or name.")],
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="Compare it with this run.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR|FILE", help="Folder, or a file that ends in .html or .md. Default: the folder of RUN."
        ),
    ] = None,
    runs: Runs = RUNS,
    as_json: AsJson = False,
) -> None:
    """Write a run's figures: phases of a step, exposed generation, speculation, lag, reward, validation.

    Writes a self-contained HTML page and the same as Markdown. With --json it prints all figures and writes no page.
    The run may be active or interrupted.
    """
    if as_json and out is not None:
        raise typer.BadParameter("give either --json, which writes no page, or --out")
    first = run_directory.find_run(run, runs)
    if as_json:
        loaded = load_run(first)
        figures: ReportModel = export.export_run(loaded)
        if other is not None:
            figures = export.export_comparison(loaded, load_run(run_directory.find_run(other, runs)))
        typer.echo(figures.model_dump_json(by_alias=True, indent=2))
        return
    if other is None:
        document = sections.build_run_report(load_run(first))
        name = "report"
    else:
        second = run_directory.find_run(other, runs)
        document = comparison.build_comparison(load_run(first), load_run(second))
        name = f"report-with-{second.name}"  # beside the report on the first run alone
    for path in render.write_pages(document, out or first.path, name):
        typer.echo(path)
