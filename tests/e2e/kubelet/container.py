"""One container as a process with its own mounts, process ids and host name, in its pod's network."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.e2e.kubelet.volumes import Bind

import specrl.launcher.leash


@dataclass(frozen=True)
class Plan:
    """Everything `enter.py` needs. `scratch` is a folder of this container's own."""

    command: list[str]
    environment: dict[str, str]
    working_directory: str
    hostname: str
    binds: list[Bind]
    read_only_root: bool
    network: str
    scratch: str


class Running:
    """A container that was started. Its program is process 1 in there, with all that means for signals."""

    def __init__(self, process: asyncio.subprocess.Process, plan: Plan) -> None:
        self._process, self._plan = process, plan

    @classmethod
    async def start(cls, plan: Plan, log: Path) -> Running:
        """Start it; output is appended to `log`. When the kubelet dies, the kernel kills it with all it started."""
        scratch = Path(plan.scratch)
        (scratch / "machine").mkdir(parents=True, exist_ok=True)
        file = scratch / "plan.json"
        file.write_text(json.dumps(asdict(plan) | {"scratch": str(scratch / "machine")}))
        leash = [sys.executable, specrl.launcher.leash.__file__, str(os.getpid())]
        enter = [sys.executable, str(Path(__file__).with_name("enter.py")), str(file)]
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *leash, *enter, stdin=asyncio.subprocess.DEVNULL, stdout=output, stderr=output
            )
        return cls(process, plan)

    async def wait(self) -> int:
        """Its exit code: 128 + the signal's number if one killed it."""
        code = await self._process.wait()
        shutil.rmtree(self._plan.scratch, ignore_errors=True)
        return code if code >= 0 else 128 - code

    def terminate(self) -> None:
        """SIGTERM to its program."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL to its program, and so to everything in it."""
        if not self._signal(signal.SIGKILL) and self._process.returncode is None:
            self._process.kill()

    async def execute(self, command: list[str], timeout_s: float) -> int:
        """Run a command in there, as `kubectl exec`; its exit code, or 124 when it took too long."""
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
        """Process 1 of the container: the only child of `enter.py`."""
        own = self._process.pid
        try:
            children = Path(f"/proc/{own}/task/{own}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None
