"""Lifetime of a serving process: it ends on a signal, or when one of its tasks ends.

The main functions of the trainer and of a replica call it, and `membership.py`.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any


async def run_until_first_ends(*coroutines: Coroutine[Any, Any, object]) -> None:
    """Run all coroutines until one ends, cancel the others, and raise its error.

    If several have ended, the last argument wins. So pass `wait_for_signal` last: Ctrl-C reaches the child processes,
    too, and their deaths then do not count as a failure.
    """
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        next(task for task in reversed(tasks) if task in done).result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)  # so that their cleanup is done when this returns


def wait_for_signal(*signals: signal.Signals) -> Coroutine[Any, Any, None]:
    """Take `signals` over, and return a coroutine that ends when one arrives; without arguments, SIGTERM or SIGINT.

    They are taken over by the call itself. So a process that calls it before it says that it serves is not ended by
    Python's own handlers in between. The coroutine gives them back at its end.
    """
    # The loop's handlers replace Python's own, which would raise KeyboardInterrupt anywhere.
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    taken = signals or (signal.SIGTERM, signal.SIGINT)
    for number in taken:
        loop.add_signal_handler(number, told.set)

    async def wait() -> None:
        try:
            await told.wait()
        finally:
            for number in taken:
                loop.remove_signal_handler(number)

    return wait()
