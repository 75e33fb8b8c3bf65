"""Starts a new run or resumes one: preflight, run folder, lock, processes, and the wait for the end.

Invariants: nothing is written before preflight passes, and no process starts before the run's lock is held.
Called by the commands `run`, `demo` and `drafter init`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.coordinator.ledger.continuation import check_same_stream
from specrl.coordinator.rollouts.checked_prompts import CheckedPrompts
from specrl.errors import RunInvalid
from specrl.files import private_umask, write_text
from specrl.formats.reports import Phase, StatusReport
from specrl.hub import write_sources
from specrl.launcher import preflight, run_directory
from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.disk import check_disk
from specrl.launcher.local_run import LocalRun
from specrl.launcher.processes.ports import HOST
from specrl.launcher.processes.programs import build_programs
from specrl.launcher.processes.replicas import ReplicaScaler
from specrl.launcher.processes.supervisor import RunEnd, RunOutcome
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_status, read_stored_steps
from specrl.launcher.terminal.check_progress import CheckProgress, open_fetch_display
from specrl.launcher.terminal.view import View, describe_page
from specrl.rpc import run_token
from specrl.spec import RunSpec, digest_spec, load_process_spec, load_spec
from specrl.trainer.checkpointing import checkpoints, origin


@dataclass(frozen=True)
class LaunchResult:
    """A launch that has ended: the folder of its run and how the run ended."""

    directory: RunDirectory
    outcome: RunOutcome


def start_run(
    spec: RunSpec, runs: Path, view: View, keep_serving: bool = False, checkpoint: Path | None = None
) -> LaunchResult:
    """Start a new run in a numbered folder below `runs` and block until it ends.

    checkpoint: a checkpoint of another run to start from. It is copied into the new run's folder.
    keep_serving: keep the coordinator's page up after a successful end, until Ctrl-C.
    Raises what preflight raises, RunInvalid when the folder cannot be made, and CheckpointInvalid for a bad checkpoint.
    """
    run_directory.delete_unfinished(runs)  # before the disk is found full, which preflight may do, too
    # Everything that can be refused is refused before the folder exists.
    ready = _run_preflight(spec, None, view)
    if ready.disk_need is not None:
        check_disk(ready.disk_need, runs)
    spec = ready.spec
    if checkpoint is not None:
        step = check_checkpoint(checkpoint, spec, ready.data)
        ready.notices += (describe_start(checkpoint, step),)

    def fill(folder: Path) -> None:
        ready.decision.write_file(folder)
        write_sources(folder, ready.sources)
        if checkpoint is not None:
            checkpoints.copy_into(folder, checkpoint)

    directory = run_directory.create_run(runs, spec, fill)
    with directory.lock(), private_umask():
        return _run_programs(spec, directory, ready, view, keep_serving)


def _run_preflight(spec: RunSpec, directory: Path | None, view: View) -> preflight.PreflightResult:
    """Run preflight. The view shows its progress when it takes longer than a second."""
    with open_fetch_display(view) as display:
        return preflight.check_run(spec, directory, CheckProgress(view), display=display)


def check_checkpoint(checkpoint: Path, spec: RunSpec, data: CheckedPrompts | None) -> int:
    """Refuse an unusable checkpoint before a folder is made for the run, and return its step.

    data: the run's prompts, which must be those of the checkpoint; None if they could not be read. A checkpoint that
    records no place in the prompt stream is left to the coordinator, which refuses it.
    Raises CheckpointInvalid, RunInvalid.
    """
    step = origin.check_usable(checkpoint, spec.schedule.steps)
    place = checkpoints.read_stream_place(checkpoint)
    if place is not None and data is not None:
        check_same_stream(step, place, spec, data.stream)
    return step


def describe_start(checkpoint: Path, step: int) -> str:
    """Describe from where a new run goes on. step: of the checkpoint of another run."""
    source = checkpoint.resolve().parent.parent.name or checkpoint  # a folder in the root has no run's folder
    return f"starting from the checkpoint of step {step} of {source}; the next step is {step + 1}"


def resume_run(
    directory: RunDirectory, overrides: Sequence[str], view: View, keep_serving: bool = False
) -> LaunchResult:
    """Resume a run with its own run file and block until it ends.

    Of its fields only generation.replicas and generation.kvCacheMib may be overridden. A run that has finished starts
    no process, unless `keep_serving` asks for its page.

    Raises RunInvalid for any other override, for an edited run file, when another launcher holds the run's lock, or if
    a file of the run cannot be written, and what preflight raises.
    """
    stored = load_process_spec(directory.run_file)
    spec = load_spec(directory.run_file, overrides)
    # The digest leaves these two out, so that a run may be resumed on a machine with another number of GPUs.
    if digest_spec(spec) != digest_spec(stored):
        raise RunInvalid(
            "--set must change nothing but generation.replicas and kvCacheMib with --resume, got "
            f"{' '.join(f'--set {override}' for override in overrides)}; go on in a new run with "
            f"`{_continuing_command(directory, ' --set ...')}`"
        )
    with directory.lock():
        finished = _read_finished_status(directory)
        if finished is not None and not keep_serving:
            preflight.check_finished_run(spec, directory.path, _continuing_command(directory))
            view.show_message(f"run {directory.name} finished at step {finished.step}, so there is nothing to resume")
            return LaunchResult(directory, RunOutcome(RunEnd.FINISHED, status=finished))
        with directory.report_unwritable():
            directory.endpoints_file.unlink(missing_ok=True)  # of the launch before, whose ports nobody serves
        if opened := directory.make_private():
            view.show_message(opened)
        ready = _run_preflight(spec, directory.path, view)  # may fetch into a cache that users share
        if ready.disk_need is not None:
            check_disk(ready.disk_need, directory.path)
        spec = ready.spec
        with private_umask():
            with directory.report_unwritable():
                write_sources(directory.path, ready.sources)
                if spec != stored:
                    directory.write_run_file(spec)
            ready.notices += (_describe_stored_state(spec, directory),)
            return _run_programs(spec, directory, ready, view, keep_serving)


def _continuing_command(directory: RunDirectory, options: str = "") -> str:
    """Return the command that starts a new run with this run's file, from its newest checkpoint if it has one."""
    newest = checkpoints.find_newest(directory.path)
    return f"specrl run {directory.run_file}{options}{'' if newest is None else f' --checkpoint {newest}'}"


