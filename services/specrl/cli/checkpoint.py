"""`specrl checkpoint`: have one written, and list, check, export or delete those that a run has."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from specrl.cli.control import tell
from specrl.cli.drafter import refuse_existing
from specrl.cli.endings import FAILED_CODE, complain
from specrl.cli.options import RUNS, Runs
from specrl.errors import CheckpointInvalid, RunInvalid
from specrl.installation import require_engines
from specrl.launcher import run_directory
from specrl.launcher.asking import ask
from specrl.launcher.run_directory import RunDirectory
from specrl.records import StreamPlace
from specrl.spec import load_spec
from specrl.trainer import checkpoints, checksums, mirror

app = typer.Typer(
    help="A run's checkpoints: have one written, list, check, export or delete them.", no_args_is_help=True
)

Run = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Run folder or name. Default: the newest.")]
Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Of this step.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print it as JSON, for programs.")]


@dataclass(frozen=True)
class Listed:
    """One checkpoint in the run's folder. kept: why it stays when the next is written. written: seconds since 1970.

    cursor, problems: the first prompt of the stream that it has not settled, and how many an epoch has; None of one
    that does not say.
    """

    step: int
    path: str
    size_bytes: int
    written: float
    has_drafter: bool
    kept: str
    is_mirrored: bool
    cursor: int | None
    problems: int | None


@app.command()
def save(run: Run = None, runs: Runs = RUNS) -> None:
    """Have a run that is under way write a checkpoint at the next boundary between two steps."""
    found = ask(_find(run, runs), "POST", "/checkpoint")
    tell(found, f"a checkpoint was asked for; the newest is of step {found.checkpoint_step}")


@app.command("list")
def list_(run: Run = None, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Show a run's complete checkpoints, why each is kept, and whether checkpoint.mirror has a copy.

    Changes nothing; the run may be under way.
    """
    directory = _find(run, runs)
    copies = mirror.of_run(load_spec(directory.run_file))
    mirrored = copies.steps() if copies is not None else []
    found = _listed(directory, mirrored)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in found], indent=2))
        return
    if not found:
        typer.echo(f"{directory.name}: no checkpoint in its folder")
    else:
        Console().print(_table(found))
    elsewhere = [step for step in mirrored if step not in {item.step for item in found}]
    if copies is not None and elsewhere:
        typer.echo(f"{copies.url} has those of steps {', '.join(map(str, elsewhere))}, too")
    for path in sorted((directory.path / "checkpoints").glob("unreadable-*")):
        typer.echo(f"{path}: was set aside, since it could not be read; delete it when you have looked at it")


@app.command()
def verify(run: Run = None, runs: Runs = RUNS, step: Step = None, as_json: AsJson = False) -> None:
    """Compare every file with the checksum that it was written with. Exit code 1 when one is missing or altered.

    All checkpoints, or that of --step. Changes nothing; the run may be under way.
    """
    directory = _find(run, runs)
    chosen = checkpoints.complete(directory.path) if step is None else [(step, _checkpoint(directory, step))]
    found = {number: _damages(path) for number, path in chosen}
    if as_json:
        typer.echo(json.dumps({str(number): damages for number, damages in found.items()}, indent=2))
    else:
        for number, damages in found.items():
            typer.echo(f"step {number}: {'as it was written' if not damages else '; '.join(damages)}")
    damaged = [number for number, damages in found.items() if damages]
    if damaged:
        if not as_json:
            complain(
                f"{len(damaged)} of {len(found)} checkpoints of {directory.name} are damaged; a trainer passes them "
                "over and uses the newest that is whole"
            )
        raise typer.Exit(FAILED_CODE)


