"""Merges the output of many tasks into one asynchronous iterator.

    spawn_task(work) --> task --put(item)--> iterate_items()

Tasks may be added at any time, also by tasks. The iterator ends when no task is left, and raises the first error of a
task. Closing it cancels all tasks. The replica's servicer and the coordinator's sessions with replicas use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _TaskEnded:
    """Queued behind the task's items, so that they are yielded before its error is raised."""

    error: BaseException | None


class TaskStream[T]:
    """Tasks and a queue of their items. Can be iterated once."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived: asyncio.Queue[T | _TaskEnded] = asyncio.Queue()

    def put(self, item: T) -> None:
        """Queue an item for the iterator."""
        self._arrived.put_nowait(item)

    def spawn_task(self, work: Coroutine[Any, Any, None]) -> None:
        """Run `work`, which may `put` items. An error that it raises ends the iterator."""
        # The set keeps a reference: the event loop itself keeps only a weak one.
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._on_task_end)

    def add_source(self, source: AsyncGenerator[T]) -> None:
        """Yield the items of `source`, too."""
        self.spawn_task(self._forward_items(source))

    async def iterate_items(self) -> AsyncGenerator[T]:
        """Yield items in the order of arrival. Ends at once if there is no task yet.

        Each item and each end of a task wakes it; nothing else bounds the wait.
        """
        try:
            # A task leaves `_tasks` only as its end is queued, so no item is lost between both conditions.
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

    async def _forward_items(self, source: AsyncGenerator[T]) -> None:
        async with aclosing(source) as items:
            async for item in items:
                self.put(item)

    def _on_task_end(self, task: asyncio.Task[None]) -> None:
        """Wake the iterator, which raises the task's error, or ends if this was the last task."""
        # An exception that nobody retrieves would be logged by asyncio; `exception()` retrieves it.
        self._tasks.discard(task)
        self._arrived.put_nowait(_TaskEnded(asyncio.CancelledError() if task.cancelled() else task.exception()))
