"""Begin a run, or go on with one: preflight, folder, lock, programs, to the end. What the command line calls.

Nothing is written before preflight has passed, and nothing is started before the run's lock is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specrl.errors import CheckpointInvalid, RunInvalid
from specrl.launcher import preflight, run_directory
from specrl.launcher.check_progress import CheckProgress
from specrl.launcher.local_run import LocalRun, Outcome
from specrl.launcher.ports import HOST
from specrl.launcher.programs import programs_of
from specrl.launcher.replicas import Replicas
from specrl.launcher.reports import CoordinatorReports
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import View
from specrl.spec import RunSpec, digest, load_spec
from specrl.trainer import checkpoints, checksums


@dataclass(frozen=True)
class Launched:
    """A launch that came to its end, and where its run lies."""

    directory: RunDirectory
    outcome: Outcome


def begin(
    spec: RunSpec, runs: Path, view: View, keep_serving: bool = False, checkpoint: Path | None = None
) -> Launched:
    """Start a new run below `runs` and drive it to its end. Raises the SpecrlErrors of preflight, RunInvalid.

    checkpoint: of another run, which this one goes on from; it gets a copy. Raises CheckpointInvalid.
    """
    ready = _check(spec, None, view)
    if checkpoint is not None:
        _check_checkpoint(checkpoint, spec)
    directory = run_directory.create(runs, spec)
    with directory.lock():
        ready.decision.write(directory.path)
        if checkpoint is not None:
            checkpoints.copy_into(directory.path, checkpoint)
        return _drive(spec, directory, ready, view, keep_serving)


def _check(spec: RunSpec, directory: Path | None, view: View) -> preflight.Readiness:
    """Preflight, which shows how far it is where that takes long."""
    try:
        return preflight.check(spec, directory, CheckProgress(view))
    finally:
        view.close()


def _check_checkpoint(checkpoint: Path, spec: RunSpec) -> None:
    """Before a folder is made for it. Raises CheckpointInvalid, RunInvalid."""
    step = checkpoints.complete_step(checkpoint)
    damages = checksums.damages(checkpoint)
    if damages:
        raise CheckpointInvalid(f"{checkpoint} must be as it was written, got {'; '.join(damages)}; use another one")
    if step >= spec.schedule.steps:
        raise RunInvalid(
            f"schedule.steps must be more than the step of the checkpoint, {step}, got {spec.schedule.steps}; raise it"
        )


def resume(directory: RunDirectory, overrides: Sequence[str], view: View, keep_serving: bool = False) -> Launched:
    """Go on with a run under its own run file; only the number of replicas may be another than before.

    Raises RunInvalid for any other change, or when another launcher drives the run, and what preflight raises.
    """
    stored = load_spec(directory.run_file)
    spec = load_spec(directory.run_file, overrides)
    if digest(spec) != digest(stored):
        raise RunInvalid(
            "a resumed run must keep its run file but for generation.replicas, got "
            f"{' '.join(f'--set {override}' for override in overrides)}; start a new run with -f {directory.run_file}"
        )
    with directory.lock():
        ready = _check(spec, directory.path, view)
        if spec != stored:
            directory.write_run_file(spec)
        return _drive(spec, directory, ready, view, keep_serving)


def _drive(
    spec: RunSpec, directory: RunDirectory, ready: preflight.Readiness, view: View, keep_serving: bool
) -> Launched:
    programs = programs_of(spec, directory, ready.grpc_port, ready.http_port)
    with CoordinatorReports(f"{HOST}:{ready.http_port}") as reports:
        replicas = Replicas(spec, directory, ready.grpc_port, ready.replica_bytes)
        run = LocalRun(directory, programs, reports, view, replicas)
        view.begin(directory.name, {"folder": str(directory.path), "page": reports.url})
        for notice in ready.notices:
            view.message(notice)
        try:
            outcome = run.drive(keep_serving)
        finally:
            view.close()
    return Launched(directory, outcome)
