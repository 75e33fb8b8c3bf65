"""Verdicts on many lines at once, shown in the order of the lines, by the pool that a run uses.

    a thread reads lines -> one task for each asks the pool -> verdicts are shown in the order of the lines

Who waits for whom: the reading thread for room, `AHEAD` lines at most being between reading and showing; a task for
one of the pool's workers, whose answers are bounded (rewards/workers.py). Reading has a thread because stdin may have
nothing to read for as long as it likes.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar

from specrl.cli.rewards.completions import Line
from specrl.records import Reward
from specrl.rewards import Verifier, VerifierPool
from specrl.rewards.references import Reference, ReferencePool
from specrl.spec.data import RewardPool

AHEAD = 128
"""Lines that are read and not yet shown: one slow verdict holds up the output, and not the other workers. Bounded since
each may be as long as `prompts.sources.LINE_BYTES`."""
_REMEMBERED = 64
"""References that are known to be sound, or not. The rollouts of a group share theirs, and follow one another."""


@dataclass(frozen=True)
class Graded:
    """A line and its verdict; without one, the reward's failure says why. seconds: 0 where no verdict was asked for."""

    line: Line
    reward: Reward
    seconds: float = 0.0

    @property
    def reason(self) -> str:
        """Why the reward is what it is, or why there is none. A line that is at fault is named by its place."""
        if self.line.fault:
            return f"{self.line.place}: {self.line.fault}"
        return self.reward.failure if self.reward.value is None else self.reward.reason


class _Pool(ReferencePool):
    """The pool that a run uses, which checks references, too, as a run does before it starts."""

    start_method: ClassVar[str] = VerifierPool.start_method


async def grade_lines(
    lines: Iterable[Line], verifier: Verifier, limits: RewardPool, show: Callable[[Graded], None]
) -> None:
    """Grade every line and show each verdict once those before it are shown.

    What ends it early ends it after the verdicts that there are: what `lines` raises; VerifierFailed when the pool can
    answer nothing any more. Raises SpecInvalid when the verifier cannot work on this machine.
    """
    pool = _Pool(verifier, limits)
    grader = _Grader(pool, limits.workers)
    room, in_order = threading.Semaphore(AHEAD), asyncio.Queue[asyncio.Task[Graded | None]]()
    loop = asyncio.get_running_loop()
    tasks: set[asyncio.Task[Graded | None]] = set()

    def begin[T](work: Callable[[T], Coroutine[Any, Any, Graded | None]], about: T) -> None:
        task = loop.create_task(work(about))
        tasks.add(task)
        in_order.put_nowait(task)

    try:
        await pool.start()
        threading.Thread(target=_read, args=(lines, room, loop, begin, grader), daemon=True).start()
        while True:
            task = await in_order.get()
            graded = await task
            tasks.discard(task)
            if graded is None:
                return
            show(graded)
            room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()


def _read(
    lines: Iterable[Line],
    room: threading.Semaphore,
    loop: asyncio.AbstractEventLoop,
    begin: Callable[..., None],
    grader: _Grader,
) -> None:
    """In the thread: a task for every line, then one that ends the showing."""
    problem: Exception | None = None
    with suppress(RuntimeError):  # the loop is closed: nobody shows anything any more
        try:
            for line in lines:
                room.acquire()
                loop.call_soon_threadsafe(begin, grader.graded, line)
        except Exception as error:  # noqa: BLE001 - the edge of a thread: raised again where verdicts are shown
            problem = error
        loop.call_soon_threadsafe(begin, _end, problem)


async def _end(problem: Exception | None) -> None:
    if problem is not None:
        raise problem


class _Grader:
    """Asks the pool, one question for each worker at a time, so that the time of a verdict is its own."""

    def __init__(self, pool: _Pool, workers: int) -> None:
        self._pool = pool
        self._free = asyncio.Semaphore(workers)
        self._refusals: dict[str, str] = {}

    async def graded(self, line: Line) -> Graded:
        if line.fault:
            return Graded(line, Reward(None, line.fault))
        async with self._free:
            refusal = await self._refusal(line.prompt.answer)
            if refusal:
                return Graded(line, Reward(None, refusal))
            began = time.monotonic()
            reward = await self._pool.grade(line.prompt, line.completion)
            return Graded(line, reward, time.monotonic() - began)

    async def _refusal(self, reference: str) -> str:
        """Why a run would refuse this reference; nothing when it would not."""
        if reference not in self._refusals:
            if len(self._refusals) >= _REMEMBERED:
                del self._refusals[next(iter(self._refusals))]
            self._refusals[reference] = (await self._pool.check_one(Reference(reference, None))).refusal
        return self._refusals[reference]
