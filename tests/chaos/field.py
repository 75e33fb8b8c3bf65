"""A run under test: its processes, its Redis server and its folder; and how each fault is injected.

A lasting fault is undone before `strike` returns, and Redis is up again. The product must recover everything else by
itself, except the launcher, which is started again with --resume as a user would.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sqlite3
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import yaml
from tests.chaos import network
from tests.chaos.plan import Fault, Kind
from tests.integration.runs import StartedRun, start
from tests.redis_servers import RedisProcess

POINTS_FOLDER = Path(__file__).with_name("points")
REACH_S = 60.0
"""How long to wait until a process passes an armed point. The run may be in a phase that never passes it."""
DISK_MIB = 256


class NotThere(Exception):
    """The target of the fault does not exist at this moment."""


@dataclass
class Field:
    """One run in `folder`. redis: its Redis server; None if the run uses SQLite."""

    folder: Path
    spec: Mapping[str, object]
    redis: RedisProcess | None
    has_namespace: bool
    run: StartedRun = field(init=False)
    launches: int = 0
    _said_before: int = 0

    def __post_init__(self) -> None:
        for name in ("armed", "struck", "ledger"):
            (self.folder / "chaos" / name).mkdir(parents=True)
        (self.folder / "runs").mkdir()
        if self.has_namespace:
            network.mount_small(str(self.folder / "runs"), DISK_MIB)
        (self.folder / "run.yaml").write_text(yaml.safe_dump(dict(self.spec)))
        self._launch("-f", "run.yaml")

    @property
    def ledger(self) -> Path:
        return self.folder / "chaos" / "ledger"

    def last_words(self) -> str:
        """The output of the launcher since its last start."""
        return self.run.output.read_bytes()[self._said_before :].decode(errors="replace")[-2000:]

    def step(self) -> int:
        """The last reported step."""
        return len(self.run.reports())

    def resume(self) -> None:
        """Start the launcher again with --resume, as a user would."""
        if any((self.folder / "runs").glob("*/run.yaml")):
            self._launch("--resume", self.run.directory.name)
        else:
            self._launch("-f", "run.yaml")

    def clear(self) -> None:
        """Stop all processes, and unmount the file system; the run's folder is kept."""
        self.run.stop()
        if self.redis is not None:
            self.redis.kill()
        if self.has_namespace:
            shutil.copytree(self.folder / "runs", self.folder / "kept")
            network.unmount(str(self.folder / "runs"))

    def strike(self, fault: Fault) -> str:
        """Inject the fault. Returns in words what happened. Raises NotThere."""
        does = {
            Kind.KILL: self._kill,
            Kind.FREEZE: self._freeze,
            Kind.CUT: self._cut,
            Kind.SLOW_STORE: self._slow_store,
            Kind.FULL_DISK: self._full_disk,
            Kind.POINT: self._point,
        }
        try:
            return does[fault.kind](fault)
        except psutil.NoSuchProcess as error:
            raise NotThere(str(error)) from error

    # -- the run's processes -------------------------------------------------------------------------------------

    def _launch(self, *arguments: str) -> None:
        self.launches += 1
        output = self.folder / "output.txt"
        self._said_before = output.stat().st_size if output.exists() else 0
        path = os.pathsep.join([str(POINTS_FOLDER), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"PYTHONPATH": path, "SPECRL_CHAOS": str(self.folder / "chaos")}
        self.run = start(self.folder, "run", *arguments, "--plain", environment=environment)

    def _process(self, target: str) -> psutil.Process:
        """Find the process of this name. Raises NotThere if there is none, as between a crash and the restart."""
        if target == "redis":
            assert self.redis is not None
            return psutil.Process(self.redis.pid)
        launcher = psutil.Process(self.run.process.pid)
        if target == "launcher":
            return launcher
        if target == "verifier":
            coordinator = self._process("coordinator")
            workers = [
                worker
                for server in coordinator.children()
                for worker in server.children()
                if "resource_tracker" not in " ".join(worker.cmdline())
            ]
            return _first(workers, target)
        if target.startswith("engine of "):
            return _first(self._process(target.removeprefix("engine of ")).children(), target)
        return _first([child for child in launcher.children() if _is(child, target)], target)

    def _kill(self, fault: Fault) -> str:
        self._process(fault.target).kill()
        if fault.target == "redis":
            assert self.redis is not None
            self.redis.kill()
            self.redis.start()
        if fault.target == "launcher":
            self.run.process.wait(60)
        return "done"

    def _freeze(self, fault: Fault) -> str:
        process = self._process(fault.target)
        process.suspend()
        try:
            time.sleep(fault.for_s)
        finally:
            with suppress(psutil.NoSuchProcess):
                process.resume()
        return "done"

    def _cut(self, fault: Fault) -> str:
        if fault.target == "everybody":
            with network.down():
                time.sleep(fault.for_s)
            return "done"
        sockets = self._process(fault.target).net_connections("tcp")
        ports = {socket.laddr.port for socket in sockets if socket.laddr}
        with network.cut(ports):
            time.sleep(fault.for_s)
        return f"{len(ports)} ports"

    # -- the store and the disk ----------------------------------------------------------------------------------

    def _slow_store(self, fault: Fault) -> str:
        """Block the store repeatedly (Redis paused or SQLite locked), with gaps in which a write may succeed."""
        until = time.monotonic() + fault.for_s
        while time.monotonic() < until:
            if self.redis is not None:
                with self.redis.client() as admin:
                    admin.client_pause(700)
                time.sleep(0.8)
            else:
                with closing(sqlite3.connect(self._store_file(), isolation_level=None, timeout=30)) as other:
                    other.execute("begin immediate")
                    time.sleep(0.7)
                    other.execute("rollback")
                time.sleep(0.1)
        return "done"

    def _store_file(self) -> Path:
        found = [*self.run.runs.glob("*/store.db")]
        if not found or not found[0].stat().st_size:
            raise NotThere("no store yet")
        return found[0]

    def _full_disk(self, fault: Fault) -> str:
        filler = self.run.runs / ".filler"
        chunk = bytes(2**20)
        size = 0
        with filler.open("wb", buffering=0) as file, suppress(OSError):
            while True:
                size += file.write(chunk)
        time.sleep(fault.for_s)
        filler.unlink()
        return f"{size / 2**20:.0f} MiB"

    # -- named points --------------------------------------------------------------------------------------------

    def _point(self, fault: Fault) -> str:
        armed, struck = (self.folder / "chaos" / name / fault.target for name in ("armed", "struck"))
        struck.unlink(missing_ok=True)
        part = armed.with_name(f".{armed.name}")
        part.write_text(json.dumps({"signal": int(fault.signal), "calls": fault.calls}))
        part.rename(armed)
        deadline = time.monotonic() + REACH_S
        while not struck.exists() and time.monotonic() < deadline and self.run.process.poll() is None:
            time.sleep(0.02)
        armed.unlink(missing_ok=True)
        if not struck.exists():
            raise NotThere("not passed")
        process = int(struck.read_text())
        if fault.signal is signal.SIGSTOP:
            time.sleep(fault.for_s)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)
        return f"process {process}"


def _is(process: psutil.Process, target: str) -> bool:
    """Whether a child of the launcher is the process of this name; of a trainer, also the rank."""
    words = process.cmdline()
    if target.startswith("trainer-"):
        return any("specrl-trainer" in word for word in words) and process.environ().get("RANK") == target[-1]
    if target == "coordinator":
        return any(word.endswith("specrl-coordinator") for word in words)
    return target in words


def _first(processes: list[psutil.Process], target: str) -> psutil.Process:
    if not processes:
        raise NotThere(f"no {target} at this moment")
    return processes[0]
