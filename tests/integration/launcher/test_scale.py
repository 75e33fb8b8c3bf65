"""A local run is scaled while it goes on: replicas are started, and leave once they have finished what they have.

The product's coordinator, launcher and CLI; replicas and trainer around stand-ins (tests/stand_ins/process.py).
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
from tests.redis_servers import free_port
from tests.run_files import a_model_folder, a_run
from typer.testing import CliRunner

from specrl.cli import app
from specrl.launcher import programs, run_directory
from specrl.launcher.local_run import Ended, LocalRun
from specrl.launcher.replicas import Replicas
from specrl.launcher.reports import CoordinatorReports, stored_steps
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.view import PlainView
from specrl.rpc.clients import CoordinatorClient
from specrl.spec import load_spec, parse_spec

PATIENCE_S = 120.0  # a busy machine is slow, not wrong


class Notes(PlainView):
    """Remembers what the user was told."""

    def __init__(self) -> None:
        super().__init__(Console(file=sys.stderr))
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)


class Script(threading.Thread):
    """What a user does meanwhile, in a second terminal. However it ends, the run is interrupted then."""

    def __init__(self, steps: Callable[[], None]) -> None:
        super().__init__()
        self._steps, self.failure = steps, None

    def run(self) -> None:
        try:
            self._steps()
        except BaseException as error:  # noqa: BLE001 - told to the test, in whose thread it is raised
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
def test_a_run_is_scaled_down_and_up_and_a_replica_that_was_dismissed_stays_away(tmp_path: Path) -> None:
    a_model_folder(tmp_path / "model")
    schedule = {"steps": 100_000, "promptsPerStep": 2, "groupSize": 2}
    generation = {"replicas": 2, "sampling": {"maxTokens": 16}}
    spec = parse_spec(a_run(tmp_path, telemetry={"heartbeatS": 1}, schedule=schedule, generation=generation))
    directory = run_directory.create(tmp_path / "runs", spec)
    grpc_port, http_port = free_port(), free_port()
    view, run = Notes(), str(directory.path)

    with directory.lock(), CoordinatorReports(f"127.0.0.1:{http_port}") as reports:
        local = LocalRun(
            directory,
            programs.programs_of(spec, directory, grpc_port, http_port),
            reports,
            view,
            Replicas(spec, directory, grpc_port),
        )
        script = Script(lambda: scale_and_dismiss(directory, view, grpc_port, http_port))
        script.start()
        outcome = local.drive()
        script.join(PATIENCE_S)
    if script.failure is not None:
        raise script.failure
    assert outcome.ended is Ended.INTERRUPTED
    assert local._supervisor.restarts() == dict.fromkeys(("coordinator", "trainer", "gen-0", "gen-1"), 0)
    scaled = [told for told in view.told if told.startswith("scaled")]
    assert scaled == ["scaled from 2 replicas to 1", "scaled from 1 replicas to 2"]
    assert load_spec(directory.run_file).generation.replicas == 2
    assert "it left with 0 rollouts under way" in (directory.logs / "coordinator.log").read_text()
    assert [report.step for report in stored_steps(directory)] == list(range(1, len(stored_steps(directory)) + 1))
    refused = CliRunner().invoke(app, ["scale", run, "--replicas", "2"])
    assert refused.exit_code == 2
    assert "must be under way" in refused.stderr


def scale_and_dismiss(directory: RunDirectory, view: Notes, grpc_port: int, http_port: int) -> None:
    """As a user would, in a second terminal."""
    run = str(directory.path)

    def serving() -> list[str]:
        status = reports.status()
        return [it.id for it in status.replicas if it.state in ("serving", "updating")] if status else []

    def step() -> int:
        status = reports.status()
        return status.step if status else 0

    with CoordinatorReports(f"127.0.0.1:{http_port}") as reports:
        until(lambda: step() >= 1 and serving() == ["gen-0", "gen-1"])
        assert "1 replicas are wanted" in specrl_says("scale", run, "--replicas", "1")
        until(lambda: serving() == ["gen-0"] and "gen-1 has left" in view.told)
        specrl_says("scale", run, "-n", "2")
        until(lambda: serving() == ["gen-0", "gen-1"])
        asyncio.run(dismiss(grpc_port, "gen-1"))
        until(lambda: sum(told == "gen-1 has left" for told in view.told) == 2)
        assert "paused at step" in specrl_says("pause", run)
        status = json.loads(specrl_says("status", run, "--json"))
        assert (status["isPaused"], status["replicasWanted"]) == (True, 2)
        before = step()
        specrl_says("checkpoint", "save", run)
        assert "training at step" in specrl_says("resume", run)
        until(lambda: step() >= before + 3)
        assert serving() == ["gen-0"], "who was dismissed does not come back by itself"
        assert "gen-0 serving" in specrl_says("status", run, "--steps", "2")


async def dismiss(grpc_port: int, name: str) -> None:
    async with CoordinatorClient(f"127.0.0.1:{grpc_port}") as client:
        await client.dismiss(name)


def until(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline, "it did not come so far"
        time.sleep(0.05)
