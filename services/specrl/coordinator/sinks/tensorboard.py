"""TensorBoard: event files in the run's folder. The only module that imports tensorboard.

Its own event writer, not tensorboardX's or torch's: both import torch, which the control plane never does. What it
holds is read back from its files, so that a coordinator that was killed writes no step twice and none too few.
"""

from __future__ import annotations

import time

from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from specrl.coordinator.report import Phase, StepReport, ValidationReport
from specrl.coordinator.sinks.contract import Received, SinkRun, numbers, validation_numbers

VALIDATION = "validation/reward"


class TensorBoardSink:
    """Event files; each opening begins another, as TensorBoard expects of a program that was restarted."""

    def __init__(self, run: SinkRun) -> None:
        self._folder = run.directory / "tensorboard"
        self._received = self._read()
        self._writer = EventFileWriter(str(self._folder))

    def received(self) -> Received:
        return self._received

    def step(self, report: StepReport) -> None:
        self._add(numbers(report), report.step)

    def validation(self, report: ValidationReport) -> None:
        self._add(validation_numbers(report), report.policy_version)

    def flush(self) -> None:
        self._writer.flush()

    def close(self, phase: Phase | None) -> None:
        self._writer.close()

    def _add(self, values: dict[str, float], step: int) -> None:
        """One event with all values: a file that was cut short has all of a step or nothing."""
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in values.items()])
        self._writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))

    def _read(self) -> Received:
        step, version = 0, -1
        for file in sorted(self._folder.glob("events.out.tfevents.*")):
            for event in EventFileLoader(str(file)).Load():
                tags = {value.tag for value in event.summary.value}
                if VALIDATION in tags:
                    version = max(version, event.step)
                elif tags:
                    step = max(step, event.step)
        return Received(step, version)
