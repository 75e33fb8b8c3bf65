"""Answers to calls from processes that may hang or die; how these end, and what bounds each wait: `rewards.workers`.

Invariant: a call cannot choose whether it is answered. A rollout is sampled again only for what no call can cause.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import ToolFailed
from specrl.records import Prompt
from specrl.rewards.workers import FailureKind, WorkerPool
from specrl.spec.tools import ToolPool as Limits
from specrl.tools.tool import Tool


@dataclass(frozen=True)
class Output:
    """What a tool answered; with a `failure`, that it did not, for a reason that no call can cause."""

    text: str
    failure: str = ""


class ToolPool(WorkerPool):
    """Tool processes."""

    def __init__(self, tool: Tool, limits: Limits) -> None:
        super().__init__(tool, limits, "tool", ToolFailed)
        self._tool = tool

    async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
        """The output of one call, or the reason why there is none.

        A call that has the tool raise, take too long, end its process or answer no text reads so in its output; it is
        counted as a failure all the same, since the tool may be at fault as well.

        Raises ToolFailed only when the pool is closed or cannot be started again: then no call can be answered.
        """
        answer = await self._ask(self._tool.answer, prompt.answer, completion, call)
        if answer.failed is FailureKind.CRASH:  # of the call, if the next worker's does so, too
            answer = await self._ask(self._tool.answer, prompt.answer, completion, call)
        if answer.failed is FailureKind.UNGRADED:
            return Output("", answer.failure)
        if answer.failure:
            return Output(f"Error: {answer.failure}")
        assert isinstance(answer.value, str), "what every tool returns"
        return Output(answer.value)
