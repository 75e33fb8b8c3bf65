"""What tasks bring in, as one asynchronous iterator.

    spawn(work) --> task --put(item)--> items()          more may be spawned at any time, by the tasks themselves, too

It ends when no task is left, and raises what the first of them raised; whoever stops iterating cancels all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _TaskEnded:
    error: BaseException | None


class Inflow[T]:
    """Tasks, and what they have put there. Iterated over once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived: asyncio.Queue[T | _TaskEnded] = asyncio.Queue()

    def put(self, item: T) -> None:
        """Yield this next, after what came before."""
        self._arrived.put_nowait(item)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which may `put`; what it raises ends the iterator."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def add(self, source: AsyncGenerator[T]) -> None:
        """Yield what `source` yields."""
        self.spawn(self._forward(source))

    async def items(self) -> AsyncGenerator[T]:
        """What comes, in the order in which it comes. Needs at least one task at its start."""
        try:
            while self._tasks or not self._arrived.empty():
                item = await self._arrived.get()
                if not isinstance(item, _TaskEnded):
                    yield item
                elif item.error is not None:
                    raise item.error
        finally:
            tasks = list(self._tasks)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forward(self, source: AsyncGenerator[T]) -> None:
        async with aclosing(source) as items:
            async for item in items:
                self.put(item)

    def _ended(self, task: asyncio.Task[None]) -> None:
        """Wake `items`, which raises what broke the task, or sees that none is left."""
        self._tasks.discard(task)
        self._arrived.put_nowait(_TaskEnded(asyncio.CancelledError() if task.cancelled() else task.exception()))
