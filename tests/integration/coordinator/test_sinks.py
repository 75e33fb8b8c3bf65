"""A real coordinator process with two sinks: one works, the other's server accepts calls and never answers."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.requirements import SINKS
from tests.run_files import a_model_folder, a_run
from tests.unit.report.runs import a_step

from specrl.coordinator.observe.report_files import ReportFiles
from specrl.launcher import run_directory
from specrl.spec import parse_spec

PATIENCE_S = 120.0  # generous, because the machine may be busy

pytestmark = pytest.mark.needs(SINKS)


def test_a_sink_that_never_answers_blocks_neither_others_nor_the_end(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sinks = {"tensorboard": {}, "mlflow": {"trackingUri": address}}
        directory = run_directory.create_run(tmp_path / "runs", parse_spec(a_run(tmp_path, telemetry={"sinks": sinks})))
        ReportFiles(directory.path).append_steps([a_step(1), a_step(2)])
        silent.settimeout(PATIENCE_S)
        process = subprocess.Popen(
            [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)],
            env=os.environ | {"MLFLOW_HTTP_REQUEST_TIMEOUT": "3600", "HF_HUB_OFFLINE": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            connection, _ = silent.accept()  # MLflow's request, which is never answered
            with connection:
                until_taken(directory.path / "tensorboard", steps=2)
                process.send_signal(signal.SIGTERM)
                output, _ = process.communicate(timeout=PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    left = [line for line in output.splitlines() if "sink_abandoned" in line]
    assert len(left) == 1
    assert '"sink": "mlflow"' in left[0]
    assert "run_stopped" in output


def until_taken(folder: Path, steps: int) -> None:
    from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

    deadline = time.monotonic() + PATIENCE_S
    while True:
        files = [str(file) for file in folder.glob("events.*")]
        taken = [event.step for file in files for event in EventFileLoader(file).Load() if event.summary.value]
        if taken == list(range(1, steps + 1)):
            return
        assert time.monotonic() < deadline, f"taken are {taken}"
        time.sleep(0.1)
