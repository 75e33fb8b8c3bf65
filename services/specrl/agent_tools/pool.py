"""Answer tool calls in worker processes that may hang or crash. The coordinator awaits `answer_call` for each call.

Invariant: a call cannot avoid its answer. Failures that a call may cause become output that the policy reads. A rollout
is sampled again only for failures that no call can cause. `rewards.workers` lists how processes end and what bounds
each wait.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.agent_tools.tool import Tool
from specrl.errors import ToolFailed
from specrl.records import Prompt
from specrl.rewards.workers import FailureKind, WorkerPool


@dataclass(frozen=True)
class ToolOutput:
    """A tool's output. failure: why there is none, for a reason that no call can cause; "" otherwise."""

    text: str
    failure: str = ""


class ToolPool(WorkerPool[Tool]):
    """Worker processes that run one tool."""

    noun = "tool"
    error = ToolFailed

    async def answer_call(self, prompt: Prompt, completion: str, call: str) -> ToolOutput:
        """Answer one call. completion: all text since the prompt, the call included.

        If the tool raises, times out, crashes or returns no text, the output says so, since the call may be the cause.
        It is counted as a failure nevertheless, since the tool may be at fault.

        Raises ToolFailed only if the pool is closed or cannot be restarted; no call can be answered then.
        """
        answer = await self._ask_worker(self._work.answer_call, prompt.answer, completion, call)
        if answer.failure_kind is FailureKind.CRASH:  # the worker may have been killed from outside: try a fresh one
            answer = await self._ask_worker(self._work.answer_call, prompt.answer, completion, call)
        if answer.failure_kind is FailureKind.UNGRADED:
            return ToolOutput("", answer.failure)
        if answer.failure:
            return ToolOutput(f"Error: {answer.failure}")
        assert isinstance(answer.value, str), "what every tool returns"
        return ToolOutput(answer.value)
