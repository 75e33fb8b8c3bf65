"""Grades many lines at once with the pool that a run uses, and shows the verdicts in the order of the lines.

    a thread reads lines -> one task per line asks the pool -> verdicts are shown in order

Waiting: the reading thread waits for room, since at most `MAX_LINES_AHEAD` lines are between reading and showing. A
task waits for one of the pool's workers, whose answers are bounded in time (rewards/workers.py). Reading has a thread
because stdin may block for any length of time. Called by `cli.rewards.command`.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

from specrl.cli.rewards.completions import CompletionLine
from specrl.records import Prompt, Reward
from specrl.rewards.checks.references import CheckedReference, ReferencePool
from specrl.rewards.pool import VerifierPool
from specrl.rewards.verifier_set import VerifierSet, WeightedVerifier
from specrl.spec.data import RewardPool

# Lines that are read but not yet shown. A slow verdict delays the output, but must not idle the other workers.
# Bounded because each line may be as long as `prompts.sources.LINE_BYTES`.
MAX_LINES_AHEAD = 128

# References whose check is remembered. The rollouts of a group share a reference and follow one another.
_MAX_CACHED_REFERENCES = 64


@dataclass(frozen=True)
class GradedLine:
    """A line and its verdict, or the reason why there is none (`reward.failure`).

    seconds: how long the verdict took; 0 when the pool was not asked.
    """

    line: CompletionLine
    reward: Reward
    seconds: float = 0.0

    @property
    def reason_text(self) -> str:
        """Reason of the reward, or why there is no reward. A fault of the line itself begins with its place."""
        if self.line.fault:
            return f"{self.line.place}: {self.line.fault}"
        return self.reward.failure if self.reward.value is None else self.reward.reason


class _GradingPool(ReferencePool):
    """The pool that a run uses. It also checks each reference, as a run does before it starts."""

    start_method: ClassVar[str] = VerifierPool.start_method

    def __init__(self, verifiers: VerifierSet, limits: RewardPool) -> None:
        super().__init__(verifiers, limits)
        # One question per worker at a time, so that the measured seconds contain no waiting for a worker.
        self._free_workers = asyncio.Semaphore(limits.workers)
        self._refusals: dict[tuple[WeightedVerifier, str], str] = {}

    async def grade_line(self, line: CompletionLine) -> GradedLine:
        if line.fault:
            return GradedLine(line, Reward(None, line.fault))
        async with self._free_workers:
            if refusal := await self._find_refusal(line.prompt):
                return GradedLine(line, Reward(None, refusal))
            began = time.monotonic()
            reward = await self.grade(line.prompt, line.completion)
            return GradedLine(line, reward, time.monotonic() - began)

    async def _find_refusal(self, prompt: Prompt) -> str:
        """Return why a run would refuse this prompt's record or reference; empty when it would accept both."""
        if fault := self.verifiers.find_fault(prompt.source, prompt.row):
            return fault
        for term in self.verifiers.select_terms(prompt.source, prompt.row):
            key = (term, prompt.answer)
            if key not in self._refusals:
                if len(self._refusals) >= _MAX_CACHED_REFERENCES:
                    del self._refusals[next(iter(self._refusals))]  # the oldest, since dicts keep their order
                found = await self.check_one(CheckedReference(prompt.answer, None), term.verifier)
                self._refusals[key] = found.refusal
            if self._refusals[key]:
                return self._refusals[key]
        return ""


async def grade_lines(
    lines: Iterable[CompletionLine], verifiers: VerifierSet, limits: RewardPool, show: Callable[[GradedLine], None]
) -> None:
    """Grade every line, and show each verdict once those before it are shown.

    Errors end it after the verdicts that are already there. Raises what `lines` raises, VerifierFailed when the pool
    can answer nothing any more, and SpecInvalid when the verifier cannot work on this machine.
    """
    pool = _GradingPool(verifiers, limits)
    room = threading.Semaphore(MAX_LINES_AHEAD)
    loop = asyncio.get_running_loop()
    in_order = asyncio.Queue[asyncio.Task[GradedLine] | Exception | None]()  # ends with None, or why reading failed
    tasks: set[asyncio.Task[GradedLine]] = set()  # not shown yet; cancelled if grading ends early

    def start_task(line: CompletionLine) -> None:
        task = loop.create_task(pool.grade_line(line))
        tasks.add(task)
        in_order.put_nowait(task)

    def read_lines() -> None:
        problem: Exception | None = None
        with suppress(RuntimeError):  # the event loop is closed because grading has ended
            try:
                for line in lines:
                    room.acquire()  # released when an earlier verdict is shown
                    loop.call_soon_threadsafe(start_task, line)
            except Exception as error:  # noqa: BLE001 - the edge of a thread; the loop below raises it
                problem = error
            loop.call_soon_threadsafe(in_order.put_nowait, problem)

    try:
        await pool.start()
        # A daemon, since it may be blocked in a read of stdin when the command ends.
        threading.Thread(target=read_lines, daemon=True).start()
        # Woken by the reading thread, which always puts an item that ends the loop.
        while (item := await in_order.get()) is not None:
            if isinstance(item, Exception):
                raise item
            graded = await item
            tasks.discard(item)
            show(graded)
            room.release()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await pool.close()
