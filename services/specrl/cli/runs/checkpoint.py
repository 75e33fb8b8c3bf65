"""`specrl checkpoint`: requests a checkpoint, and lists, verifies, exports or deletes those that a run has.

Everything but `save` works on the run's folder alone, so it needs no coordinator.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from specrl.cli.command_exit import FAILED_CODE, INTERRUPTED_CODE, confirm_deletion, print_error, run_module
from specrl.cli.options import RUNS, AsJson, RunOrNewest, Runs, refuse_existing
from specrl.cli.runs.control import print_run_state
from specrl.errors import CheckpointInvalid, RunInvalid
from specrl.formats.best_version import find_best
from specrl.formats.checkpoint_rows import CheckpointRow, CheckpointVerdict
from specrl.formats.reports import StatusReport, ValidationReport
from specrl.installation import require_engines
from specrl.launcher import run_directory
from specrl.launcher.coordinator_client import CoordinatorReports, request_run_action
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.run_state import read_run_state
from specrl.launcher.stored_reports import read_http_address, read_report_lines
from specrl.launcher.terminal.view import format_bytes
from specrl.rpc import run_token
from specrl.spec import RunSpec, load_spec
from specrl.trainer.checkpointing import checkpoints, checksums, mirror

POLL_S = 0.2
PROGRESS_S = 10.0
FAILURES = "checkpointsFailed"

app = typer.Typer(
    help="Request a checkpoint of a run; list, verify, export or delete its checkpoints.", no_args_is_help=True
)

Step = Annotated[int | None, typer.Option("--step", metavar="N", min=0, help="Only the checkpoint of this step.")]


@app.command("save")
def save_checkpoint(
    run: RunOrNewest = None,
    runs: Runs = RUNS,
    waits: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it is complete, or only request it.")
    ] = True,
) -> None:
    """Request a checkpoint of an active run, and wait until it is complete.

    It is written at the next boundary between two steps. Ctrl-C ends the waiting; the request stays. Exit code 1 when
    the checkpoint could not be written, or when the run ended without one.
    """
    directory = run_directory.find_run(run, runs)
    requested = request_run_action(directory, "POST", "/checkpoint")
    print_run_state(requested, f"checkpoint requested; the newest is of step {requested.checkpoint_step}")
    if waits:
        try:
            _wait_for_checkpoint(directory, requested)
        except KeyboardInterrupt as interrupt:
            print_error("no longer waiting; the request stays, and the run goes on")
            raise typer.Exit(INTERRUPTED_CODE) from interrupt


def _wait_for_checkpoint(directory: RunDirectory, requested: StatusReport) -> None:
    """Wait until a requested checkpoint is complete. Says every ten seconds what the run does.

    Raises typer.Exit when it was not written: the trainer or the coordinator failed, or the run ended.
    """
    status: StatusReport = requested
    quiet_since = time.monotonic()
    with CoordinatorReports(read_http_address(directory) or "", run_token.read_token(directory.path)) as reports:
        while status.is_checkpoint_requested and directory.has_launcher():
            time.sleep(POLL_S)
            status = reports.fetch_status() or status  # a coordinator that restarts has forgotten the request
            if time.monotonic() - quiet_since > PROGRESS_S:
                print_run_state(status, f"waiting for the checkpoint: {status.detail}")
                quiet_since = time.monotonic()
    if not directory.has_launcher():  # a run that is stopped writes a last checkpoint
        status = read_run_state(directory)
    has_failed = status.counters.get(FAILURES, 0) > requested.counters.get(FAILURES, 0)
    is_missing = status.checkpoint_step < requested.step or not checkpoints.list_complete(directory.path)
    if has_failed or is_missing:
        print_error(f"the checkpoint could not be written; see {directory.logs_folder}, then try again")
        raise typer.Exit(FAILED_CODE)
    typer.echo(f"checkpoint of step {status.checkpoint_step} is complete")


@app.command("list")
def list_checkpoints(run: RunOrNewest = None, runs: Runs = RUNS, as_json: AsJson = False) -> None:
    """Show a run's complete checkpoints, why each is kept, and whether checkpoint.mirror has a copy.

    Changes nothing; the run may be active.
    """
    directory = run_directory.find_run(run, runs)
    copies = mirror.open_mirror(load_spec(directory.run_file))
    mirrored = copies.list_steps() if copies is not None else []
    found = _describe_checkpoints(directory, mirrored)
    if as_json:
        typer.echo(json.dumps([item.model_dump(by_alias=True) for item in found], indent=2))
        return
    if not found:
        typer.echo(f"{directory.name}: its folder has no checkpoint")
    else:
        Console().print(_checkpoint_table(found))
    # Checkpoints that the run has pruned locally may still have a copy in the mirror.
    elsewhere = [step for step in mirrored if step not in {item.step for item in found}]
    if copies is not None and elsewhere:
        typer.echo(f"{copies.url} also has the checkpoints of steps {', '.join(map(str, elsewhere))}")
    for path in sorted((directory.path / "checkpoints").glob("unreadable-*")):
        typer.echo(f"{path}: set aside because it could not be read; inspect it, then delete it")


@app.command("verify")
def verify_checkpoints(run: RunOrNewest = None, runs: Runs = RUNS, step: Step = None, as_json: AsJson = False) -> None:
    """Compare every file with its stored checksum. Exit code 1 when a file is missing or altered.

    Verifies all checkpoints, or that of --step. Changes nothing; the run may be active.
    """
    directory = run_directory.find_run(run, runs)
    chosen = checkpoints.list_complete(directory.path) if step is None else [(step, _find_checkpoint(directory, step))]
    if not chosen:
        raise RunInvalid(
            f"RUN must have a complete checkpoint, got none in {directory.path}; see `specrl status` for what it does"
        )
    found = {number: _find_damages(path) for number, path in chosen}
    if as_json:
        verdicts = [CheckpointVerdict(step=number, damages=damages) for number, damages in found.items()]
        typer.echo(json.dumps([verdict.model_dump(by_alias=True) for verdict in verdicts], indent=2))
    else:
        for number, damages in found.items():
            typer.echo(f"step {number}: {'intact' if not damages else '; '.join(damages)}")
    damaged = [number for number, damages in found.items() if damages]
    if damaged:
        if not as_json:
            print_error(
                f"{len(damaged)} of {len(found)} checkpoints of {directory.name} are damaged; a trainer skips them "
                "and uses the newest intact one"
            )
        raise typer.Exit(FAILED_CODE)


@app.command("export")
def export_checkpoint(
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write to; must not exist.")],
    run: RunOrNewest = None,
    runs: Runs = RUNS,
    step: Step = None,
) -> None:
    """Write a checkpoint as Hugging Face folders: DIR/policy, and DIR/drafter if the run has a drafter.

    Exports the newest checkpoint, or that of --step, in the run's own precision, with the config and tokenizer of
    model.path. Changes nothing. The run may be active, as long as it does not prune the checkpoint meanwhile.
    """
    require_engines("torch")
    refuse_existing(out)
    directory = run_directory.find_run(run, runs)
    checkpoint = checkpoints.find_newest(directory.path) if step is None else _find_checkpoint(directory, step)
    if checkpoint is None:
        raise RunInvalid(
            f"RUN must have a checkpoint, got none in {directory.path}; request one with `specrl checkpoint save`"
        )
    run_module(
        "specrl.trainer.checkpointing.checkpoint_export", str(directory.run_file), str(checkpoint), "--out", str(out)
    )
    typer.echo(f"{checkpoint.name} written to {out}: {', '.join(sorted(path.name for path in out.iterdir()))}")


@app.command("prune")
def prune_checkpoints(
    run: RunOrNewest = None,
    runs: Runs = RUNS,
    keep: Annotated[
        int | None,
        typer.Option(metavar="N", min=1, help="Newest checkpoints to keep. Default: the run file's checkpoint.keep."),
    ] = None,
    is_sure: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
) -> None:
    """Delete all checkpoints except the newest ones, milestones and the best. This cannot be undone.

    The run must not be active here, since an active run prunes its own checkpoints. At least one stays, for `specrl
    run --resume`.
    """
    directory = run_directory.find_run(run, runs)
    # The lock keeps a launcher from starting, and with it a trainer that prunes or writes checkpoints.
    with directory.lock():
        spec = load_spec(directory.run_file)
        steps = [step for step, _ in checkpoints.list_complete(directory.path)]
        newest = keep or spec.checkpoint.keep
        best_step = _find_best_step(directory, spec)
        keeping = checkpoints.Keeping(newest, spec.checkpoint.milestone_every_steps, best_step)
        going = checkpoints.find_superseded(steps, keeping)
        if not going:
            typer.echo(f"{directory.name}: nothing to delete")
            return
        going_steps = ", ".join(map(str, going))
        typer.echo(f"{directory.name}: {len(going)} of {len(steps)} checkpoints will be deleted: steps {going_steps}")
        if not is_sure:
            confirm_deletion("delete them?")
        checkpoints.prune_superseded(directory.path, keeping)
    typer.echo(f"{len(going)} checkpoints deleted")


def _find_best_step(directory: RunDirectory, spec: RunSpec) -> int:
    """Return the step of the best validated checkpoint; 0 without checkpoint.keepBest, or if there is none."""
    validations, _ = read_report_lines(directory.validations_file, ValidationReport)
    best = find_best(validations, spec)
    return best.policy_version if best is not None else 0


def _find_checkpoint(directory: RunDirectory, step: int) -> Path:
    """Return the complete checkpoint of a step. Raises RunInvalid."""
    found = dict(checkpoints.list_complete(directory.path))
    if step not in found:
        steps = ", ".join(map(str, found)) or "none"
        raise RunInvalid(
            f"--step must be the step of a complete checkpoint, got {step}; {directory.path} has those of steps {steps}"
        )
    return found[step]


def _checkpoint_table(found: Sequence[CheckpointRow]) -> Table:
    table = Table("step", "written", "size", "next prompt", "drafter", "copy", "kept as", box=box.SIMPLE_HEAD)
    for item in found:
        written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(item.written))
        has_drafter, has_copy = ("yes" if it else "no" for it in (item.has_drafter, item.is_mirrored))
        place = _format_place(item.cursor, item.problems)
        table.add_row(str(item.step), written, format_bytes(item.size_bytes), place, has_drafter, has_copy, item.kept)
    return table


def _format_place(cursor: int | None, problems: int | None) -> str:
    """Format the position in the stream of prompts as prompt and epoch, both counted from 1."""
    if cursor is None or problems is None:
        return "not recorded"
    epoch, place = divmod(cursor, problems)
    return f"{place + 1} of {problems}, epoch {epoch + 1}"


def _describe_checkpoints(directory: RunDirectory, mirrored: Sequence[int]) -> list[CheckpointRow]:
    spec = load_spec(directory.run_file)
    settings = spec.checkpoint
    best_step = _find_best_step(directory, spec)
    found = checkpoints.list_complete(directory.path)
    newest = {step for step, _ in found[-settings.keep :]}  # `list_complete` sorts by step

    def describe(step: int, path: Path) -> CheckpointRow:
        reasons = {
            "milestone": checkpoints.is_milestone(step, settings.milestone_every_steps),
            "best validation": 0 < step == best_step,
            f"one of the {settings.keep} newest": step in newest,
        }
        try:
            place = checkpoints.read_stream_place(path)
        except CheckpointInvalid:  # a damaged one, which `verify` reports
            place = None
        return CheckpointRow(
            step=step,
            path=str(path),
            size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            # A checkpoint without this file is not complete.
            written=(path / checkpoints.STATE).stat().st_mtime,
            has_drafter=(path / checkpoints.DRAFTER).exists(),
            kept=", ".join(reason for reason, holds in reasons.items() if holds) or "superseded",
            is_mirrored=step in mirrored,
            cursor=place.cursor if place is not None else None,
            problems=place.problems if place is not None else None,
        )

    return [describe(step, path) for step, path in found]


def _find_damages(path: Path) -> list[str]:
    try:
        return checksums.list_damages(path)
    except CheckpointInvalid as error:
        return [str(error)]
