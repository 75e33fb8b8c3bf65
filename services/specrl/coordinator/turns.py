"""Rollouts of several turns: the policy samples, calls a tool, reads its output and goes on, until it is done.

Stands between the stages and a replica: what a `Talk` yields is whole, so that nothing behind it knows of turns. One
request a turn, all of a rollout's at one replica: there the prefix cache holds the turn before, if it is of the same
policy version. The rollout keeps its seat meanwhile.

    request --> turn --ended--> Ended(rollout)
                 |  ^
            call |  | output    a call is answered by `ToolPool`, in processes of its own
                 v  |
                tool --failed-> Ended(rollout so far, failure)         ungraded, and sampled again

The lag bound. A turn is asked for under the version that the replica served when the rollout was given to it, and a
replica's version never falls: so no token of any turn is older, however long tools take, and what the scheduler
promised holds.

Waits: for a turn, until the replica's call ends or breaks; for a tool, as `rewards.workers` bounds it. Closing the
iterator, as a stage does when the replica is gone, cancels both; the rollout then begins again, at its first turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from specrl.records import Prompt, Rollout, RolloutRequest
from specrl.rpc.clients import Terms
from specrl.rpc.inflow import Inflow
from specrl.spec import RunSpec
from specrl.telemetry import metrics
from specrl.tools import Delimiters, Ending, Episode, Output


class Answerer(Protocol):
    """What turns need of `specrl.tools`."""

    async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
        """The output of one call, or why there is none. Raises ToolFailed when none can be answered any more."""


class Call(Protocol):
    """`GenerationCall` of one replica, or an engine without a wire."""

    def ask(self, requests: Sequence[RolloutRequest], terms: Terms) -> None:
        """Send for completions."""

    def end(self) -> None:
        """Nothing more is asked for."""

    def rollouts(self) -> AsyncGenerator[Rollout]:
        """Completions as they finish."""


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


@dataclass(frozen=True)
class _Conversation:
    """A rollout of several turns, and what its turns are asked for with."""

    episode: Episode
    prompt: Prompt
    terms: Terms


class Talk:
    """All that one replica is asked for over one call: `begin` at any time, take rollouts as they end.

    With tools: a task that waits for turns, and one for every call of a tool.
    """

    def __init__(self, turns: Turns | None, call: Call) -> None:
        """turns: None where a rollout has one turn."""
        self._turns, self._call = turns, call
        self._sampling: dict[str, _Conversation] = {}  # by the name of the turn
        self._open, self._is_ending = 0, False
        self._ended: Inflow[Ended] = Inflow()

    def begin(self, requests: Sequence[tuple[RolloutRequest, Prompt]], terms: Terms) -> None:
        """Ask for rollouts. `terms.admit_together` is of first turns; later ones start when their tools answer."""
        if self._turns is None:
            self._call.ask([request for request, _ in requests], terms)
            return
        delimiters, most = self._turns.delimiters, self._turns.max_turns
        self._open += len(requests)
        self._ask([_Conversation(Episode(item, delimiters, most), prompt, terms) for item, prompt in requests], terms)

    def end(self) -> None:
        """Nothing more is begun: the last rollout ends the call."""
        self._is_ending = True
        if not self._open:
            self._call.end()

    async def rollouts(self) -> AsyncGenerator[Ended]:
        """Yield each rollout when its last turn is over, until the call ends. Raises what breaks it, or a tool."""
        if self._turns is None:
            async with aclosing(self._call.rollouts()) as sampled:
                async for rollout in sampled:
                    yield Ended(rollout)
            return
        self._ended.spawn(self._take(self._turns))
        async with aclosing(self._ended.items()) as rollouts:
            async for ended in rollouts:
                yield ended

    def _ask(self, conversations: Sequence[_Conversation], terms: Terms) -> None:
        """For the next turn of each."""
        requests = [conversation.episode.request for conversation in conversations]
        self._sampling |= {
            request.rollout_id: conversation for request, conversation in zip(requests, conversations, strict=True)
        }
        self._call.ask(requests, terms)

    async def _take(self, turns: Turns) -> None:
        """What the replica has sampled, turn by turn."""
        async with aclosing(self._call.rollouts()) as sampled:
            async for turn in sampled:
                conversation = self._sampling.pop(turn.rollout_id)
                if conversation.episode.sampled(turn) is Ending.GOES_ON:
                    self._ended.spawn(self._answer(turns, conversation))
                else:
                    self._over(Ended(conversation.episode.rollout()))

    async def _answer(self, turns: Turns, conversation: _Conversation) -> None:
        """Have a call of the tool answered, and go on with the next turn."""
        episode = conversation.episode
        call = episode.call
        if call is None:  # the policy's mistake, which it reads
            output, outcome = Output(f"Error: a call must begin with {turns.delimiters.start}"), "malformed"
        else:
            output = await turns.tool.answer(conversation.prompt, episode.completion, call)
            outcome = "failed" if output.failure else "answered"
        metrics.TOOL_CALLS.labels(turns.run, outcome).inc()
        if output.failure:
            self._over(Ended(episode.rollout(), f"tool: {output.failure}"))
        elif episode.answered(output.text) is Ending.GOES_ON:
            self._ask([conversation], replace(conversation.terms, admit_together=False))
        else:
            self._over(Ended(episode.rollout()))

    def _over(self, ended: Ended) -> None:
        self._ended.put(ended)
        self._open -= 1
        if self._is_ending and not self._open:
            self._call.end()
