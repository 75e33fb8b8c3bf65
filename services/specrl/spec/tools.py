"""Sections about turns: what a policy may call while it answers, and how a call is told from other text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specrl.spec.base import Section, Union
from specrl.spec.data import Positive, PythonVerifier, SandboxLimits, WorkerLimits

Mark = Annotated[str, Field(min_length=1, max_length=256)]


class CodeTool(SandboxLimits):
    """What the sandbox keeps apart, and its limits."""

    cpu_s: Positive = 4
    """Processor seconds of each process of one call."""
    wall_s: Positive = 8
    """Seconds for one call, less what it waited for a processor. Less than tools.pool.timeoutS."""
    output_kib: Positive = 64
    """Longest output of one call, in KiB; a call that prints more is ended."""


class PythonTool(PythonVerifier):
    """Where the function is."""


class AnsweredBy(Union):
    """What answers a call; exactly one member."""

    code: CodeTool | None = None
    """Runs the call as Python in the sandbox of the verifier `code`, each call in a process of its own. The output is
    what it prints and, as at a prompt, the value of its last expression; so `12 + 30` is a calculator. What the program
    does wrong is output too: its exception, or the limit that it broke."""
    python: PythonTool | None = None
    """Calls a function of one's own, `def answer(reference: str, completion: str, call: str) -> str`, in the pool's
    processes and without a sandbox. `reference` is the prompt's, so that it may be a verifier between turns;
    `completion` is all text since the prompt, earlier outputs included, and the only state there is. What it raises is
    output in words, and counted. It raises `specrl.rewards.Ungraded` for what no call can cause: then the rollout is
    sampled again."""


class ToolPool(WorkerLimits):
    """The processes that answer calls, outside the coordinator's event loop."""

    timeout_s: Positive = 10
    """Time limit of one call, in seconds, less what it waited for a processor. A tool that exceeds it is killed, and
    the output says so."""


class Tools(Section):
    """Turns: the policy samples until it calls a tool, the tool's output is appended, and sampling goes on.

    Null: the policy answers in one turn.
    """

    answered_by: AnsweredBy
    """What answers a call."""
    call_start: Mark = "<tool>"
    """Where a call begins."""
    call_end: Mark = "</tool>"
    """Where it ends: a stop string of every turn. The call is the text after the turn's last callStart."""
    output_start: Mark = "<output>"
    """Text before an output. In both, special tokens are read as such, so that a chat template's turns can be written
    out: `"<|im_end|>\\n<|im_start|>user\\n"`. In an output itself they are text."""
    output_end: Mark = "</output>"
    """Text after an output; then the policy goes on."""
    max_turns: Annotated[int, Field(ge=2, strict=True)] = 4
    """Most turns of one rollout. A call in the last one is not answered: the rollout ends there, and is judged."""
    max_output_tokens: Positive = 256
    """Longest output, in tokens, without the texts around it; what is longer loses its middle. A rollout ends
    where an output and one more token do not fit generation.sampling.maxTokens, which counts both."""
    pool: ToolPool = ToolPool()
