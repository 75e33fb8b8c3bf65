"""The Weights & Biases sink: one run of a project, under the specrl run's id. The only module that imports wandb.

Online, the server tells which step it has last. Offline, a file beside W&B's own keeps the last step and version.
Curves are plotted over `step` and `validation/version`, not over W&B's own counter of calls.

Only numbers and the run file leave the process: no console output, code, requirements, command line or machine data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from specrl.coordinator.observe.sinks.contract import SinkProgress, SinkRun, flatten_step, flatten_validation
from specrl.files import SMALL_BYTES, read_object, write_text
from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.spec.sinks import WandbMode

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before the import, which starts the error reporting

import wandb

STEP = "step"
VERSION = "validation/version"

_SETTINGS = wandb.Settings(
    console="off",
    disable_code=True,
    disable_git=True,
    disable_job_creation=True,
    init_timeout=30,  # seconds; the follower retries
    quiet=True,
    save_code=False,
    silent=True,
    x_disable_meta=True,
    x_disable_stats=True,
    x_save_requirements=False,
)


class WandbSink:
    """One run of a W&B project."""

    def __init__(self, run: SinkRun) -> None:
        section = run.spec.telemetry.sinks.wandb
        assert section is not None, "`find_openers` has checked it"
        self._is_online = section.mode is WandbMode.ONLINE
        self._taken = SinkProgress()
        self._file = run.directory / "wandb" / "received.json"
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            id=run.run_id,
            name=run.display_name,
            resume="allow",
            mode="online" if self._is_online else "offline",
            dir=str(run.directory),
            config=run.dump_settings(),
            allow_val_change=True,  # a resumed run may have another generation.replicas
            reinit="create_new",  # after a failure, another connection in the same process
            settings=_SETTINGS,
        )
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("validation/*", step_metric=VERSION)

    def read_progress(self) -> SinkProgress:
        if self._is_online:
            summary = self._run.summary
            self._taken = SinkProgress(int(summary.get(STEP, 0)), int(summary.get(VERSION, -1)))
        else:
            self._taken = _read_progress(self._file)
        return self._taken

    def add_step(self, report: StepReport) -> None:
        self._run.log(flatten_step(report) | {STEP: report.step})
        self._taken = SinkProgress(report.step, self._taken.version)

    def add_validation(self, report: ValidationReport) -> None:
        self._run.log(flatten_validation(report) | {VERSION: report.policy_version})
        self._taken = SinkProgress(self._taken.step, report.policy_version)

    def flush(self) -> None:
        """Record the points that were taken, in offline mode. Raises OSError when that file cannot be written."""
        # Reports themselves need no flush: `log` hands them to W&B's own process, which survives this one.
        if not self._is_online:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, json.dumps({STEP: self._taken.step, VERSION: self._taken.version}))

    def close(self, phase: Phase | None) -> None:
        self._run.finish(exit_code=1 if phase is Phase.FAILED else 0)


def _read_progress(file: Path) -> SinkProgress:
    try:
        found = read_object(file, SMALL_BYTES)
        return SinkProgress(int(found[STEP]), int(found[VERSION]))
    # Without a file, or with a damaged one, start from the first step.
    except (OSError, ValueError, OverflowError, KeyError, TypeError):
        return SinkProgress()
