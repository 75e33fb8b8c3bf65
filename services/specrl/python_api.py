"""The functions that a user's Python code may call: `specrl.run` and `specrl.load_report`.

They do what `specrl run` and `specrl report --json` do. Every end of a run but success is an exception of
`specrl.errors`. Nothing in specrl calls this module.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from specrl.errors import RunFailed, RunInterrupted, RunInvalid, RunRefused
from specrl.formats.reports import RunSummary
from specrl.formats.run_report import RunReport
from specrl.launcher import launch, preflight, run_directory
from specrl.launcher.launch import LaunchResult
from specrl.launcher.processes.supervisor import RunEnd
from specrl.launcher.terminal.view import PlainView, View, choose_view
from specrl.report.export import export_run
from specrl.report.reading import load_run
from specrl.spec.yaml_input import quote_yaml


@dataclass(frozen=True)
class FinishedRun:
    """A run that has finished. path: its folder. summary: its results, with the paths of the exported models."""

    path: Path
    summary: RunSummary


def run(  # noqa: PLR0913 - one argument per option of the command
    file: str | Path | Mapping[str, Any] | None = None,
    *,
    resume: str | Path | None = None,
    overrides: Mapping[str, Any] | Sequence[str] = (),
    checkpoint: str | Path | None = None,
    runs: str | Path = "runs",
    quiet: bool = False,
) -> FinishedRun:
    """Train on this machine until the last step, as `specrl run` does, and return the results.

    file: a run file, or its content; relative paths in the content are relative to the working folder.
    resume: folder or name of a run to resume. Exactly one of `file` and `resume` is given.
    overrides: fields by path (`{"schedule.steps": 50}`), or as --set takes them (`["schedule.steps=50"]`).
    checkpoint: with `file`, a checkpoint of another run to start from. runs: the folder that holds the runs.
    quiet: print nothing. Otherwise it prints the progress, as the command does.

    It blocks, and must be called in the main thread. Ctrl-C saves the run, as with the command.

    Raises RunInterrupted after Ctrl-C, RunFailed where the command exits with 1, and RunRefused where a run that has
    begun needs its user. A run that cannot start raises what is wrong: SpecInvalid, DatasetInvalid, RunInvalid and
    other classes of docs/errors.md, all of them a SpecrlError.
    """
    _check_caller()
    if (file is None) == (resume is None):
        raise RunInvalid("specrl.run must be given either `file` or `resume`; name one of them")
    if checkpoint is not None and file is None:
        raise RunInvalid("`checkpoint` needs `file`; a resumed run uses its own checkpoints")
    changes = _list_overrides(overrides)
    view: View = PlainView(Console(quiet=True)) if quiet else choose_view(Console(), is_plain=False)
    try:
        with _hide_main_module():
            if file is not None:
                source = file if isinstance(file, Mapping) else Path(file)
                begun_from = Path(checkpoint) if checkpoint is not None else None
                spec = preflight.load_run(source, changes)
                launched = launch.start_run(spec, Path(runs), view, checkpoint=begun_from)
            else:
                launched = launch.resume_run(run_directory.find_run(str(resume), Path(runs)), changes, view)
    except KeyboardInterrupt as interrupt:
        raise RunInterrupted("interrupted while the run was checked; nothing was started") from interrupt
    return _return_finished(launched)


def load_report(run: str | Path, runs: str | Path = "runs") -> RunReport:
    """Return the figures of a run, which `specrl report --json` prints. The run may be active or interrupted.

    run: its folder, or its name below `runs`. Attributes have the names of the JSON keys in snake case.
    Raises RunInvalid if there is no such run, or if it has trained no step and has not failed.
    """
    return export_run(load_run(run_directory.find_run(str(run), Path(runs))))


def _check_caller() -> None:
    """Raise RunInvalid where a run cannot be started from."""
    if threading.current_thread() is not threading.main_thread():
        raise RunInvalid("specrl.run must be called in the main thread, which receives Ctrl-C, got another one")
    try:
        asyncio.get_running_loop()
    except RuntimeError:  # none is running, as it should be
        return
    raise RunInvalid(
        "specrl.run must not be called in a running event loop, such as a notebook's, got one; use the command "
        "`specrl run` there"
    )


@contextmanager
def _hide_main_module() -> Iterator[None]:
    """Keep the caller's script out of worker processes, which are spawned to check the data and the verifier.

    multiprocessing would run the script in each of them again, and with it the call of `run`, unless the script has
    `if __name__ == "__main__":`. The workers need nothing of it: a user's functions are imported from their modules.
    """
    main = sys.modules["__main__"]
    names = ("__file__", "__spec__")  # by which `multiprocessing.spawn.get_preparation_data` finds the script
    before = {name: getattr(main, name) for name in names if hasattr(main, name)}  # a session has no __file__
    for name in before:
        setattr(main, name, None)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(main, name, value)


def _list_overrides(overrides: Mapping[str, Any] | Sequence[str]) -> Sequence[str]:
    """Return overrides as `--set` takes them."""
    if isinstance(overrides, str):
        raise RunInvalid(f"`overrides` must be a mapping or a list of PATH=VALUE, got the text {overrides!r}")
    if isinstance(overrides, Mapping):
        return [f"{path}={quote_yaml(value)}" for path, value in overrides.items()]
    return list(overrides)


def _return_finished(launched: LaunchResult) -> FinishedRun:
    outcome = launched.outcome
    path = launched.directory.path
    if outcome.end is RunEnd.FINISHED and outcome.status is not None and outcome.status.summary is not None:
        return FinishedRun(path, outcome.status.summary)
    again = f"resume it with specrl.run(resume={str(path)!r})"
    if outcome.end is RunEnd.INTERRUPTED:
        raise RunInterrupted(f"run {path.name} was stopped; {again}")
    if outcome.end is RunEnd.REFUSED:
        raise RunRefused(f"{outcome.message}\nrun {path.name} needs this repaired first; then {again}")
    raise RunFailed(f"{outcome.message}\nlogs of run {path.name}: {launched.directory.logs_folder}; {again}")
