"""The TensorBoard sink: event files in the run's folder. The only module that imports tensorboard.

It uses TensorBoard's own event writer. Those of tensorboardX and torch import torch, which the control plane never
does. On opening it reads its files back, so that a coordinator that was killed neither repeats nor skips a step.
"""

from __future__ import annotations

import time

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from specrl.coordinator.observe.sinks.contract import SinkProgress, SinkRun, flatten_step, flatten_validation
from specrl.formats.reports import Phase, StepReport, ValidationReport

VALIDATION = "validation/reward"


class TensorBoardSink:
    """A folder of event files. Each opening starts a new file, which TensorBoard expects after a restart."""

    def __init__(self, run: SinkRun) -> None:
        self._folder = run.directory / "tensorboard"
        self._received = self._read_progress()  # before the writer creates its own file
        self._writer = EventFileWriter(str(self._folder))

    def read_progress(self) -> SinkProgress:
        return self._received

    def add_step(self, report: StepReport) -> None:
        self._write_event(flatten_step(report), report.step)

    def add_validation(self, report: ValidationReport) -> None:
        self._write_event(flatten_validation(report), report.policy_version)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, phase: Phase | None) -> None:
        self._writer.close()

    def _write_event(self, values: dict[str, float], step: int) -> None:
        """Write one event with all values, so that a truncated file has a step wholly or not at all."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _read_progress(self) -> SinkProgress:
        step = 0
        version = -1
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(file)).Load():
                tags = {value.tag for value in event.summary.value}
                if VALIDATION in tags:
                    version = max(version, event.step)
                elif tags:
                    step = max(step, event.step)
        return SinkProgress(step, version)