def _describe_stored_state(spec: RunSpec, directory: RunDirectory) -> str:
    has_store = spec.redis is not None or (directory.path / "store.db").exists()
    steps = read_stored_steps(directory)
    saved = checkpoints.list_complete(directory.path)
    if not saved and spec.checkpoint.mirror is not None:
        return f"resuming from the newest checkpoint at {spec.checkpoint.mirror}, if there is one"
    return describe_resumption(steps[-1].step if steps else 0, saved[-1][0] if saved else 0, has_store=has_store)


def describe_resumption(reported: int, saved: int, *, has_store: bool) -> str:
    """Describe from where a run goes on, so that its user sees whether anything is lost.

    reported: the newest step with a report. saved: the step of the newest checkpoint. 0: none. has_store: whether the
    store with rollouts and batches is there. It may hold a step more than was reported.
    """
    origin = f"the checkpoint of step {saved}" if saved else "the policy as it came, since there is no checkpoint yet"
    if reported <= saved:
        return f"resuming from {origin}; no step is lost"
    later = f"step {reported}" if reported == saved + 1 else f"steps {saved + 1} to {reported}"
    if not has_store:
        return f"resuming from {origin}; the store is gone, so that {later} cannot be trained again"
    return f"resuming from {origin}; nothing is lost: {later} will be trained again from stored rollouts"


def _read_finished_status(directory: RunDirectory) -> StatusReport | None:
    """Return the status of a finished run; None if the run has not finished, or its export is gone."""
    status = read_stored_status(directory)
    if status is None or status.phase is not Phase.FINISHED or status.summary is None:
        return None
    exported = status.summary.policy_path or status.summary.drafter_path
    return status if exported and Path(exported).is_dir() else None


def _run_programs(
    spec: RunSpec, directory: RunDirectory, ready: preflight.PreflightResult, view: View, keep_serving: bool
) -> LaunchResult:
    with directory.report_unwritable():
        token = run_token.write_token(directory.path)
        directory.outcome_file.unlink(missing_ok=True)
    programs = build_programs(spec, directory, ready.grpc_port, ready.http_port)
    with CoordinatorReports(f"{HOST}:{ready.http_port}", token) as reports:
        replicas = ReplicaScaler(spec, directory, ready.grpc_port, ready.gpu_need or ready.memory_need)
        run = LocalRun(directory, programs, reports, view, replicas)
        # The view starts before the processes do, so that their first notices have a place.
        facts = {"folder": str(directory.path), "page": describe_page(reports.url, token), "precision": ready.precision}
        view.show_start(directory.name, facts)
        for notice in ready.notices:
            view.show_message(notice)
        try:
            outcome = run.run_to_end(keep_serving)
        finally:
            view.close()
        write_outcome(directory, outcome, view)
    return LaunchResult(directory, outcome)


def write_outcome(directory: RunDirectory, outcome: RunOutcome, view: View) -> None:
    """Write outcome.json. A failure is only shown: the user must learn how the run ended."""
    ended = {"exitCode": outcome.end.exit_code, "error": outcome.message or None}
    try:
        write_text(directory.outcome_file, json.dumps(ended) + "\n")
    except OSError as error:
        view.show_message(
            f"{directory.outcome_file} was not written ({error}), so `specrl status` may say that the launcher was "
            "killed; make room"
        )
