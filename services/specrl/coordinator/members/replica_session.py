"""Runs rollouts at one replica. In multi-turn rollouts the policy calls tools and continues with their output.

The rollout pipeline uses one `ReplicaSession` per replica. A session yields complete rollouts, so that no caller has
to know about turns. Each turn is a separate request to the same replica. If the policy version has not changed, the
replica's prefix cache still holds the previous turns. The rollout keeps its seat between turns.

    request --> turn --last one--> FinishedRollout(rollout)
                 |  ^
       tool call |  | output       answered by `ToolPool`, in separate processes
                 v  |
                tool --failed----> FinishedRollout(rollout so far, failure)     ungraded, and sampled again

Lag bound: all turns are requested with the policy version that the replica served when it was given the rollout. The
version of a replica never decreases, so no token of any turn is older, however long the tools take.

Waits: a turn ends with the replica's call at the latest, a tool after the time limit of the tool pool. Closing the
iterator cancels both, as the pipeline does when the replica is lost. The rollout then starts again at its first turn.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Protocol

from specrl.agent_tools import CallDelimiters, Episode, ToolOutput
from specrl.records import Prompt, Rollout, RolloutRequest
from specrl.rpc.clients import GenerateOptions
from specrl.rpc.task_stream import TaskStream
from specrl.spec import RunSpec
from specrl.telemetry import metrics


class ToolAnswerer(Protocol):
    """Answers tool calls. Implemented by `specrl.agent_tools.ToolPool`."""

    async def answer_call(self, prompt: Prompt, completion: str, call: str) -> ToolOutput:
        """Return the output of one tool call, or the reason of its failure.

        Raises ToolFailed when no call can be answered any more, which ends the run.
        """


class ReplicaCall(Protocol):
    """An open call to one replica: `GenerationCall` over gRPC, or an engine in the same process in benchmarks."""

    def request_rollouts(self, requests: Sequence[RolloutRequest], options: GenerateOptions) -> None:
        """Request completions."""

    def close_requests(self) -> None:
        """Announce that no more requests follow."""

    def receive_rollouts(self) -> AsyncGenerator[Rollout]:
        """Yield completions in the order in which they finish."""


@dataclass(frozen=True)
class TurnSettings:
    """Settings of multi-turn rollouts: the tool, the delimiters of its calls in the text, and the turn limit."""

    run: str
    delimiters: CallDelimiters
    tool: ToolAnswerer
    max_turns: int


def make_turn_settings(spec: RunSpec, tool: ToolAnswerer | None) -> TurnSettings | None:
    """Make the settings of a run with tools; None without tools.

    Raises CheckpointInvalid for the policy's tokenizer, and SpecInvalid when it cannot encode a delimiter.
    """
    if spec.tools is None or tool is None:
        return None
    return TurnSettings(spec.name, CallDelimiters(spec.tools, spec.model.path), tool, spec.tools.max_turns)


@dataclass(frozen=True)
class FinishedRollout:
    """A complete rollout. With a `failure`, it has the tokens up to a tool's failure, and must not be graded."""

    rollout: Rollout
    failure: str = ""


@dataclass(frozen=True)
class _Conversation:
    """A multi-turn rollout in progress, and the options of its requests."""

    episode: Episode
    prompt: Prompt
    options: GenerateOptions


class ReplicaSession:
    """Runs rollouts over one call to a replica. Rollouts may be requested at any time.

    With tools it runs one task that receives turns, and one per running tool call.
    """

    def __init__(self, turns: TurnSettings | None, call: ReplicaCall) -> None:
        """turns: None if rollouts have one turn."""
        self._turns = turns
        self._call = call
        self._sampling: dict[str, _Conversation] = {}  # by rollout id of the requested turn
        self._open = 0  # rollouts that have not ended
        self._is_ending = False
        self._ended: TaskStream[FinishedRollout] = TaskStream()

    def begin_rollouts(self, requests: Sequence[tuple[RolloutRequest, Prompt]], options: GenerateOptions) -> None:
        """Request rollouts. `options.admit_together` applies to first turns; later ones follow their tool's answer."""
        if self._turns is None:
            self._call.request_rollouts([request for request, _ in requests], options)
            return
        delimiters = self._turns.delimiters
        most = self._turns.max_turns
        self._open += len(requests)
        self._request_turns(
            [_Conversation(Episode(item, delimiters, most), prompt, options) for item, prompt in requests], options
        )

    def close_requests(self) -> None:
        """Announce that no more rollouts are requested. The call ends when the last rollout has ended."""
        self._is_ending = True
        if not self._open:
            self._call.close_requests()

    async def receive_finished(self) -> AsyncGenerator[FinishedRollout]:
        """Yield each rollout when it is complete, until the call ends. Raises the error of the call, or ToolFailed."""
        if self._turns is None:
            async with aclosing(self._call.receive_rollouts()) as sampled:
                async for rollout in sampled:
                    yield FinishedRollout(rollout)
            return
        self._ended.spawn_task(self._receive_turns(self._turns))
        async with aclosing(self._ended.iterate_items()) as rollouts:
            async for ended in rollouts:
                yield ended

    def _request_turns(self, conversations: Sequence[_Conversation], options: GenerateOptions) -> None:
        """Request the next turn of each rollout."""
        requests = [conversation.episode.next_request for conversation in conversations]
        self._sampling |= {
            request.rollout_id: conversation for request, conversation in zip(requests, conversations, strict=True)
        }
        self._call.request_rollouts(requests, options)

    async def _receive_turns(self, turns: TurnSettings) -> None:
        """Receive turns from the replica, and start a tool call where a turn ends with one."""
        async with aclosing(self._call.receive_rollouts()) as sampled:
            async for turn in sampled:
                conversation = self._sampling.pop(turn.rollout_id)
                if conversation.episode.add_turn(turn):
                    self._ended.spawn_task(self._answer_call(turns, conversation))
                else:
                    self._finish_rollout(FinishedRollout(conversation.episode.build_rollout()))

    async def _answer_call(self, turns: TurnSettings, conversation: _Conversation) -> None:
        """Have the tool answer a call, then request the next turn."""
        episode = conversation.episode
        call = episode.requested_call
        if call is None:  # malformed, which the policy learns from this output
            output = ToolOutput(f"Error: a call must begin with {turns.delimiters.call_start}")
            outcome = "malformed"
        else:
            output = await turns.tool.answer_call(conversation.prompt, episode.completion, call)
            outcome = "failed" if output.failure else "answered"
        metrics.TOOL_CALLS.labels(turns.run, outcome).inc()
        if output.failure:
            self._finish_rollout(FinishedRollout(episode.build_rollout(), f"tool: {output.failure}"))
        elif episode.add_output(output.text):
            # Admission together synchronises the rollouts of a step. Later turns come one by one.
            self._request_turns([conversation], replace(conversation.options, admit_together=False))
        else:
            self._finish_rollout(FinishedRollout(episode.build_rollout()))

    def _finish_rollout(self, ended: FinishedRollout) -> None:
        self._ended.put(ended)
        self._open -= 1
        if self._is_ending and not self._open:
            self._call.close_requests()
