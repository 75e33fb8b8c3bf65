"""A coordinator process that is told to stop saves first. Its peers are stand-ins in this process."""

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
from specrl.records import GenerationStatus, Peer, Role
from specrl.rpc.clients import CoordinatorClient
from specrl.rpc.membership import stay_registered
from specrl.rpc.server import serve
from specrl.spec import RunSpec, digest, load_spec, parse_spec
from specrl.trainer.checkpoints import complete
from specrl.trainer.service import TrainerService

PATIENCE_S = 120.0  # a busy machine is slow, not wrong
VOCAB = 264  # of the model folder in tests/run_files.py


class SlowBackend(StandInBackend):
    """Begins to write a checkpoint, and completes it when it may."""

    def __init__(self) -> None:
        super().__init__(VOCAB, has_drafter=False, seed=1)
        self.has_begun, self.may_complete = threading.Event(), threading.Event()

    def write_checkpoint(self, directory: Path, taken: dict[str, Any], state: dict[str, Any]) -> None:
        self.has_begun.set()
        assert self.may_complete.wait(PATIENCE_S)
        super().write_checkpoint(directory, taken, state)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    a_model_folder(tmp_path / "model")
    # No canary: a replica whose rollouts never finish would keep it waiting for 30 s.
    spec = parse_spec(a_run(tmp_path, telemetry={"heartbeatS": 1}, canary={"everySteps": 0}))
    return run_directory.create(tmp_path / "runs", spec)


class CountingEngine(TableEngine):
    """Counts the heartbeats of its replica: each asks for the status."""

    heartbeats = 0

    async def status(self) -> GenerationStatus:
        self.heartbeats += 1
        return await super().status()


@asynccontextmanager
async def peers(spec: RunSpec, folder: Path, address: str, backend: SlowBackend) -> AsyncIterator[CountingEngine]:
    """A trainer, and a replica whose rollouts never finish: so the trainer is at rest. Yields the replica's engine."""
    engine = CountingEngine("gen-0", seed=7, shape=TableShape(VOCAB, spec.model.max_length, 3600.0))
    await engine.start()
    replica = GenerationService(engine, spec.weights, float(spec.generation.reattach_s))
    trainer = TrainerService(backend, spec, folder, "127.0.0.1")  # type: ignore[arg-type]
    await trainer.load()
    servers, memberships = [], []
    async with CoordinatorClient(address) as client:
        for service, name, role in ((replica, "gen-0", Role.GENERATION), (trainer, "trainer", Role.TRAINER)):
            server, port = await serve(service.add_to, "127.0.0.1", 0)
            servers.append(server)
            status = engine.status if role is Role.GENERATION else None
            staying = stay_registered(client, Peer(name, role, f"127.0.0.1:{port}", digest(spec)), status)
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
            await trainer.close()


async def until(is_so: Callable[[], bool], process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            assert process.returncode is None, "the coordinator ended"
            await asyncio.sleep(0.05)


async def until_training(address: str, process: asyncio.subprocess.Process) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while (await answer(address, "/status"))["phase"] != "training":
            assert process.returncode is None, "the coordinator ended"
            await asyncio.sleep(0.05)


async def test_a_coordinator_answers_while_it_saves_after_sigterm(directory: RunDirectory) -> None:
    """uvicorn took SIGTERM for itself and closed the page, REST and probes at once.

    The attribute that was to prevent it, `install_signal_handlers`, had gone with uvicorn 0.29.
    """
    command = [sys.executable, "-m", "specrl.coordinator.main", "--run-directory", str(directory.path)]
    log = directory.path / "coordinator.log"
    with log.open("w") as output:
        process = await asyncio.create_subprocess_exec(
            *(*command, "--port", "0", "--http-port", "0"),
            stdout=output,
            stderr=output,
            env=os.environ | {"HF_HUB_OFFLINE": "1"},
        )
    try:
        await until(directory.endpoints_file.exists, process)
        addresses = json.loads(directory.endpoints_file.read_text())
        spec, backend = load_spec(directory.run_file), SlowBackend()
        async with peers(spec, directory.path, addresses["grpc"], backend) as engine:
            await until_training(addresses["http"], process)
            process.send_signal(signal.SIGTERM)
            await until(backend.has_begun.is_set, process)
            # uvicorn looks at its signals ten times a second, in the loop that answers a heartbeat each second.
            seen = engine.heartbeats
            await until(lambda: engine.heartbeats >= seen + 3, process)
            assert (await answer(addresses["http"], "/healthz")) == {"status": "alive"}
            assert (await answer(addresses["http"], "/status"))["detail"].startswith("stopping")
            assert (await answer(addresses["http"], "/readyz"))["phase"] == "training"
            assert complete(directory.path) == []
            backend.may_complete.set()
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0, log.read_text()
        assert [step for step, _ in complete(directory.path)] == [0]
        assert json.loads(directory.status_file.read_text())["phase"] == "stopped"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def answer(address: str, path: str) -> Any:
    """Over a connection of its own, as a probe has."""
    async with httpx2.AsyncClient(verify=False, timeout=PATIENCE_S, trust_env=False) as client:  # no TLS here
        return (await client.get(address + path)).raise_for_status().json()
