"""Weights & Biases: one run of a project, with the id of the specrl run. The only module that imports wandb.

Online its server says how far it is. Offline nobody can: a file beside its own keeps the last step and version that it
took. W&B's own counter of calls is not used; curves are over `step` and `validation/version`.

Nothing but numbers and the run file leaves the process: no console, code, requirements, command line or machine data.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from specrl.coordinator.report import Phase, StepReport, ValidationReport
from specrl.coordinator.sinks.contract import Received, SinkRun, numbers, validation_numbers
from specrl.files import SMALL_BYTES, read_object, write_text
from specrl.spec.sinks import WandbMode

os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # before the import, which starts it

import wandb

STEP, VERSION = "step", "validation/version"

_SETTINGS = wandb.Settings(
    console="off",
    disable_code=True,
    disable_git=True,
    disable_job_creation=True,
    init_timeout=30,  # the follower tries again
    quiet=True,
    save_code=False,
    silent=True,
    x_disable_meta=True,
    x_disable_stats=True,
    x_save_requirements=False,
)


class WandbSink:
    """A run of the project."""

    def __init__(self, run: SinkRun) -> None:
        section = run.spec.telemetry.sinks.wandb
        assert section is not None, "the run asks for it"
        self._is_online = section.mode is WandbMode.ONLINE
        self._taken = Received()
        self._file = run.directory / "wandb" / "received.json"
        self._run = wandb.init(
            project=section.project,
            entity=section.entity,
            id=run.run_id,
            name=run.name,
            resume="allow",
            mode="online" if self._is_online else "offline",
            dir=str(run.directory),
            config=run.settings(),
            allow_val_change=True,  # generation.replicas, of a run that is resumed
            reinit="create_new",
            settings=_SETTINGS,
        )
        self._run.define_metric("*", step_metric=STEP)
        self._run.define_metric("validation/*", step_metric=VERSION)

    def received(self) -> Received:
        if self._is_online:
            summary = self._run.summary
            self._taken = Received(int(summary.get(STEP, 0)), int(summary.get(VERSION, -1)))
        else:
            self._taken = _read(self._file)
        return self._taken

    def step(self, report: StepReport) -> None:
        self._run.log(numbers(report) | {STEP: report.step})
        self._taken = Received(report.step, self._taken.version)

    def validation(self, report: ValidationReport) -> None:
        values = validation_numbers(report)
        self._run.log(values | {VERSION: report.policy_version})
        self._taken = Received(self._taken.step, report.policy_version)

    def flush(self) -> None:
        """The library's own process has it, and survives this one. Raises OSError when the file cannot be written."""
        if not self._is_online:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_text(self._file, json.dumps({STEP: self._taken.step, VERSION: self._taken.version}))

    def close(self, phase: Phase | None) -> None:
        self._run.finish(exit_code=1 if phase is Phase.FAILED else 0)


def _read(file: Path) -> Received:
    try:
        found = read_object(file, SMALL_BYTES)
        return Received(int(found[STEP]), int(found[VERSION]))
    except (OSError, ValueError, KeyError, TypeError):  # none yet
        return Received()
