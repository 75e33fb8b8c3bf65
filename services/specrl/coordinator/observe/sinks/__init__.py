"""Sends a run's reports to TensorBoard, Weights & Biases and MLflow, as the run file asks.

    observer ──► metrics.jsonl, validations.jsonl ──► one follower thread per sink ──► sink

A sink is fed from the files, not by the observer. So a sink that hangs or is unreachable blocks nothing and loses
nothing, and memory is bounded by one chunk of a file. After a restart each follower resumes after the last step that
its sink already has.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from specrl.coordinator.observe.sinks.contract import ReportSink, SinkRun
from specrl.coordinator.observe.sinks.follower import THREAD, SinkFollower
from specrl.formats.reports import StatusReport
from specrl.spec import RunSpec

__all__ = ["ReportSink", "ReportSinks", "SinkRun", "exit_process", "find_openers"]

CLOSE_S = 10.0
"""Longest wait at the end of a run, for all its sinks together."""


class ReportSinks:
    """The sinks of one run, each with a follower."""

    def __init__(self, spec: RunSpec, directory: Path, run_id: str) -> None:
        run = SinkRun(spec, directory, run_id)
        self._followers = [SinkFollower(name, run, opener) for name, opener in find_openers(run).items()]

    def start(self) -> None:
        """Start a thread for each sink. The sinks are opened there, not here."""
        for follower in self._followers:
            follower.start()

    def close(self, status: StatusReport, within_s: float = CLOSE_S) -> None:
        """Send the remaining reports and close the sinks. Blocks for up to `within_s`, then abandons those not done."""
        for follower in self._followers:
            follower.request_end(status.phase)
        for follower in self._followers:
            within_s -= follower.join(within_s)


def exit_process(code: int) -> NoReturn:
    """End this process, without exit handlers if a sink still hangs.

    A sink library's exit handler would wait for its unreachable server. Its child processes are in this process's
    group, which the launcher kills, or in its pod.
    """
    if any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def find_openers(run: SinkRun) -> dict[str, Callable[[], ReportSink]]:
    """Return a function to open each sink of the run. It imports the sink's library, which is an optional extra."""

    def open_tensorboard() -> ReportSink:
        from specrl.coordinator.observe.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(run)

    def open_wandb() -> ReportSink:
        from specrl.coordinator.observe.sinks.wandb import WandbSink

        return WandbSink(run)

    def open_mlflow() -> ReportSink:
        from specrl.coordinator.observe.sinks.mlflow import MlflowSink

        return MlflowSink(run)

    openers = {"tensorboard": open_tensorboard, "wandb": open_wandb, "mlflow": open_mlflow}
    return {name: opener for name, opener in openers.items() if getattr(run.spec.telemetry.sinks, name) is not None}
