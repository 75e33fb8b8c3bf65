"""Where a run's steps are shown besides its own files: TensorBoard, Weights & Biases, MLflow; each when asked for.

    board ──► metrics.jsonl, validations.jsonl ──► follower, a thread each ──► sink

A sink is fed from the files, not by the board: so one that is away or hangs holds up nothing and loses nothing, memory
is bounded by a chunk of a file, and a restarted coordinator goes on where the sink itself says that it is.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from specrl.coordinator.report import Status
from specrl.coordinator.sinks.contract import Sink, SinkRun
from specrl.coordinator.sinks.follower import THREAD, Follower
from specrl.errors import Problem, SpecInvalid
from specrl.spec import RunSpec
from specrl.spec.sinks import WandbMode

__all__ = ["Sink", "SinkRun", "Sinks", "check_sinks", "leave", "openers_of"]

_PACKAGES = {"tensorboard": "tensorboard", "wandb": "wandb", "mlflow": "mlflow"}
"""What each sink imports, by its name, which is that of its extra."""

CLOSE_S = 10.0
"""How long the end of a run waits for its sinks, all together."""


class Sinks:
    """The sinks of one run, each with its follower."""

    def __init__(self, spec: RunSpec, directory: Path, run_id: str) -> None:
        run = SinkRun(spec, directory, run_id)
        self._followers = [Follower(name, run, opener) for name, opener in openers_of(run).items()]

    def start(self) -> None:
        for follower in self._followers:
            follower.start()

    def close(self, status: Status, within_s: float = CLOSE_S) -> None:
        """Give them what is left, and end them; one that does not end in time is left behind. Blocks for `within_s`."""
        for follower in self._followers:
            follower.end(status.phase)
        for follower in self._followers:
            within_s -= follower.join(within_s)


def leave(code: int) -> NoReturn:
    """End this process, at once where a sink still hangs: its library would wait at exit for a server that is away.

    What the library has started besides is of this process's group, which the launcher ends, or of its pod.
    """
    if any(thread.name.startswith(THREAD) for thread in threading.enumerate()):
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def check_sinks(spec: RunSpec) -> None:
    """Raise SpecInvalid unless each sink that the run asks for can be used here: its package, its server, its key."""
    problems = []
    chosen = spec.telemetry.sinks
    for name, package in _PACKAGES.items():
        if getattr(chosen, name) is not None and find_spec(package) is None:
            where, rule = (
                f"telemetry.sinks.{name}",
                f"must have its package where the coordinator runs, got no {package}",
            )
            problems.append(Problem(where, rule, f"pip install 'specrl[{name}]', or leave the sink out"))
    if chosen.mlflow is not None and chosen.mlflow.tracking_uri is None and not os.environ.get("MLFLOW_TRACKING_URI"):
        rule = "must be given, or MLFLOW_TRACKING_URI in the environment, got neither"
        problems.append(Problem("telemetry.sinks.mlflow.trackingUri", rule, "name the tracking server"))
    if chosen.wandb is not None and chosen.wandb.mode is WandbMode.ONLINE and not _has_wandb_key():
        rule = "must have a key in WANDB_API_KEY or ~/.netrc, got none"
        problems.append(Problem("telemetry.sinks.wandb", rule, "set it, or write mode: Offline"))
    if problems:
        raise SpecInvalid(tuple(problems))


def _has_wandb_key() -> bool:
    return bool(os.environ.get("WANDB_API_KEY")) or Path(os.environ.get("NETRC", "~/.netrc")).expanduser().is_file()


def openers_of(run: SinkRun) -> dict[str, Callable[[], Sink]]:
    """How to open each sink of the run; its library is imported then."""

    def open_tensorboard() -> Sink:
        from specrl.coordinator.sinks.tensorboard import TensorBoardSink

        return TensorBoardSink(run)

    def open_wandb() -> Sink:
        from specrl.coordinator.sinks.wandb import WandbSink

        return WandbSink(run)

    def open_mlflow() -> Sink:
        from specrl.coordinator.sinks.mlflow import MlflowSink

        return MlflowSink(run)

    openers = {"tensorboard": open_tensorboard, "wandb": open_wandb, "mlflow": open_mlflow}
    return {name: opener for name, opener in openers.items() if getattr(run.spec.telemetry.sinks, name) is not None}
