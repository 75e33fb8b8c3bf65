"""`specrl spec`, `specrl families` and `specrl crd`: what a run file says, and what it may ask for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specrl.cli.options import Overrides
from specrl.spec import crd as definition
from specrl.spec import digest, dump, load_spec

app = typer.Typer(help="Run files: check one, or show it with every default.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", help="Run file (YAML), or an RLJob manifest.")]


@app.command()
def check(file: File, overrides: Overrides = []) -> None:  # noqa: B006 - typer copies it
    """Check a run file against every rule; list all that is wrong at once. Starts nothing."""
    spec = load_spec(file, overrides)
    typer.echo(f"{file}: run {spec.name} is valid (digest {digest(spec)[:12]})")


@app.command()
def show(file: File, overrides: Overrides = []) -> None:  # noqa: B006 - typer copies it
    """Print the run file with every default filled in and every path made absolute."""
    typer.echo(dump(load_spec(file, overrides)), nl=False)


def families() -> None:
    """List the generated problem families, for `prompts.source.generated.family`, each with an example."""
    from specrl.prompts.families import default_difficulty, family_names, generate_problem

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("family", "steps", "example", "answer"):
        table.add_column(title, overflow="fold")
    for name in family_names():
        problem, difficulty = generate_problem(name, seed=0, index=0), default_difficulty(name)
        table.add_row(name, f"{difficulty.shortest}-{difficulty.longest}", problem.question, problem.answer)
    Console().print(table, markup=False, highlight=False)


def crd() -> None:
    """Print the CustomResourceDefinition of RLJob: `specrl crd | kubectl apply -f -`. The chart installs the same."""
    typer.echo(definition.page(), nl=False)
