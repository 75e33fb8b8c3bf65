"""A run of real processes on one machine, for tests that kill and stop them.

The product's coordinator, and replicas and a trainer around stand-ins (tests/stand_ins/process.py), each a copy of a
process that has imported what it needs. Signals go to processes that this module started, and to no others.
"""

from __future__ import annotations

import atexit
import json
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import httpx2
from tests.fork_server import Forked, ForkServer, start_coordinator
from tests.run_files import a_model_folder, a_run

from specrl.launcher import run_directory
from specrl.launcher.processes.ports import find_free_port
from specrl.rpc import run_token
from specrl.rpc.run_token import RunToken
from specrl.spec import RunSpec, parse_spec

STAND_IN = "tests.stand_ins.process"
PATIENCE_S = 180.0  # a busy machine is slow, not wrong


@cache
def stand_ins() -> ForkServer:
    """The server that replicas and trainers of this session are forks of."""
    server = ForkServer(STAND_IN)
    atexit.register(server.close)
    return server


@dataclass
class Cluster:
    """Use as `with Cluster(tmp_path, ...) as cluster`; the changes are sections of the run file."""

    folder: Path
    changes: dict[str, Any] = field(default_factory=dict)
    token_seconds: float = 0.01
    processes: dict[str, Forked] = field(default_factory=dict)

    def __enter__(self) -> Cluster:
        a_model_folder(self.folder / "model")
        spec: RunSpec = parse_spec(a_run(self.folder, **{"telemetry": {"heartbeatS": 1}} | self.changes))
        self.spec = spec
        self.directory = run_directory.create_run(self.folder / "runs", spec)
        self.port = find_free_port()
        self.http_port = find_free_port()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(PATIENCE_S)

    @property
    def token(self) -> RunToken:
        """What its processes ask their callers for."""
        return RunToken(self.directory.token_file)

    def start(self, *names: str) -> None:
        """Start processes by name: coordinator, trainer, or a replica's name."""
        for name in names:
            run_file = str(self.directory.run_file)
            peer = ("--spec", run_file, "--coordinator", f"127.0.0.1:{self.port}")
            peer = (*peer, "--token-file", str(self.directory.token_file), "--metrics-port", "0")
            if name == "coordinator":
                self.processes[name] = self._start_coordinator()
                continue
            if name == "trainer":
                arguments = ("trainer", *peer, "--run-directory", str(self.directory.path))
            else:
                arguments = ("generation", *peer, "--replica-id", name)
            environment = {"HF_HUB_OFFLINE": "1", "TOKEN_SECONDS": str(self.token_seconds)}
            self.processes[name] = stand_ins().start(STAND_IN, arguments, environment, self.log(name))

    def _start_coordinator(self) -> Forked:
        ports = ("--port", str(self.port), "--http-port", str(self.http_port))
        return start_coordinator(("--run-directory", str(self.directory.path), *ports), self.log("coordinator"))

    def log(self, name: str) -> Path:
        """What a process has said, over all of its starts."""
        return self.folder / f"{name}.log"

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """Lines of one kind in a process's log."""
        lines = (line for line in self.log(name).read_text().splitlines() if line.startswith("{"))
        return [found for line in lines if (found := json.loads(line))["event"] == event]

    def moves(self, replica: str) -> list[str]:
        """The states that a replica has been led to, in order, as the coordinator logged them."""
        found = [line for line in self.events("coordinator", "replica_state_changed") if line["replica"] == replica]
        return [line["after"] for line in found]

    def signal(self, name: str, number: signal.Signals) -> None:
        """Send a signal to a process of this cluster."""
        self.processes[name].send_signal(number)

    def kill(self, name: str) -> None:
        """SIGKILL, and wait for the end."""
        self.signal(name, signal.SIGKILL)
        self.processes[name].wait(PATIENCE_S)

    def status(self) -> dict[str, Any]:
        """The coordinator's status; empty while it does not answer."""
        try:
            answer = self._page("status")
        except httpx2.TransportError:
            return {}
        found: dict[str, Any] = answer.json() if answer.status_code == httpx2.codes.OK else {}
        return found

    def replica(self, name: str) -> dict[str, Any]:
        """One replica in the status; empty when it is not there."""
        found = [replica for replica in self.status().get("replicas", ()) if replica["id"] == name]
        return found[0] if found else {}

    def reports(self) -> list[dict[str, Any]]:
        """Every step's report."""
        found: list[dict[str, Any]] = self._page("steps").json()
        return found

    def _page(self, name: str) -> httpx2.Response:
        """One of the coordinator's. Unverified, or httpx2 would read all the machine's certificates each time."""
        url = f"http://127.0.0.1:{self.http_port}/{name}"
        headers = {"Authorization": f"Bearer {run_token.find_token(self.directory.path)}"}
        return httpx2.get(url, headers=headers, verify=False, timeout=30, trust_env=False)  # no TLS here

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so; fails with the coordinator's last words when it never is."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.log("coordinator").read_text()[-6000:]
            time.sleep(0.05)

    def finish(self) -> dict[str, Any]:
        """Wait for the end of the run; returns its last status."""
        self.until(lambda: self.status().get("phase") in ("finished", "failed"))
        status = self.status()
        assert status["phase"] == "finished", status["error"]
        return status
