"""The MLflow sink: one run of a tracking server. The only module that imports mlflow.

A tag with the specrl run's id finds the MLflow run again after a restart. The server tells which step it has last: each
step is one call, which also logs the step's number as the metric `step`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from specrl.coordinator.observe.sinks.contract import SinkProgress, SinkRun, flatten_step, flatten_validation
from specrl.formats.reports import Phase, StepReport, ValidationReport

# Set before the import, which reads them. The follower retries, so the library itself should fail fast.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

RUN_TAG = "specrl.run"
STEP = "step"
VERSION = "validation/version"
MAX_PARAMS = 100
"""Parameters per call. The server refuses more."""
LONGEST_PARAM = 6000
"""Characters. The server refuses longer values."""

_STATUS = {Phase.FINISHED: "FINISHED", Phase.FAILED: "FAILED", Phase.STOPPED: "KILLED"}


class MlflowSink:
    """One run on a tracking server."""

    def __init__(self, run: SinkRun) -> None:
        section = run.spec.telemetry.sinks.mlflow
        assert section is not None, "`find_openers` has checked it"
        self._client = MlflowClient(tracking_uri=section.tracking_uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(section.experiment)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            made = self._client.create_run(experiment, run_name=run.display_name, tags={RUN_TAG: run.run_id})
            self._id = made.info.run_id
            params = [Param(name, value) for name, value in _flatten_settings(run.dump_settings())]
            for first in range(0, len(params), MAX_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + MAX_PARAMS])

    def read_progress(self) -> SinkProgress:
        found = self._client.get_run(self._id).data.metrics
        return SinkProgress(int(found.get(STEP, 0)), int(found.get(VERSION, -1)))

    def add_step(self, report: StepReport) -> None:
        self._log_metrics(flatten_step(report) | {STEP: report.step}, report.step)

    def add_validation(self, report: ValidationReport) -> None:
        self._log_metrics(flatten_validation(report) | {VERSION: report.policy_version}, report.policy_version)

    def flush(self) -> None:
        """Do nothing: each call returns once the server has answered."""

    def close(self, phase: Phase | None) -> None:
        if phase is not None:
            self._client.set_terminated(self._id, _STATUS.get(phase, "KILLED"))

    def _log_metrics(self, values: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, step) for name, value in values.items()])


def _flatten_settings(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field that is not null, as its path and its value as text, cut to LONGEST_PARAM."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _flatten_settings(inner, f"{path}.{name}".removeprefix("."))
    elif value is not None:
        yield path, str(value)[:LONGEST_PARAM]
