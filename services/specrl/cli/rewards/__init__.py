"""`specrl rewards`: tries a verifier on completions from a file, or on the rollouts of a run."""

from __future__ import annotations

import typer

from specrl.cli.rewards.command import EPILOG, grade_completions

app = typer.Typer(help="Try a verifier before it rewards a run.", no_args_is_help=True)


@app.callback()
def require_subcommand() -> None:
    """Keep `grade` a subcommand: typer runs the only command of an app without its name."""


app.command("grade", epilog=EPILOG)(grade_completions)
