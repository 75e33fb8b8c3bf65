"""How commands end: one message, one exit code."""

from __future__ import annotations

from typing import Any

import typer
from typer.core import TyperGroup

from specrl.coordinator.report import Phase
from specrl.errors import SpecrlError
from specrl.launcher.launch import Launched
from specrl.launcher.local_run import Ended
from specrl.launcher.rows import printable
from specrl.launcher.view import View

FAILED_CODE, REFUSED_CODE, INTERRUPTED_CODE = 1, 2, 130


class Reporting(TyperGroup):
    """The edge of every command: errors raised on purpose become a message, Ctrl-C a short goodbye."""

    def invoke(self, ctx: Any) -> Any:  # typer's own copy of click, which has no public name
        try:
            return super().invoke(ctx)
        except SpecrlError as error:
            complain(str(error))
            raise typer.Exit(REFUSED_CODE) from error
        except KeyboardInterrupt as interrupt:
            complain("interrupted; nothing of it runs on")
            raise typer.Exit(INTERRUPTED_CODE) from interrupt


def complain(message: str) -> None:
    """Say one thing on stderr. Lines stay lines; control characters do not reach the terminal."""
    typer.echo("specrl: " + "\n".join(printable(line) for line in message.splitlines()), err=True)


def conclude(launched: Launched, view: View, resume: str = "specrl run --resume {}") -> None:
    """Show how a launch ended. Returns after a good end; raises typer.Exit with the right code after any other.

    resume: the command that goes on after another end, with {} for the run's folder.
    """
    outcome, directory = launched.outcome, launched.directory
    again = resume.format(directory.path)
    if outcome.ended is Ended.FINISHED:
        assert outcome.status is not None
        view.end(
            outcome.status,
            {
                "metrics": str(directory.metrics_file),
                "logs": str(directory.logs),
                "look again": f"specrl status {directory.path}",
                "keep": f"specrl report {directory.path}",
                "live page": f"specrl run --resume {directory.path} --serve",
            },
        )
        return
    if outcome.ended is Ended.INTERRUPTED:
        complain(f"stopped; go on with `{again}`")
        raise typer.Exit(INTERRUPTED_CODE)
    if outcome.ended is Ended.REFUSED:
        had_begun = outcome.status is not None and outcome.status.phase is Phase.FAILED
        after = f"\n  logs: {directory.logs}\n  once that is repaired, go on with `{again}`" if had_begun else ""
        complain(outcome.message + after)
        raise typer.Exit(REFUSED_CODE)
    complain(f"{outcome.message}\n  logs: {directory.logs}\n  go on with `{again}`")
    raise typer.Exit(FAILED_CODE)
