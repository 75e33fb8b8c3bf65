"""`specrl drafter init`: an EAGLE-3 head for a policy, trained on the policy's own rollouts."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from specrl.cli.endings import conclude
from specrl.cli.options import RUNS, Overrides, Plain, RunFile, Runs
from specrl.errors import Problem, RunInvalid, SpecInvalid
from specrl.launcher import launch
from specrl.launcher.view import view_for
from specrl.spec import RunSpec, load_spec

app = typer.Typer(help="Drafters: small models that propose tokens for the policy to verify.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """Keeps `init` a command of its own, for there will be more."""


@app.command()
def init(
    file: RunFile,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write the drafter to; must not exist.")],
    overrides: Overrides = [],  # noqa: B006 - typer copies it
    runs: Runs = RUNS,
    plain: Plain = False,
) -> None:
    """Train a fresh drafter on the policy's own rollouts of the run's prompts, without moving the policy.

    This is the run of FILE with no steps and no validation; what `trainer.drafter.initialisation` says is done, and
    the drafter is written to DIR, for `generation.speculation.eagle3.path` of later runs.
    """
    if out.exists():
        raise RunInvalid(f"--out must not exist, got out={out}; name a new folder")
    spec = initialisation_only(load_spec(file, overrides))
    view = view_for(Console(), plain)
    launched = launch.begin(spec, runs, view)
    conclude(launched, view)
    assert launched.outcome.status is not None
    summary = launched.outcome.status.summary
    if summary is None or not summary.drafter_path:
        raise RunInvalid(f"the run must export a drafter, got none; see {launched.directory.logs}")
    copy_whole(Path(summary.drafter_path), out)
    typer.echo(f"drafter written to {out}")


def initialisation_only(spec: RunSpec) -> RunSpec:
    """The run without steps and validation. Raises SpecInvalid when it has no fresh drafter to train."""
    eagle3 = spec.generation.speculation.eagle3
    path = "generation.speculation.eagle3"
    if eagle3 is None:
        kind = spec.generation.speculation.kind
        raise SpecInvalid(
            (Problem(path, f"must be given to train a drafter, got {kind}", f"--set {path}.numDraftTokens=3"),)
        )
    if eagle3.path is not None:
        raise SpecInvalid(
            (Problem(f"{path}.path", f"must be null for a fresh drafter, got {eagle3.path}", "leave it out"),)
        )
    schedule = spec.schedule.model_copy(update={"steps": 0})
    return spec.model_copy(update={"schedule": schedule, "validation": None})


def copy_whole(source: Path, out: Path) -> None:
    """Copy a folder to a name that is free: it appears there complete, or not at all. Raises RunInvalid."""
    out = out.absolute()
    out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        shutil.copytree(source, unfinished, dirs_exist_ok=True)
        unfinished.chmod(0o755)  # mkdtemp's 0700 would hide it from other users
        unfinished.rename(out)
    except OSError as error:
        raise RunInvalid(f"the drafter must be written to {out}, got {error}; it is still in {source}") from error
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
