"""The `specrl-generation` process with a real vLLM: it stays registered, and ends with the right message and code."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import httpx2
import psutil
import pytest
import pytest_asyncio
from tests.integration.forked_run import start_replica
from tests.vllm_cases import Models, a_spec, running_engine, some_requests

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.errors import EngineFailed, SpecInvalid
from specrl.generation import main as generation
from specrl.rpc.clients import GenerationClient
from specrl.rpc.server import start_server
from specrl.spec import digest_spec, dump_spec

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

PROGRAM = Path(sys.executable).parent / "specrl-generation"
START_S = 240.0  # two cores may be shared with other engines
SOON_S = 60.0


@dataclass
class Coordinator(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A coordinator that records its calls; a test clears `known` to make it forget its peers."""

    calls: list[tuple[str, Any]] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    port: int = 0
    server: grpc.aio.Server | None = None

    async def start(self) -> None:
        register = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
        self.server, self.port = await start_server(lambda it: register(self, it), "127.0.0.1", self.port)

    async def stop(self) -> None:
        assert self.server is not None
        await self.server.stop(None)

    async def Register(self, request: Any, context: Any) -> coordinator_pb2.RegisterReply:
        self.calls.append(("register", request))
        self.known.add(request.incarnation)
        return coordinator_pb2.RegisterReply(heartbeat_interval_s=0.2, run="test")

    async def Heartbeat(self, request: Any, context: Any) -> coordinator_pb2.HeartbeatReply:
        self.calls.append(("heartbeat", request))
        return coordinator_pb2.HeartbeatReply(is_known=request.incarnation in self.known)

    async def Leave(self, request: Any, context: Any) -> coordinator_pb2.LeaveReply:
        self.calls.append(("leave", request))
        return coordinator_pb2.LeaveReply()

    def told(self, what: str) -> list[Any]:
        """Requests of one kind, in order of arrival."""
        return [request for kind, request in self.calls if kind == what]


@pytest_asyncio.fixture(loop_scope="session")
async def coordinator() -> AsyncIterator[Coordinator]:
    found = Coordinator()
    await found.start()
    yield found
    await found.stop()


async def until(claim: Callable[[], bool], seconds: float) -> None:
    async with asyncio.timeout(seconds):
        while not claim():  # noqa: ASYNC110 - another process is watched
            await asyncio.sleep(0.05)


@asynccontextmanager
async def started(
    folder: Path, spec: Any, coordinator: Coordinator, *options: str
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A generation process; killed at the end if it still runs."""
    file = folder / "run.yaml"
    file.write_text(dump_spec(spec), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        PROGRAM, "--spec", file, "--replica-id", "gen-0", "--coordinator", f"127.0.0.1:{coordinator.port}", *options,
        stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
            await process.communicate()


async def ended(process: asyncio.subprocess.Process) -> tuple[int, list[str]]:
    """Exit code and lines on standard error."""
    async with asyncio.timeout(SOON_S):
        _, errors = await process.communicate()
    assert process.returncode is not None
    return process.returncode, errors.decode().splitlines()


async def test_the_process_serves_stays_registered_and_deregisters_at_sigterm(
    models: Models, coordinator: Coordinator, tmp_path: Path
) -> None:
    spec = a_spec(models.first.policy)
    async with started(tmp_path, spec, coordinator, "--metrics-port", "0") as process:
        await until(lambda: len(coordinator.told("heartbeat")) > 1, START_S)
        (registration,) = coordinator.told("register")
        assert (registration.role, registration.peer_id) == (coordinator_pb2.ROLE_GENERATION, "gen-0")
        assert registration.spec_digest == digest_spec(spec)
        assert coordinator.told("heartbeat")[-1].generation.policy_version == -1

        async with GenerationClient(registration.address, "gen-0") as client:
            rollouts = [rollout async for rollout in client.generate_rollouts(some_requests(4, 8), True, -1)]
            assert {rollout.replica_id for rollout in rollouts} == {"gen-0"}
        assert await _generated_by_metrics(process.pid) == sum(rollout.total_length for rollout in rollouts)

        coordinator.known.clear()
        await until(lambda: len(coordinator.told("register")) == 2, SOON_S)
        await coordinator.stop()
        await asyncio.sleep(0.5)
        coordinator.known.clear()
        await coordinator.start()
        await until(lambda: len(coordinator.told("register")) == 3, SOON_S)
        assert len({request.incarnation for request in coordinator.told("register")}) == 1

        children = psutil.Process(process.pid).children(recursive=True)
        assert _vdso(process.pid) in [_vdso(child.pid) for child in children], "the engine core is a fork"
        process.send_signal(signal.SIGTERM)
        code, lines = await ended(process)
        assert (code, len(coordinator.told("leave"))) == (0, 1), lines
        assert not any("Traceback" in line or "engine_fork_refused" in line for line in lines), lines
        assert not psutil.wait_procs(children, timeout=SOON_S)[1]


def _vdso(pid: int) -> str:
    """Addresses of the kernel's own library. They are random in each program, and the same in its forks."""
    lines = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    return next(line.split()[0] for line in lines if line.endswith("[vdso]"))


async def _generated_by_metrics(pid: int) -> float:
    """vLLM's own counter, from the process's metrics endpoint."""
    ports = [it.laddr.port for it in psutil.Process(pid).net_connections("tcp") if it.status == psutil.CONN_LISTEN]
    async with httpx2.AsyncClient(timeout=5, trust_env=False) as http:
        for port in ports:
            try:
                text = (await http.get(f"http://127.0.0.1:{port}/metrics")).text
            except httpx2.HTTPError:
                continue  # the gRPC port
            lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total")]
            return sum(float(line.rsplit(" ", 1)[1]) for line in lines)
    raise AssertionError(f"no metrics on {ports}")


async def test_a_replica_whose_engine_is_killed_raises_and_deregisters(
    models: Models, coordinator: Coordinator, tmp_path: Path
) -> None:
    """The test below covers the error message and the exit code."""
    spec = a_spec(models.first.policy)
    options = generation.parse_arguments(
        ["--spec", str(tmp_path), "--replica-id", "gen-0", "--coordinator", f"127.0.0.1:{coordinator.port}"]
    )
    async with running_engine(spec) as engine:
        serving = asyncio.create_task(generation.run_engine(engine, spec, options))
        await until(lambda: bool(coordinator.told("heartbeat")), SOON_S)
        max(psutil.Process().children(recursive=True), key=lambda it: it.create_time()).kill()  # the engine core
        with pytest.raises(EngineFailed, match="dead"):
            await asyncio.wait_for(serving, SOON_S)
    assert len(coordinator.told("leave")) == 1


async def test_a_process_that_cannot_start_prints_one_line(tmp_path: Path) -> None:
    """The program runs in a fork, whose interpreter has imported vLLM. No coordinator is needed: none is called."""
    spec = a_spec(tmp_path / "nothing")
    file = tmp_path / "run.yaml"
    file.write_text(dump_spec(spec), encoding="utf-8")
    said = tmp_path / "said.txt"
    options = ["--spec", str(file), "--replica-id", "gen-0", "--coordinator", "127.0.0.1:1"]
    process = start_replica(spec, options, said)
    await asyncio.to_thread(process.join, SOON_S)
    assert process.exitcode == SpecInvalid.exit_code
    assert EngineFailed.exit_code != 0, "a dead engine ends the process in the same way"
    lines = said.read_text().splitlines()
    assert [line for line in lines if "specrl-generation" in line] == lines
    assert len(lines) == 1
    assert "model.path must be a Hugging Face folder" in lines[0]
