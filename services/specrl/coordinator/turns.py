"""Rollouts of several turns: the policy samples, calls a tool, reads its output and goes on, until it is done.

Stands between the stages and a replica: what `generate` yields is whole, so that nothing behind it knows of turns. One
Generate request a turn, all of a rollout's at one replica: there the prefix cache holds the turn before, if it is of
the same policy version. The rollout keeps its seat meanwhile.

    request --> turn --ended--> Ended(rollout)
                 |  ^
            call |  | output    a call is answered by `ToolPool`, in processes of its own
                 v  |
                tool --failed-> Ended(rollout so far, failure)         ungraded, and sampled again

The lag bound. A turn is asked for under the version that the replica served when the rollout was given to it, and a
replica's version never falls: so no token of any turn is older, however long tools take, and what the scheduler
promised holds.

Waits: for a turn, until the replica's stream ends or breaks; for a tool, as `rewards.workers` bounds it. Closing the
generator, as a stage does when the replica is gone, cancels both; the rollout then begins again, at its first turn.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Protocol

from specrl.records import Prompt, Rollout, RolloutRequest
from specrl.spec import RunSpec
from specrl.telemetry import metrics
from specrl.tools import Delimiters, Ending, Episode, Output


class Answerer(Protocol):
    """What turns need of `specrl.tools`."""

    async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
        """The output of one call, or why there is none. Raises ToolFailed when none can be answered any more."""


Ask = Callable[[Sequence[RolloutRequest], bool], AsyncGenerator[Rollout]]
"""`GenerationClient.generate` of one replica: requests, and whether to admit them together; yields completions."""


@dataclass(frozen=True)
class Turns:
    """What a run's rollouts may call, and how their calls are told from other text."""

    run: str
    delimiters: Delimiters
    tool: Answerer
    max_turns: int


def turns_of(spec: RunSpec, tool: Answerer | None) -> Turns | None:
    """A run's turns; None where a rollout has one. Raises SpecInvalid when the policy cannot say how it calls."""
    if spec.tools is None or tool is None:
        return None
    return Turns(spec.name, Delimiters(spec.tools, spec.model.path), tool, spec.tools.max_turns)


@dataclass(frozen=True)
class Ended:
    """A whole rollout; or, with a `failure`, what was sampled before a tool failed, which must not be graded."""

    rollout: Rollout
    failure: str = ""


async def generate(
    turns: Turns | None, ask: Ask, requests: Sequence[tuple[RolloutRequest, Prompt]], admit_together: bool
) -> AsyncGenerator[Ended]:
    """Yield each rollout when its last turn is over. Raises what `ask` raises.

    turns: None where a rollout has one turn. admit_together: of first turns; later ones start when their tools answer.
    """
    if turns is None:
        async with aclosing(ask([item for item, _ in requests], admit_together)) as stream:
            async for rollout in stream:
                yield Ended(rollout)
        return
    talk = _Talk(turns, ask)
    talk.start(requests, admit_together)
    try:
        while (ended := await talk.next()) is not None:
            yield ended
    finally:
        await talk.close()


class _Talk:
    """The rollouts of one call of `generate`. A task for every stream, and one for every call of a tool."""

    def __init__(self, turns: Turns, ask: Ask) -> None:
        self._turns, self._ask = turns, ask
        self._tasks: set[asyncio.Task[None]] = set()
        self._arrived: asyncio.Queue[Ended | BaseException | None] = asyncio.Queue()

    def start(self, requests: Sequence[tuple[RolloutRequest, Prompt]], admit_together: bool) -> None:
        """Ask for the first turns."""
        episodes = [
            (Episode(request, self._turns.delimiters, self._turns.max_turns), prompt) for request, prompt in requests
        ]
        self._spawn(self._sample(episodes, admit_together))

    async def next(self) -> Ended | None:
        """What ends next; None when nothing is under way any more. Raises what broke a task."""
        while self._tasks or not self._arrived.empty():
            item = await self._arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is not None:
                return item
        return None

    async def close(self) -> None:
        """Abort whatever is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, episodes: Sequence[tuple[Episode, Prompt]], admit_together: bool) -> None:
        """One Generate call: the next turn of each episode."""
        requests = [episode.request for episode, _ in episodes]
        waiting = {request.rollout_id: pair for request, pair in zip(requests, episodes, strict=True)}
        async with aclosing(self._ask(requests, admit_together)) as stream:
            async for turn in stream:
                episode, prompt = waiting.pop(turn.rollout_id)
                if episode.sampled(turn) is Ending.GOES_ON:
                    self._spawn(self._answer(episode, prompt))
                else:
                    self._arrived.put_nowait(Ended(episode.rollout()))

    async def _answer(self, episode: Episode, prompt: Prompt) -> None:
        """Have a call answered, and go on with the next turn."""
        call = episode.call
        if call is None:  # the policy's mistake, which it reads
            output, outcome = Output(f"Error: a call must begin with {self._turns.delimiters.start}"), "malformed"
        else:
            output = await self._turns.tool.answer(prompt, episode.completion, call)
            outcome = "failed" if output.failure else "answered"
        metrics.TOOL_CALLS.labels(self._turns.run, outcome).inc()
        if output.failure:
            self._arrived.put_nowait(Ended(episode.rollout(), f"tool: {output.failure}"))
        elif episode.answered(output.text) is Ending.GOES_ON:
            await self._sample([(episode, prompt)], admit_together=False)
        else:
            self._arrived.put_nowait(Ended(episode.rollout()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        """Wake `next`, which raises what broke the task, or sees that nothing is under way any more."""
        self._tasks.discard(task)
        if not task.cancelled():
            self._arrived.put_nowait(task.exception())
