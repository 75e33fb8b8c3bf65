"""MLflow: one run of a tracking server, found again by the id of the specrl run in a tag. The only module with mlflow.

The server is asked how far it is. A step is one call; its number is logged with it, as the metric `step`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from specrl.coordinator.report import Phase, StepReport, ValidationReport
from specrl.coordinator.sinks.contract import Received, SinkRun, numbers, validation_numbers

# Before the import, which reads them. The follower repeats what fails; a thread that waits for minutes helps nobody.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

RUN_TAG = "specrl.run"
STEP, VERSION = "step", "validation/version"
MOST_PARAMS = 100
"""Of one call; the server refuses more."""
LONGEST_PARAM = 6000
"""Letters; the server refuses longer values."""

_STATUS = {Phase.FINISHED: "FINISHED", Phase.FAILED: "FAILED", Phase.STOPPED: "KILLED"}


class MlflowSink:
    """A run of the server."""

    def __init__(self, run: SinkRun) -> None:
        section = run.spec.telemetry.sinks.mlflow
        assert section is not None, "the run asks for it"
        self._client = MlflowClient(tracking_uri=section.tracking_uri)
        found = self._client.get_experiment_by_name(section.experiment)
        experiment = found.experiment_id if found else self._client.create_experiment(section.experiment)
        runs = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.run_id}'", max_results=1)
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(experiment, run_name=run.name, tags={RUN_TAG: run.run_id}).info.run_id
            params = [Param(name, value) for name, value in _leaves(run.settings())]
            for first in range(0, len(params), MOST_PARAMS):
                self._client.log_batch(self._id, params=params[first : first + MOST_PARAMS])

    def received(self) -> Received:
        found = self._client.get_run(self._id).data.metrics
        return Received(int(found.get(STEP, 0)), int(found.get(VERSION, -1)))

    def step(self, report: StepReport) -> None:
        self._log(numbers(report) | {STEP: report.step}, report.step)

    def validation(self, report: ValidationReport) -> None:
        values = validation_numbers(report)
        self._log(values | {VERSION: report.policy_version}, report.policy_version)

    def flush(self) -> None:
        """Every call has been answered."""

    def close(self, phase: Phase | None) -> None:
        if phase is not None:
            self._client.set_terminated(self._id, _STATUS.get(phase, "KILLED"))

    def _log(self, values: dict[str, float], step: int) -> None:
        now_ms = int(time.time() * 1000)
        self._client.log_batch(self._id, [Metric(name, value, now_ms, step) for name, value in values.items()])


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Every field that is set, by path, as text that the server takes."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{path}.{name}".removeprefix("."))
    elif value is not None:
        yield path, str(value)[:LONGEST_PARAM]
