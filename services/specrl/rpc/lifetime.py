"""How long a serving process lives: until it is told to stop, or until one of the things it does ends."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def first_to_end(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run all until one ends; cancel the others; raise what it raised. Of several, the last given counts.

    With `told_to_stop` given last, an interrupt that reaches the process's children too is an interrupt, not the
    failure that their deaths look like.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in reversed(tasks) if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def told_to_stop(*signals: signal.Signals) -> None:
    """Return when the process receives one of `signals`; SIGTERM or SIGINT unless told otherwise."""
    told, loop = asyncio.Event(), asyncio.get_running_loop()
    signals = signals or (signal.SIGTERM, signal.SIGINT)
    for number in signals:
        loop.add_signal_handler(number, told.set)
    try:
        await told.wait()
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
