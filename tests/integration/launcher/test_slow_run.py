"""A run whose engine and trainer are slow is never silent, and saves the step in training when it is stopped.

Coordinator, launcher and view are real; replica and trainer are stand-ins (tests/stand_ins/process.py).
"""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
from rich.console import Console
from tests.integration.launcher.test_scale import ScriptThread, interrupts_hit_the_run_alone
from tests.run_files import a_model_folder, a_run

from specrl.formats.reports import StatusReport
from specrl.launcher import run_directory
from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.local_run import LocalRun
from specrl.launcher.processes import programs
from specrl.launcher.processes.ports import find_free_port
from specrl.launcher.processes.supervisor import RunEnd
from specrl.launcher.terminal.view import QUIET_S, PlainView
from specrl.spec import parse_spec
from specrl.trainer.checkpointing.checkpoints import list_complete

__all__ = ["interrupts_hit_the_run_alone"]  # a fixture

PATIENCE_S = 600.0  # generous, so that a busy machine does not fail the test
POLL_S = 4.0  # what the view's clock advances by from one status to the next


class TimedView(PlainView):
    """Notes when it prints, by a clock on which each look at the coordinator takes POLL_S. So every wait is long."""

    def __init__(self) -> None:
        self.now = 0.0
        self.printed: list[tuple[float, str]] = []
        super().__init__(Console(file=sys.stderr), lambda: self.now)

    def show_status(self, status: StatusReport | None) -> None:
        self.now += POLL_S
        super().show_status(status)

    def show_message(self, text: str) -> None:
        super().show_message(text)
        self.printed.append((self.now, text))


def wait_for_training(http_port: int) -> None:
    deadline = time.monotonic() + PATIENCE_S
    with CoordinatorReports(f"127.0.0.1:{http_port}") as reports:
        while (status := reports.fetch_status()) is None or status.trainer != "training":
            assert time.monotonic() < deadline, "no step was trained"
            time.sleep(0.05)


@pytest.mark.usefixtures("stand_ins", "interrupts_hit_the_run_alone")
def test_a_slow_run_is_never_silent_and_saves_the_step_in_training_when_it_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Minutes passed without a word. After Ctrl-C the run was killed in the middle of its step, unsaved."""
    monkeypatch.setenv("TOKEN_SECONDS", "0.2")
    monkeypatch.setenv("STEP_SECONDS", "4")
    a_model_folder(tmp_path / "model")
    spec = parse_spec(
        a_run(tmp_path, telemetry={"heartbeatS": 1}, schedule={"steps": 9, "promptsPerStep": 2, "groupSize": 2})
    )
    directory = run_directory.create_run(tmp_path / "runs", spec)
    ports = find_free_port(), find_free_port()
    view = TimedView()
    with directory.lock(), CoordinatorReports(f"127.0.0.1:{ports[1]}") as reports:
        script = ScriptThread(lambda: wait_for_training(ports[1]))  # then it interrupts the run
        script.start()
        outcome = LocalRun(directory, programs.build_programs(spec, directory, *ports), reports, view).run_to_end()
        script.join()
    if script.failure is not None:
        raise script.failure
    assert outcome.end is RunEnd.INTERRUPTED
    assert outcome.status is not None
    assert outcome.status.detail == "stopped; step 1 is saved"
    assert [step for step, _ in list_complete(directory.path)] == [1]

    said = [text for _, text in view.printed]
    assert any("the trainer finishes step 1, which is then saved" in text for text in said)
    times = [0.0, *(at for at, _ in view.printed), view.now]
    gaps = [after - before for before, after in pairwise(times)]
    assert max(gaps) < QUIET_S + POLL_S, said
