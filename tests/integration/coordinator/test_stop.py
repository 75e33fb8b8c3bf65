"""A coordinator process that receives a signal saves before it ends. Its peers are stand-ins in this process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from tests.run_files import a_model_folder, a_run
from tests.stand_ins.engine import TableEngine, TableShape
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.generation.service import GenerationService
from specrl.launcher import run_directory
from specrl.launcher.run_directory import RunDirectory
from specrl.records import Batch, GenerationStatus, Peer, Role, TrainMetrics
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.membership import stay_registered
from specrl.rpc.run_token import TOKEN_FILE, RunToken
from specrl.rpc.server import ServerOptions, start_server
from specrl.spec import RunSpec, digest_spec, load_spec, parse_spec
from specrl.trainer.checkpointing.checkpoints import list_complete
from specrl.trainer.service import TrainerService

PATIENCE_S = 120.0  # generous, because the machine may be busy
VOCAB = 264  # of the model folder in tests/run_files.py


class SlowBackend(StandInBackend):
    """A trainer backend that completes a step, or a checkpoint, when the test allows it."""

    def __init__(self) -> None:
        super().__init__(VOCAB, has_drafter=False, seed=1)
        self.is_training = threading.Event()
        self.may_train = threading.Event()
        self.has_begun = threading.Event()
        self.may_complete = threading.Event()

    def train_step(self, batch: Batch) -> TrainMetrics:
        self.is_training.set()
        assert self.may_train.wait(PATIENCE_S)
        return super().train_step(batch)

    def write_checkpoint(self, directory: Path, taken: dict[str, Any], state: dict[str, Any]) -> None:
        self.has_begun.set()
        assert self.may_complete.wait(PATIENCE_S)
        super().write_checkpoint(directory, taken, state)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    a_model_folder(tmp_path / "model")
    # No canary: the rollouts of this replica never finish, so the canary would wait for 30 s.
    spec = parse_spec(a_run(tmp_path, telemetry={"heartbeatS": 1}, canary={"everySteps": 0}))
    return run_directory.create_run(tmp_path / "runs", spec)


class CountingEngine(TableEngine):
    """Counts the heartbeats of its replica, each of which reads the status."""

    heartbeats = 0

    async def get_status(self) -> GenerationStatus:
        self.heartbeats += 1
        return await super().get_status()


@asynccontextmanager
async def peers(
    spec: RunSpec, folder: Path, address: str, backend: SlowBackend, pace_s: float
) -> AsyncIterator[CountingEngine]:
    """A trainer, and a replica that takes `pace_s` seconds for each token. Yields the replica's engine."""
    engine = CountingEngine("gen-0", seed=7, shape=TableShape(VOCAB, spec.model.max_length, pace_s))
    await engine.start()
    replica = GenerationService(engine, spec.weights, float(spec.generation.reattach_s))
    trainer = TrainerService(backend, spec, folder, "127.0.0.1")  # type: ignore[arg-type]
    await trainer.load_model()
    servers = []
    memberships = []
    token = RunToken(folder / TOKEN_FILE)
    async with CoordinatorClient(address, token=token) as client:
        for service, name, role in ((replica, "gen-0", Role.GENERATION), (trainer, "trainer", Role.TRAINER)):
            server, port = await start_server(service.add_to, "127.0.0.1", 0, ServerOptions(token=token))
            servers.append(server)
            status = engine.get_status if role is Role.GENERATION else None
            staying = stay_registered(client, Peer(name, role, f"127.0.0.1:{port}", digest_spec(spec)), status)
            memberships.append(asyncio.create_task(staying))
        try:
            yield engine
        finally:
            backend.may_complete.set()
            for membership in memberships:
                membership.cancel()
            await asyncio.gather(*memberships, return_exceptions=True)
            engine.die()
            replica.close()
            for server in servers:
                await server.stop(None)
            backend.may_train.set()  # only now: its answer is lost
            await trainer.close()


async def until(is_so: Callable[[], bool], process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            assert process.returncode is None, "the coordinator ended"
            await asyncio.sleep(0.05)


async def until_status(address: str, process: asyncio.subprocess.Process, field: str, value: str) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await answer(address, "/status"))[field] != value:
            assert process.returncode is None, "the coordinator ended"
            await asyncio.sleep(0.05)


