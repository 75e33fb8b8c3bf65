"""A local run is scaled while it runs: new replicas start, and retired ones leave once they have drained.

Coordinator, launcher and CLI are real; replicas and trainer are stand-ins (tests/stand_ins/process.py).
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.run_files import a_model_folder, a_run
from typer.testing import CliRunner

from specrl.cli import app
from specrl.launcher import run_directory
from specrl.launcher.coordinator_client import CoordinatorReports
from specrl.launcher.local_run import LocalRun
from specrl.launcher.processes import programs
from specrl.launcher.processes.ports import find_free_port
from specrl.launcher.processes.replicas import ReplicaScaler
from specrl.launcher.processes.supervisor import RunEnd
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_steps
from specrl.launcher.terminal.view import PlainView
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.run_token import RunToken
from specrl.spec import load_spec, parse_spec

PATIENCE_S = 120.0  # generous, so that a busy machine does not fail the test


class RecordingView(PlainView):
    """Records the messages shown to the user."""

    def __init__(self) -> None:
        super().__init__(Console(file=sys.stderr))
        self.told: list[str] = []

    def show_message(self, text: str) -> None:
        self.told.append(text)


class ScriptThread(threading.Thread):
    """The user's actions in a second terminal. Interrupts the run at the end, whether they succeed or fail."""

    def __init__(self, steps: Callable[[], None]) -> None:
        super().__init__()
        self._steps = steps
        self.failure = None

    def run(self) -> None:
        try:
            self._steps()
        except BaseException as error:  # noqa: BLE001 - the test raises it again in its own thread
            self.failure: BaseException | None = error
        finally:
            os.kill(os.getpid(), signal.SIGINT)


def specrl_says(*arguments: str) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 0, result.output
    return result.stdout


@pytest.fixture
def interrupts_hit_the_run_alone() -> Iterator[None]:
    """One that comes when the run has ended by itself must fail the test, not end pytest."""
    before = signal.signal(signal.SIGINT, lambda *_: None)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("stand_ins", "interrupts_hit_the_run_alone")
def test_a_run_is_scaled_down_and_up_and_a_retired_replica_is_not_restarted(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    schedule = {"steps": 100_000, "promptsPerStep": 2, "groupSize": 2}
    generation = {"replicas": 2, "sampling": {"maxTokens": 16}}
    spec = parse_spec(a_run(tmp_path, telemetry={"heartbeatS": 1}, schedule=schedule, generation=generation))
    directory = run_directory.create_run(tmp_path / "runs", spec)
    grpc_port = find_free_port()
    http_port = find_free_port()
    view = RecordingView()
    run = str(directory.path)

    with directory.lock(), CoordinatorReports(f"127.0.0.1:{http_port}") as reports:
        local = LocalRun(
            directory,
            programs.build_programs(spec, directory, grpc_port, http_port),
            reports,
            view,
            ReplicaScaler(spec, directory, grpc_port),
        )
        script = ScriptThread(lambda: scale_and_dismiss(directory, view, grpc_port, http_port))
        script.start()
        outcome = local.run_to_end()
        script.join(PATIENCE_S)
    if script.failure is not None:
        raise script.failure
    assert outcome.end is RunEnd.INTERRUPTED
    assert not [told for told in view.told if "restarting" in told]
    scaled = [told for told in view.told if told.startswith("scaled")]
    assert scaled == ["scaled from 2 replicas to 1", "scaled from 1 replicas to 2"]
    assert load_spec(directory.run_file).generation.replicas == 2
    assert "it left with 0 unfinished rollouts" in (directory.logs_folder / "coordinator.log").read_text()
    assert [report.step for report in read_stored_steps(directory)] == list(
        range(1, len(read_stored_steps(directory)) + 1)
    )
    refused = CliRunner().invoke(app, ["scale", run, "--replicas", "2"])
    assert refused.exit_code == 2
    assert "must be an active run" in refused.stderr


def scale_and_dismiss(directory: RunDirectory, view: RecordingView, grpc_port: int, http_port: int) -> None:
    """As a user would, in a second terminal."""
    run = str(directory.path)

    def serving() -> list[str]:
        status = reports.fetch_status()
        return [it.id for it in status.replicas if it.state in ("serving", "updating")] if status else []

    def step() -> int:
        status = reports.fetch_status()
        return status.step if status else 0

    with CoordinatorReports(f"127.0.0.1:{http_port}") as reports:
        until(lambda: step() >= 1 and serving() == ["gen-0", "gen-1"])
        assert "scaling to 1 replicas" in specrl_says("scale", run, "--replicas", "1")
        until(lambda: serving() == ["gen-0"] and "gen-1 left" in view.told)
        specrl_says("scale", run, "-n", "2")
        until(lambda: serving() == ["gen-0", "gen-1"])
        asyncio.run(dismiss(grpc_port, "gen-1", RunToken(Path(run) / "token")))
        until(lambda: sum(told == "gen-1 left" for told in view.told) == 2)
        assert "paused at step" in specrl_says("pause", run)
        status = json.loads(specrl_says("status", run, "--json"))
        assert (status["isPaused"], status["replicasWanted"]) == (True, 2)
        before = step()
        assert f"checkpoint of step {before} is complete" in specrl_says("checkpoint", "save", run)
        assert "training at step" in specrl_says("resume", run)
        until(lambda: step() >= before + 3)
        assert serving() == ["gen-0"], "who was dismissed does not come back by itself"
        assert "gen-0 serving" in specrl_says("status", run, "--steps", "2")


async def dismiss(grpc_port: int, name: str, token: RunToken) -> None:
    async with CoordinatorClient(f"127.0.0.1:{grpc_port}", token=token) as client:
        await client.dismiss_replica(name)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.05)
