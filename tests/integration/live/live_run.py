"""A small run with its HTTP server in a separate thread, for tests that use it as a browser or a program does.

Loop, store, gRPC, broadcast and uvicorn are real; engine and trainer are stand-ins (coordinator/small_run.py).
`restart_coordinator` kills the coordinator and starts another one at the same address.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import structlog
from tests.integration.coordinator.small_run import VOCAB, Run
from tests.integration.live.served import PATIENCE_S, Served
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.observe.web.app import make_app
from specrl.coordinator.requests.admission import OpenAdmission, TokenAdmission
from specrl.coordinator.requests.doors import Doors
from specrl.spec import RunSpec
from specrl.telemetry import logs
from specrl.telemetry.hosts import list_local_hosts


class LiveRun(Served):
    """Use as `with LiveRun(folder, spec) as run`. token_seconds: pace of the engines."""

    def __init__(self, folder: Path, spec: RunSpec, token_seconds: float = 0.002) -> None:
        super().__init__()
        self.folder = folder
        self.spec = spec
        self._pace_s = token_seconds

    @property
    def acting(self) -> dict[str, str]:
        """Headers of those who may act."""
        return {"Authorization": f"Bearer {(self.folder / 'token').read_text()}"}

    def restart_coordinator(self) -> None:
        """Kill it, and start it again."""
        self.do(self.kill_coordinator())
        self.do(self.start_coordinator())

    def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        deadline = time.monotonic() + PATIENCE_S
        while not is_so():
            assert time.monotonic() < deadline, self.client.get("/status").text
            time.sleep(0.02)

    def trained(self) -> int:
        """Last step trained."""
        return int(self.client.get("/status").json()["step"])

    async def begin(self) -> None:
        """The whole run."""
        self.run = Run(
            self.folder,
            self.spec,
            make_engine=lambda name: TableEngine(name, seed=7, shape=TableShape(VOCAB, 128, self._pace_s)),
        )
        logs.configure_logging("info", "coordinator", self.spec.name, self._note)
        # The run logs between tests, too, when pytest captures nothing.
        self._log = (self.folder / "coordinator.log").open("a", encoding="utf-8")
        structlog.configure(logger_factory=structlog.WriteLoggerFactory(self._log))
        await self.run.__aenter__()
        self.serve(self._app())

    async def end(self) -> None:
        """All of it."""
        await self.unserve()
        await self.run.__aexit__()
        logs.configure_logging("info", "coordinator", self.spec.name)
        self._log.close()

    async def kill_coordinator(self) -> None:
        """It is gone, without a goodbye; nobody answers at its address."""
        await self.unserve()
        await self.run.kill_coordinator()

    async def start_coordinator(self) -> None:
        """Another one, on the same store, at the same address."""
        await self.run.start_coordinator()
        self.serve(self._app())

    async def admit(self, *, everybody: bool) -> None:
        """From now on everybody reads at its address, or whoever shows the token."""
        await self.unserve()
        self.serve(self._app(everybody=everybody))

    def _app(self, *, everybody: bool = True) -> Any:
        owner = TokenAdmission(self.folder)
        readers = OpenAdmission() if everybody else owner
        doors = Doors(readers, owner, owner, list_local_hosts("127.0.0.1"))
        return make_app(self.run.context, self.run.observer, doors)

    def _note(self, level: str, name: str, facts: Mapping[str, Any]) -> None:
        self.run.observer.events.add_event(level, name, facts)
