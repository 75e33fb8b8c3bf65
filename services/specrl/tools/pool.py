"""Answers to calls from processes that may hang or die; how these end, and what bounds each wait: `rewards.workers`."""

from __future__ import annotations

from dataclasses import dataclass

from specrl.errors import ToolFailed
from specrl.records import Prompt
from specrl.rewards.workers import FailureKind, WorkerPool
from specrl.spec.tools import ToolPool as Limits
from specrl.tools.tool import Tool


@dataclass(frozen=True)
class Output:
    """What a tool answered; with a `failure`, that it did not, which is no output."""

    text: str
    failure: str = ""


class ToolPool(WorkerPool):
    """Tool processes."""

    def __init__(self, tool: Tool, limits: Limits) -> None:
        super().__init__(tool, limits, "tool", ToolFailed)
        self._tool = tool

    async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
        """The output of one call, or the reason why there is none.

        Raises ToolFailed only when the pool is closed or cannot be started again: then no call can be answered.
        """
        answer = await self._ask(self._tool.answer, prompt.answer, completion, call)
        if answer.failure:
            return Output("", answer.failure)
        if not isinstance(answer.value, str):
            got = type(answer.value).__name__
            return Output("", self._failed(FailureKind.ERROR, f"the tool must answer with text, got {got}").failure)
        return Output(answer.value)
