"""Sections about tools: which tool a policy may call during a rollout, and how a call is marked in its text."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from specrl.spec.base import Section, UnionSection, WholeNumber
from specrl.spec.data import Positive, PythonVerifier, SandboxLimits, WorkerLimits

Mark = Annotated[str, Field(min_length=1, max_length=256)]


class CodeTool(SandboxLimits):
    """Isolation and limits of the sandbox."""

    cpu_s: Positive = 4
    """CPU seconds of each process of one call."""
    wall_s: Positive = 8
    """Wall seconds of one call, without the time in which it waited for a CPU. Must be less than
    tools.pool.timeoutS."""
    output_kib: Positive = 64
    """Longest output of one call, in KiB. A call that prints more is killed."""


class PythonTool(PythonVerifier):
    """A Python function."""


class AnsweredBy(UnionSection):
    """The tool that answers calls; exactly one member."""

    code: CodeTool | None = None
    """Runs the call as Python in the sandbox of the verifier `code`, each call in its own process. As in a Python
    shell, the output is the text that it prints, followed by the value of its last expression. So the call `12 + 30`
    has the output 42. Errors of the program are output, too: its exception, or the limit that it exceeded."""
    python: PythonTool | None = None
    """Calls your own function, `def answer(reference: str, completion: str, call: str) -> str`, in the pool's processes
    and without a sandbox. `reference` is the prompt's, so that the function can verify between turns. `completion` is
    all text since the prompt, with earlier outputs; there is no other state. If it raises, the output describes the
    error, and the error is counted. It should raise `specrl.rewards.Ungraded` for failures that no call can cause; the
    rollout is then sampled again."""


class ToolPool(WorkerLimits):
    """The worker processes that answer calls, outside the coordinator's event loop."""

    timeout_s: Positive = 10
    """Time limit of one call, in seconds, without the time in which it waited for a CPU. A tool that exceeds it is
    killed, and the output says so."""


class Tools(Section):
    """Tool calls. The policy samples until it calls a tool, the tool's output is appended, and sampling continues.

    Null: no tools; every rollout has one turn.
    """

    answered_by: AnsweredBy
    """The tool that answers calls."""
    call_start: Mark = "<tool>"
    """Text that begins a call."""
    call_end: Mark = "</tool>"
    """Text that ends a call, a stop string of every turn. The call is the text after the turn's last callStart."""
    output_start: Mark = "<output>"
    """Text before an output. Special tokens in outputStart and outputEnd are tokenized as such, so they can contain a
    chat template's turns: `"<|im_end|>\\n<|im_start|>user\\n"`. In the output itself they are plain text."""
    output_end: Mark = "</output>"
    """Text after an output. The policy continues after it."""
    # After a single turn, the policy could not read the output of its call.
    max_turns: Annotated[WholeNumber, Field(ge=2)] = 4
    """Most turns of one rollout. A call in the last turn is not answered: the rollout ends with it, and is graded."""
    max_output_tokens: Positive = 256
    """Longest output, in tokens, without outputStart and outputEnd. The middle of a longer one is cut out. A rollout
    ends if an output and one more token do not fit into generation.sampling.maxTokens, which counts both."""
    pool: ToolPool = ToolPool()