async def test_a_coordinator_answers_while_it_saves_after_sigterm(directory: RunDirectory) -> None:
    """uvicorn handled SIGTERM itself, and closed the page, REST and probes at once.

    The attribute that should have prevented this, `install_signal_handlers`, was removed in uvicorn 0.29.
    """
    async with a_coordinator(directory) as process:
        addresses = json.loads(directory.endpoints_file.read_text())
        spec = load_spec(directory.run_file)
        backend = SlowBackend()
        # The rollouts never finish, so the trainer stays idle.
        async with peers(spec, directory.path, addresses["grpc"], backend, pace_s=3600.0) as engine:
            await until_status(addresses["http"], process, "phase", "training")
            process.send_signal(signal.SIGTERM)
            await until(backend.has_begun.is_set, process)
            # uvicorn checks for signals ten times a second, in the event loop that answers one heartbeat per second.
            seen = engine.heartbeats
            await until(lambda: engine.heartbeats >= seen + 3, process)
            assert (await answer(addresses["http"], "/healthz")) == {"status": "alive"}
            assert (await answer(addresses["http"], "/status"))["detail"].startswith("stopping")
            assert (await answer(addresses["http"], "/readyz"))["phase"] == "training"
            assert list_complete(directory.path) == []
            backend.may_complete.set()
            await until_ended(process, directory)
        assert [step for step, _ in list_complete(directory.path)] == [0]
        status = json.loads(directory.status_file.read_text())
        assert status["phase"] == "stopped"
        assert status["detail"] == "stopped; no step was trained, so there is nothing to save"


async def test_a_step_that_is_being_trained_is_finished_and_saved(directory: RunDirectory) -> None:
    """The checkpoint was asked for at the step before, which the trainer refused once its step had ended.

    The refusal was dropped, so a stop in the middle of a step never saved, and the run said that it was saved.
    """
    async with a_coordinator(directory) as process:
        addresses = json.loads(directory.endpoints_file.read_text())
        backend = SlowBackend()
        spec = load_spec(directory.run_file)
        async with peers(spec, directory.path, addresses["grpc"], backend, pace_s=0.001) as engine:
            await until(backend.is_training.is_set, process)
            process.send_signal(signal.SIGTERM)
            waiting = "stopping; the trainer finishes step 1, which is then saved"
            await until_status(addresses["http"], process, "detail", waiting)
            seen = engine.heartbeats
            await until(lambda: engine.heartbeats >= seen + 3, process)  # it goes on waiting
            assert not backend.has_begun.is_set()
            backend.may_train.set()
            backend.may_complete.set()
            await until_ended(process, directory)
        assert [step for step, _ in list_complete(directory.path)] == [1]
        status = json.loads(directory.status_file.read_text())
        assert (status["phase"], status["detail"]) == ("stopped", "stopped; step 1 is saved")


async def test_a_trainer_that_is_lost_during_the_last_step_does_not_hold_up_the_stop(directory: RunDirectory) -> None:
    async with a_coordinator(directory) as process:
        addresses = json.loads(directory.endpoints_file.read_text())
        backend = SlowBackend()
        spec = load_spec(directory.run_file)
        async with peers(spec, directory.path, addresses["grpc"], backend, pace_s=0.001):
            await until(backend.is_training.is_set, process)
            process.send_signal(signal.SIGTERM)
        # The peers are gone, without a word.
        await until_ended(process, directory)
        detail = json.loads(directory.status_file.read_text())["detail"]
        assert detail == "stopped; no step was trained, so there is nothing to save"


@asynccontextmanager
async def a_coordinator(directory: RunDirectory) -> AsyncIterator[asyncio.subprocess.Process]:
    """A coordinator process that listens; it is killed when the test has failed."""
    command = [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)]
    with (directory.path / "coordinator.log").open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--port", "0", "--http-port", "0"),
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    try:
        await until(directory.endpoints_file.exists, process)
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def until_ended(process: asyncio.subprocess.Process, directory: RunDirectory) -> None:
    log = directory.path / "coordinator.log"
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0, log.read_text()


async def answer(address: str, path: str) -> Any:
    """Over a connection of its own, as a probe has."""
    async with httpx2.AsyncClient(verify=False, timeout=PATIENCE_S, trust_env=False) as client:  # no TLS here
        return (await client.get(address + path)).raise_for_status().json()
