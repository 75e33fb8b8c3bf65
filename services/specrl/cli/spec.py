"""`specrl spec`, `specrl families` and `specrl crd`: check and show run files, and list what they may contain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from specrl.cli.options import Overrides
from specrl.spec import digest_spec, dump_spec, load_spec
from specrl.spec.rljob import crd as definition

app = typer.Typer(help="Check a run file, or show it with all defaults.", no_args_is_help=True)
File = Annotated[Path, typer.Argument(metavar="FILE", help="Run file (YAML), or an RLJob manifest.")]


@app.command("check")
def check_run_file(
    file: File,
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Also check models, data, memory and ports, as `specrl run` does.")
    ] = False,
) -> None:
    """Check a run file and list all malformed fields, or all broken rules. Starts nothing."""
    if preflight:
        # Imported here: preflight imports every package, and checking a file's fields must stay fast.
        from specrl.launcher.preflight import check_run, load_run
        from specrl.launcher.terminal.check_progress import open_fetch_display
        from specrl.launcher.terminal.view import choose_view

        spec = load_run(file, overrides)
        with open_fetch_display(choose_view(Console(stderr=True), is_plain=False)) as display:
            ready = check_run(spec, display=display)
        for notice in ready.notices:
            typer.echo(f"warning: {notice}", err=True)
    else:
        spec = load_spec(file, overrides)
    typer.echo(f"{file}: run {spec.name} is valid (digest {digest_spec(spec)[:12]})")


@app.command("show")
def show_run_file(file: File, overrides: Overrides = []) -> None:  # noqa: B006 - typer copies it
    """Print the run file with all defaults filled in and all paths made absolute."""
    typer.echo(dump_spec(load_spec(file, overrides)), nl=False)


def list_families() -> None:
    """List the generated problem families for `prompts.source.generated.family`, each with an example."""
    from specrl.prompts.families import default_difficulty, family_names, generate_problem

    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0))
    for title in ("family", "steps", "example", "answer"):
        table.add_column(title, overflow="fold")
    for name in family_names():
        problem = generate_problem(name, seed=0, index=0)  # fixed, so that the table never changes
        difficulty = default_difficulty(name)
        table.add_row(name, f"{difficulty.shortest}-{difficulty.longest}", problem.question, problem.answer)
    Console().print(table, markup=False, highlight=False)


def print_crd() -> None:
    """Print the CustomResourceDefinition of RLJob, for `kubectl apply -f -`. The chart installs the same one."""
    typer.echo(definition.render_definition(), nl=False)
