"""Run a container as a process with its own mounts, process ids and host name, in its pod's network."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.kubelet.volumes import VolumeBind

from specrl.launcher.processes.child_guard import guarded_command


@dataclass(frozen=True)
class Plan:
    """The input of `enter.py`. `scratch` is a folder for this container only."""

    command: list[str]
    environment: dict[str, str]
    working_directory: str
    hostname: str
    binds: list[VolumeBind]
    read_only_root: bool
    network: str
    scratch: str


class Running:
    """A started container. Its program is process 1, so it ignores signals that it does not handle."""

    def __init__(self, process: asyncio.subprocess.Process, plan: Plan) -> None:
        self._process = process
        self._plan = plan

    @classmethod
    async def start(cls, plan: Plan, log: Path) -> Running:
        """Start the container, and append its output to `log`. The kernel kills it when the kubelet dies."""
        scratch = Path(plan.scratch)
        (scratch / "machine").mkdir(parents=True, exist_ok=True)
        file = scratch / "plan.json"
        file.write_text(json.dumps(asdict(plan) | {"scratch": str(scratch / "machine")}))
        enter = [sys.executable, str(Path(__file__).with_name("enter.py")), str(file)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *guarded_command(enter), stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        return cls(process, plan)

    async def wait(self) -> int:
        """Wait for the exit code: 128 + the signal's number if a signal killed it."""
        code = await self._process.wait()
        shutil.rmtree(self._plan.scratch, ignore_errors=True)
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """Send SIGTERM to its program."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL to its program, which ends all processes of the container."""
        if not self._signal(signal.SIGKILL) and self._process.returncode is None:
            self._process.kill()

    async def execute(self, command: list[str], timeout_s: float) -> int:
        """Run a command inside, as `kubectl exec` does. Returns its exit code, or 124 after a timeout."""
        pid = self._program()
        if pid is None:
            return 1
        process = await asyncio.create_subprocess_exec(
            *("nsenter", "--target", str(pid), "--mount", "--pid", "--uts", "--net", "--root", "--wd", "--", *command),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
            env=self._plan.environment,
        )
        try:
            async with asyncio.timeout(timeout_s):
                return await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
            return 124

    def _signal(self, signum: signal.Signals) -> bool:
        pid = self._program()
        if pid is not None:
            try:
                os.kill(pid, signum)
            except ProcessLookupError:
                return False
        return pid is not None

    def _program(self) -> int | None:
        """Find process 1 of the container: the only child of `enter.py`."""
        own = self._process.pid
        try:
            children = Path(f"/proc/{own}/task/{own}/children").read_text(encoding="utf-8").split()
        except OSError:
            return None
        return int(children[0]) if children else None
