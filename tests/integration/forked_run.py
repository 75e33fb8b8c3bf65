"""A whole run whose processes are forks of others that have imported vLLM, torch or the coordinator.

The imports take fifteen CPU seconds for each replica, six for each rank and three for the coordinator. Such a run does
not show two things:

- that the launcher starts the programs: test_demo does
- that nothing depends on an interpreter's hash seed, which all forks share: tests/chaos/test_chaos.py starts programs
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import engine_fork
from tests.fork_server import Forked, ForkServer, start_coordinator

from specrl.generation import main as generation_main
from specrl.generation.nodes import ONE_NODE, ReplicaNodes
from specrl.generation.vllm_backend import arguments
from specrl.launcher import run_directory
from specrl.launcher.processes.environment import rank_environment, replica_environment
from specrl.launcher.processes.ports import find_free_port
from specrl.launcher.run_directory import RunDirectory
from specrl.spec import RunSpec, dump_spec, parse_spec
from specrl.telemetry.hosts import join_address

END_S = 900.0
STOP_S = 90.0


class ForkedRun:
    """The processes of one run. ranks: the server that the trainer's ranks are forks of. host: where all of them serve.

    It may be an IPv6 address.
    """

    def __init__(self, folder: Path, run: Mapping[str, Any], ranks: ForkServer, host: str = "127.0.0.1") -> None:
        self._host = host
        self._spec: RunSpec = parse_spec(dict(run))
        self.directory: RunDirectory = run_directory.create_run(folder / "runs", self._spec)
        self._port = find_free_port()
        self._coordinator = self._start_coordinator()
        self._ranks = self._start_ranks(ranks)
        self._replicas = [self._start_replica(f"gen-{number}") for number in range(self._spec.generation.replicas)]

    def finish(self) -> None:
        """Wait until the run is finished, then stop the coordinator. Fails if a process ends before."""
        self.wait_until(lambda: self._phase() == "finished")
        self._coordinator.terminate()
        assert self._coordinator.wait(STOP_S) == 0, self.logs()

    def wait_for_steps(self, count: int) -> None:
        """Wait until so many steps were reported. Fails if a process ends before."""
        self.wait_until(lambda: self.directory.metrics_file.exists() and len(self.reports()) >= count)

    def restart(self, ranks: ForkServer, replicas: Sequence[str]) -> None:
        """Kill all processes at once, and start them again on the same run directory, with these replicas.

        The run file then asks for so many, so the run goes on when all of them are there.
        """
        self._coordinator.kill()
        for process in (*self._ranks, *self._replicas):
            process.kill()
        self.stop()
        generation = self._spec.generation.model_copy(update={"replicas": len(replicas)})
        self._spec = self._spec.model_copy(update={"generation": generation})
        self.directory.run_file.write_text(dump_spec(self._spec))
        self._coordinator = self._start_coordinator()
        self._ranks = self._start_ranks(ranks)
        self._replicas = [self._start_replica(name) for name in replicas]

    def wait_until(self, is_done: Callable[[], bool]) -> None:
        """Poll until it is done. Fails if a process ends before."""
        deadline = time.monotonic() + END_S
        while not is_done():
            assert time.monotonic() < deadline, self.logs()
            assert self._coordinator.poll() is None, self.logs()
            assert not any(rank.poll() for rank in self._ranks), self.logs()
            assert not any(replica.exitcode for replica in self._replicas), self.logs()
            time.sleep(0.1)

    def stop(self) -> None:
        """End all processes that still run. Call it whether the test passed or failed."""
        self._coordinator.kill()
        self._coordinator.wait(STOP_S)
        for process in (*self._ranks, *self._replicas):
            process.terminate()
        for rank in self._ranks:
            try:
                rank.wait(STOP_S)
            except subprocess.TimeoutExpired:
                rank.kill()
        for replica in self._replicas:
            replica.join(STOP_S)
            replica.kill()

    def reports(self) -> list[dict[str, Any]]:
        """Read the reports of all steps so far."""
        return [json.loads(line) for line in self.directory.metrics_file.read_text().splitlines()]

    def log(self, name: str) -> str:
        """Read the whole log of one process: coordinator, rank-0 or gen-0, for instance."""
        return (self.directory.logs_folder / f"{name}.log").read_text()

    def logs(self) -> str:
        """Read the last 2000 characters of every process's log, for the message of a failure."""
        return "\n".join(
            f"{file.name}:\n{file.read_text()[-2000:]}" for file in sorted(self.directory.logs_folder.iterdir())
        )

    def _phase(self) -> str:
        file = self.directory.status_file
        return str(json.loads(file.read_text())["phase"]) if file.exists() else ""

    def _start_coordinator(self) -> Forked:
        arguments = ["--run-directory", str(self.directory.path), "--host", self._host]
        arguments += ["--port", str(self._port), "--http-port", str(find_free_port())]
        return start_coordinator(arguments, self.directory.logs_folder / "coordinator.log")

    def _start_ranks(self, server: ForkServer) -> list[Forked]:
        count = self._spec.trainer.parallelism.world_size
        port = find_free_port()
        options = [*self._list_member_options(), "--run-directory", str(self.directory.path)]
        started = []
        for rank in range(count):
            variables = rank_environment(self._spec.trainer.threads, rank, count, port, ())
            added = {name: value for name, value in variables.items() if os.environ.get(name) != value}
            log = self.directory.logs_folder / f"rank-{rank}.log"
            started.append(server.start("specrl.trainer.main", options, added, log))
        return started

    def _list_member_options(self) -> list[str]:
        """List the options that ranks and replicas share."""
        options = ["--spec", str(self.directory.run_file), "--token-file", str(self.directory.token_file)]
        options += ["--coordinator", join_address(self._host, self._port)]
        return [*options, "--host", self._host, "--metrics-port", "0"]

    def _start_replica(self, name: str) -> engine_fork.EngineProcess:
        options = [*self._list_member_options(), "--replica-id", name]
        return start_replica(self._spec, options, self.directory.logs_folder / f"{name}.log")


def start_replica(spec: RunSpec, options: Sequence[str], log: Path) -> engine_fork.EngineProcess:
    """Run `specrl-generation OPTIONS` in a fork. spec: of the run. log: gets what it says."""
    return engine_fork.start_fork(serve_replica, list(options), str(log), environment=replica_variables(spec))


def replica_variables(spec: RunSpec, nodes: ReplicaNodes = ONE_NODE) -> dict[str, str]:
    """Variables of a fork that runs a replica."""
    variables = replica_environment(spec.generation.threads, ())
    return variables | arguments.build_environment(spec, nodes) | arguments.build_compile_environment(spec, is_cpu=True)


def serve_replica(options: list[str], log: str) -> None:
    """Run a replica in this fork. Its output is appended to the file `log`."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(descriptor, output)
    generation_main.main(options)
