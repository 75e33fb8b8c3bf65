"""The real program with two ranks: serves, loses a rank, comes back from its checkpoint, ends when told to.

One start here is that of the program itself; the others are forks that run its `main` (`tests/fork_server.py`).
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tests.fork_server import Forked, ForkServer
from tests.integration.trainer.conftest import VOCAB, rank_environment, rank_variables
from tests.integration.trainer.runs import a_batch, a_spec

from specrl.api.v1 import coordinator_pb2, coordinator_pb2_grpc
from specrl.errors import CheckpointInvalid, SpecInvalid
from specrl.launcher.processes.ports import find_free_port
from specrl.rpc.clients import TrainerClient
from specrl.rpc.server import start_server
from specrl.spec import dump_spec

PROGRAM = Path(sys.executable).with_name("specrl-trainer")
START_S = 200.0  # a busy machine imports torch slowly
RANKS = 2


class Trainer:
    """The two processes of one trainer."""

    def __init__(
        self, ranks: ForkServer | None, folder: Path, name: str, coordinator: str | None = None, *more: str
    ) -> None:
        """ranks: the server that forks them; None starts the program itself, which takes longer. coordinator: its
        address; None: an unused one, where registration keeps retrying. more: arguments."""
        self.logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
        port = find_free_port()
        arguments = [
            *("--spec", str(folder / "run.yaml")),
            *("--run-directory", str(folder / "run")),
            *("--coordinator", coordinator or f"127.0.0.1:{port}"),
            *more,
        ]
        self.processes: list[Forked | subprocess.Popen[bytes]] = []
        for rank, log in enumerate(self.logs):
            if ranks is not None:
                variables = rank_variables(rank, RANKS, port)
                self.processes.append(ranks.start("specrl.trainer.main", arguments, variables, log))
                continue
            with log.open("w") as out:
                command = [str(PROGRAM), *arguments]
                environment = rank_environment(rank, RANKS, port)
                self.processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))

    def address(self) -> str:
        """Wait until it serves. Returns its address."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline:
            found = re.search(r'"address": "([0-9.:]+)".*"trainer_served"', self.logs[0].read_text())
            if found:
                return found[1]
            assert all(process.poll() is None for process in self.processes), self.log()
            time.sleep(0.1)
        raise AssertionError(self.log())

    def log(self) -> str:
        return "\n".join(log.read_text()[-2000:] for log in self.logs)

    def codes(self) -> list[int]:
        return [process.wait(timeout=60) for process in self.processes]

    def kill(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


async def a_step_and_a_checkpoint(address: str) -> None:
    async with TrainerClient(address) as client:
        assert (await client.train_step(a_batch(1, VOCAB), START_S)).tokens > 0
        await client.save_checkpoint(1, START_S)


async def step_of(address: str) -> int:
    async with TrainerClient(address) as client:
        return (await client.get_status()).step


def test_dead_rank_ends_the_others_and_a_restart_resumes(ranks: ForkServer, policy: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_spec(a_spec(policy, data=RANKS)))
    first = Trainer(None, tmp_path, "first")
    try:
        asyncio.run(a_step_and_a_checkpoint(first.address()))
        first.processes[1].kill()
        assert first.codes() == [1, -signal.SIGKILL], first.log()
    finally:
        first.kill()
    (last_line,) = [line for line in first.logs[0].read_text().splitlines() if line.startswith("specrl-trainer:")]
    assert "lost a trainer rank" in last_line
    second = Trainer(ranks, tmp_path, "second")
    try:
        assert asyncio.run(step_of(second.address())) == 1
        for process in second.processes:
            process.terminate()
        assert second.codes() == [0, 0], second.log()
    finally:
        second.kill()
    new = ("--run-directory", str(tmp_path / "new"), "--checkpoint", str(tmp_path / "run"))
    of_another_run = Trainer(ranks, tmp_path, "new", None, *new)
    try:
        assert asyncio.run(step_of(of_another_run.address())) == 1
    finally:
        of_another_run.kill()


class SendsHome(coordinator_pb2_grpc.CoordinatorServiceServicer):
    """A coordinator whose run is over."""

    async def Register(self, request: Any, context: Any) -> coordinator_pb2.RegisterReply:
        return coordinator_pb2.RegisterReply(heartbeat_interval_s=0.1, run="tiny")

    async def Heartbeat(self, request: Any, context: Any) -> coordinator_pb2.HeartbeatReply:
        return coordinator_pb2.HeartbeatReply(is_known=True, must_leave=True)

    async def Leave(self, request: Any, context: Any) -> coordinator_pb2.LeaveReply:
        return coordinator_pb2.LeaveReply()


async def test_exit_code_0_of_a_pod_says_that_the_run_is_over_and_nothing_else(
    ranks: ForkServer, policy: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(dump_spec(a_spec(policy, data=RANKS)))
    stopped = Trainer(ranks, tmp_path, "stopped", None, "--until-dismissed")
    try:
        await asyncio.to_thread(stopped.address)
        for process in stopped.processes:
            process.terminate()
        assert await asyncio.to_thread(stopped.codes) == [143, 0], stopped.log()
    finally:
        stopped.kill()
    register = coordinator_pb2_grpc.add_CoordinatorServiceServicer_to_server
    server, port = await start_server(lambda it: register(SendsHome(), it), "127.0.0.1", 0)
    dismissed = Trainer(ranks, tmp_path, "dismissed", f"127.0.0.1:{port}", "--until-dismissed")
    try:
        await asyncio.to_thread(dismissed.address)
        assert await asyncio.to_thread(dismissed.codes) == [0, 0], dismissed.log()
    finally:
        dismissed.kill()
        await server.stop(None)


def test_missing_model_is_said_in_one_line(ranks: ForkServer, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(dump_spec(a_spec(tmp_path / "gone")))
    arguments = ["--spec", str(tmp_path / "run.yaml"), "--run-directory", str(tmp_path), "--coordinator", "127.0.0.1:1"]
    rank = ranks.start("specrl.trainer.main", arguments, {}, tmp_path / "log")
    assert rank.wait(timeout=START_S) == CheckpointInvalid.exit_code
    started, refused = (tmp_path / "log").read_text().splitlines()
    assert json.loads(started)["event"] == "process_started"
    assert refused.startswith("specrl-trainer: ")


def test_missing_run_file_is_said_in_one_line(tmp_path: Path) -> None:
    """Run the program itself, without torchrun."""
    arguments = ["--spec", str(tmp_path / "run.yaml"), "--run-directory", str(tmp_path), "--coordinator", "127.0.0.1:1"]
    environment = {k: v for k, v in rank_environment(0, 1, 1).items() if k not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [str(PROGRAM), *arguments], env=environment, capture_output=True, text=True, timeout=START_S, check=False
    )
    assert ended.returncode == SpecInvalid.exit_code
    assert ended.stderr.startswith("specrl-trainer: ")
    assert "Traceback" not in ended.stderr


def test_a_refusal_of_several_ranks_is_the_exit_code_of_their_node(tmp_path: Path) -> None:
    """In a pod, torchrun turned the code into 1, and its banner hid the message."""
    arguments = ["--spec", str(tmp_path / "run.yaml"), "--run-directory", str(tmp_path), "--coordinator", "127.0.0.1:1"]
    environment = {k: v for k, v in rank_environment(0, 1, 1).items() if k not in ("RANK", "WORLD_SIZE")}
    ended = subprocess.run(
        [str(PROGRAM), *arguments, "--ranks=2"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert ended.returncode == SpecInvalid.exit_code
    first, second = ended.stderr.splitlines()
    assert first == second
    assert first.startswith("specrl-trainer: ")
