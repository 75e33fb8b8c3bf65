"""What people ask of a run while it goes on: pause, resume, a checkpoint now, another number of replicas.

    GOING <--resume / pause--> PAUSED     a fact of the store: durable before it is answered, so a restart keeps it

Paused, no new rollout and no training step begins; what is under way is finished and kept. The loop looks between two
steps (`Loop._do_as_asked`), and is woken by `asked`; the rollout stage looks before it gives out work. A checkpoint
that was asked for is written at the next such place; asked of a coordinator that dies before, it is forgotten.

How many replicas a local run has is a line of its run file: the coordinator rewrites it, says so in the status, and the
launcher follows. In a cluster the RLJob's scale subresource says it, and nobody asks here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import structlog

from specrl.coordinator.board import PAUSED, Board
from specrl.coordinator.store_link import StoreLink
from specrl.files import write_text
from specrl.spec import RunSpec, dump

log = structlog.get_logger(__name__)


class Controls:
    """What is asked of one run, until it is done.

    asked: set while the loop has something of it to do. spec: with the present number of replicas.
    """

    def __init__(self, spec: RunSpec, directory: Path, store: StoreLink, board: Board) -> None:
        self.spec, self._run_file = spec, directory / "run.yaml"
        self._store, self._board = store, board
        self._wants_checkpoint = False
        self._moved = asyncio.Event()
        self._tell: Callable[[], None] = lambda: None
        self.asked = asyncio.Event()
        self._settle()

    @property
    def is_paused(self) -> bool:
        """Whether nothing new may begin."""
        return bool(self._store.fact(PAUSED))

    def watch(self, tell: Callable[[], None]) -> None:
        """Call `tell` whenever something is asked, done, or taken back; for whoever gives out work."""
        self._tell = tell

    async def pause(self) -> None:
        """Nothing new begins from now on. Idempotent."""
        await self._set_paused(True)

    async def resume(self) -> None:
        """Go on. Idempotent."""
        await self._set_paused(False)

    async def _set_paused(self, paused: bool) -> None:
        if paused != self.is_paused:
            await self._store.set_fact(PAUSED, paused)
            log.info("run_paused" if paused else "run_resumed", step=self._store.trained())
            self._settle()

    def checkpoint(self) -> None:
        """Have a checkpoint written at the next boundary between two steps. Asking twice before is asking once."""
        self._wants_checkpoint = True
        log.info("checkpoint_requested", step=self._store.trained())
        self._settle()

    def takes_checkpoint(self) -> bool:
        """Whether a checkpoint was asked for; whoever asks writes it."""
        wanted, self._wants_checkpoint = self._wants_checkpoint, False
        self._settle()
        return wanted

    def scale(self, replicas: int) -> None:
        """Have the launcher keep so many replicas. Durable, in the run file, when this returns. Raises OSError."""
        generation = self.spec.generation.model_copy(update={"replicas": replicas})
        spec = self.spec.model_copy(update={"generation": generation})
        write_text(self._run_file, dump(spec), is_synced=True)
        self.spec = spec
        log.info("run_scaled", replicas=replicas)
        self._board.scaled(replicas)

    async def moved(self) -> None:
        """Wait until something else is asked."""
        self._moved.clear()
        await self._moved.wait()

    def _settle(self) -> None:
        if self.is_paused or self._wants_checkpoint:
            self.asked.set()
        else:
            self.asked.clear()
        self._moved.set()
        self._tell()