@app.command()
def export(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; must not exist.")],
    run: Run = None,
    runs: Runs = RUNS,
    step: Step = None,
) -> None:
    """Write a checkpoint as Hugging Face folders: DIR/policy, and DIR/drafter where the run has one.

    The newest, or that of --step, in the run's own precision, with the config and tokenizer of model.path. Changes
    nothing; the run may be under way, if the checkpoint is not pruned meanwhile.
    """
    require_engines("torch")
    refuse_existing(out)
    directory = _find(run, runs)
    checkpoint = checkpoints.newest(directory.path) if step is None else _checkpoint(directory, step)
    if checkpoint is None:
        raise RunInvalid(f"a run must have a checkpoint to export, got none in {directory.path}; let it write one")
    command = [sys.executable, "-m", "specrl.trainer.checkpoint_export"]
    command += [str(directory.run_file), str(checkpoint), "--out", str(out)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        complain(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "the export failed")
        raise typer.Exit(done.returncode if done.returncode > 0 else FAILED_CODE)
    typer.echo(f"{checkpoint.name} written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command()
def prune(
    run: Run = None,
    runs: Runs = RUNS,
    keep: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Newest to keep. Default: the run file's checkpoint.keep.")
    ] = None,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Delete all but the newest checkpoints and the milestones. There is no way back.

    The run must not be under way here: it prunes its own. At least one stays, for `specrl run --resume`.
    """
    directory = _find(run, runs)
    with directory.lock():
        settings = load_spec(directory.run_file).checkpoint
        steps = [step for step, _ in checkpoints.complete(directory.path)]
        keep, every = keep or settings.keep, settings.milestone_every_steps
        going = checkpoints.superseded(steps, keep, every)
        if not going:
            typer.echo(f"{directory.name}: nothing to delete")
            return
        typer.echo(f"{directory.name}: of {len(steps)} checkpoints those of steps {', '.join(map(str, going))} go")
        if not is_sure:
            typer.confirm("delete them?", abort=True)
        checkpoints.prune(directory.path, keep, every)
    typer.echo(f"{len(going)} deleted")


def _find(run: str | None, runs: Path) -> RunDirectory:
    return run_directory.find(run, runs) if run is not None else run_directory.newest(runs)


def _checkpoint(directory: RunDirectory, step: int) -> Path:
    """The complete checkpoint of a step. Raises RunInvalid."""
    found = dict(checkpoints.complete(directory.path))
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise RunInvalid(f"--step must be of a complete checkpoint, got {step}; {directory.path} has {steps}")
    return found[step]


def _table(found: Sequence[Listed]) -> Table:
    table = Table("step", "written", "size", "next prompt", "drafter", "copy", "kept as", box=box.SIMPLE_HEAD)
    for item in found:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.written))
        has_drafter, has_copy = ("yes" if it else "no" for it in (item.has_drafter, item.is_mirrored))
        place = _place(item.cursor, item.problems)
        table.add_row(str(item.step), written, _size(item.size_bytes), place, has_drafter, has_copy, item.kept)
    return table


def _place(cursor: int | None, problems: int | None) -> str:
    """Where in which epoch the stream goes on, both from 1."""
    if cursor is None or problems is None:
        return "not kept"
    epoch, place = divmod(cursor, problems)
    return f"{place + 1} of {problems}, epoch {epoch + 1}"


def _listed(directory: RunDirectory, mirrored: Sequence[int]) -> list[Listed]:
    settings = load_spec(directory.run_file).checkpoint
    found = checkpoints.complete(directory.path)
    newest = {step for step, _ in found[-settings.keep :]}

    def kept(step: int) -> str:
        reasons = {
            "milestone": checkpoints.is_milestone(step, settings.milestone_every_steps),
            f"one of the {settings.keep} newest": step in newest,
        }
        return ", ".join(reason for reason, holds in reasons.items() if holds) or "superseded"

    return [
        Listed(
            step=step,
            path=str(path),
            size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            written=(path / checkpoints.STATE).stat().st_mtime,
            has_drafter=(path / checkpoints.DRAFTER).exists(),
            kept=kept(step),
            is_mirrored=step in mirrored,
            cursor=place.cursor if place is not None else None,
            problems=place.problems if place is not None else None,
        )
        for step, path in found
        for place in [_stream_in(path)]
    ]


def _stream_in(path: Path) -> StreamPlace | None:
    """None also of a damaged one, which `verify` names."""
    try:
        return checkpoints.stream_in(path)
    except CheckpointInvalid:
        return None


def _damages(path: Path) -> list[str]:
    try:
        return checksums.damages(path)
    except CheckpointInvalid as error:
        return [str(error)]


def _size(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.2f} GiB" if size_bytes >= 2**30 else f"{size_bytes / 2**20:.1f} MiB"
