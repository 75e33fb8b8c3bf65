"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specrl.errors import RunInvalid

RunOrNewest = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name. Default: the newest.")]
RunFile = Annotated[Path, typer.Option("--file", "-f", metavar="FILE", help="Run file (YAML), or an RLJob manifest.")]
Overrides = Annotated[
    list[str],
    typer.Option("--set", metavar="PATH=VALUE", help="Override one field, as in schedule.steps=50. May be repeated."),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder that holds the runs.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="Print one line per step, without a live view. Default without a terminal.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]

RUNS = Path("runs")


def refuse_existing(out: Path) -> None:
    """Raise RunInvalid when `--out` exists."""
    if out.exists():
        kind = "folder" if out.is_dir() else "file"
        raise RunInvalid(f"--out must not exist, got the {kind} {out}; name another path, or remove this {kind}")
