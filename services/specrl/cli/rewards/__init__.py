"""`specrl rewards`: try a verifier, or a run's own one, on completions in a file or on the rollouts of a run."""

from __future__ import annotations

import typer

from specrl.cli.rewards.command import EPILOG, grade

app = typer.Typer(help="Try a verifier before it rewards a run.", no_args_is_help=True)


@app.callback()
def rewards() -> None:
    """Keeps `grade` a command of its own: typer runs the only command of an app without its name."""


app.command("grade", epilog=EPILOG)(grade)
