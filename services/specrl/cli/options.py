"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

RunFile = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML), or an RLJob manifest.")]
Overrides = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="PATH=VALUE", help="Change one field, as in schedule.steps=50. May be given several times."
    ),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that holds the runs.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="One line of text a step, no live view. The default off a terminal.")
]

RUNS = Path("runs")
