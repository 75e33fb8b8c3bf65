"""Says what state a run on this machine is in, also after a crash, a SIGKILL, or before its first status.

The coordinator's last status alone cannot say it: a process that is killed writes nothing. Three facts decide. The lock
says whether a launcher runs the run. `outcome.json` says how the last launch ended; a launch that is killed leaves
none. The lock's time says whether the status is older than the present launch.
"""

from __future__ import annotations

from typing import Any

from specrl.formats.reports import Phase, RunState, StatusReport
from specrl.launcher.processes.supervisor import RunEnd
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_outcome, read_stored_status
from specrl.spec import load_spec

FAILED_CODES = (RunEnd.FAILED.exit_code, RunEnd.REFUSED.exit_code)


def read_run_state(directory: RunDirectory, live: StatusReport | None = None) -> RunState:
    """Return the state of a run. live: the coordinator's own answer, if it has given one.

    Raises SpecInvalid if the run has no status yet, and its run file is invalid.
    """
    is_running = directory.has_launcher()
    if live is not None and is_running:
        return _extend_status(live, running=True)
    stored = read_stored_status(directory)
    if stored is None or (is_running and _is_older_than_launch(directory)):
        spec = load_spec(directory.run_file)
        step = stored.step if stored is not None else 0
        stored = StatusReport(run=spec.name, phase=Phase.WAITING, step=step, steps=spec.schedule.steps)
        if is_running:
            stored = stored.model_copy(update={"detail": "the coordinator is starting"})
    return _extend_status(stored, running=True) if is_running else _correct_ended(directory, stored)


def _correct_ended(directory: RunDirectory, stored: StatusReport) -> RunState:
    """Return the state of a run without a launcher. stored: the last status that its coordinator wrote."""
    outcome = read_outcome(directory)
    found = outcome.get("exitCode")
    exit_code = found if isinstance(found, int) and not isinstance(found, bool) else None
    error = stored.error or outcome.get("error")
    was_killed = exit_code is None
    if was_killed and stored.phase is Phase.FAILED and _is_older_than_launch(directory):
        error = None  # of an earlier launch
    elif stored.phase in (Phase.FINISHED, Phase.FAILED):
        was_killed = False  # or too late to matter
    changes: dict[str, Any] = {"error": str(error) if error else None}
    if was_killed:
        changes |= {"phase": Phase.STOPPED, "detail": "its launcher was killed"}
    elif stored.phase is not Phase.FINISHED and exit_code in FAILED_CODES:
        changes |= {"phase": Phase.FAILED}
    elif not stored.phase.is_over:
        changes |= {"phase": Phase.STOPPED, "detail": ""}
    nothing_runs = {"replicas": [], "trainer": "absent", "done": 0, "total": 0}
    return _extend_status(stored.model_copy(update=changes | nothing_runs), running=False, exit_code=exit_code)


def _extend_status(status: StatusReport, *, running: bool, exit_code: int | None = None) -> RunState:
    fields = {name: getattr(status, name) for name in StatusReport.model_fields}
    return RunState(**fields, running=running, exit_code=exit_code)


def _is_older_than_launch(directory: RunDirectory) -> bool:
    """Whether status.json was written before the present launcher took the lock, which sets the lock's time."""
    try:
        return directory.status_file.stat().st_mtime_ns < directory.lock_file.stat().st_mtime_ns
    except OSError:  # one of them is gone, so the status cannot be read either
        return True
