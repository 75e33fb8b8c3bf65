"""The protocol of a tool, and its two implementations. `pool.ToolPool` calls them in worker processes.

Invariant: a call cannot avoid its answer. If a call is not a valid program, raises, breaks a limit or makes the tool
raise, the policy reads that as output. The text is written here, or by `pool` if the tool itself failed. An empty
output never stands for a failure. `Ungraded` is reserved for failures that no call can cause; the rollout is sampled
again then.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol, Self

from specrl.errors import SpecInvalid, ToolFailed
from specrl.rewards.code.machine_check import check_machine, describe_choice, settle_isolation
from specrl.rewards.code.sandbox_runner import SandboxOptions, SandboxRunner
from specrl.rewards.custom import UserFunction
from specrl.rewards.judging import describe_exception
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import SandboxChoice, Ungraded, WorkerSetup
from specrl.spec.tools import Tools

_CHARACTERS_PER_TOKEN = 64
"""Characters of a function's output that are kept for each token of maxOutputTokens. A token of text has about 4; only
output of long runs of one character may keep fewer tokens than maxOutputTokens."""


class Tool(WorkerSetup, Protocol):
    """Answers calls, in other processes."""

    def answer_call(self, reference: str, completion: str, call: str) -> str:
        """Return the output of one call.

        reference: the prompt's. completion: all text since the prompt, the call included.
        Raises Ungraded if it cannot answer for a reason that no call can cause. Any other exception is attributed to
        the call.
        """


@dataclass(frozen=True)
class PythonInterpreter(Tool):
    """Runs each call as a Python program, in the sandbox of the verifier `code`."""

    sandbox: SandboxOptions

    def settle_on_machine(self) -> Self:
        return replace(self, sandbox=settle_isolation(self.sandbox))

    def list_sandboxes(self) -> tuple[SandboxChoice, ...]:
        return (describe_choice(self.sandbox),)

    def prepare_worker(self) -> None:
        check_machine(self.sandbox)

    def answer_call(self, reference: str, completion: str, call: str) -> str:
        try:
            run = SandboxRunner(settle_isolation(self.sandbox)).run_script("cell.py", call, "")
        except (CannotConfine, SpecInvalid) as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error
        said = run.output.decode(errors="replace").rstrip()
        if run.is_success:
            return said
        return f"{said}\nError: the program {run.exit_description}".lstrip()


@dataclass(frozen=True)
class FunctionTool(Tool):
    """Calls a user's function, which takes (reference, completion, call) and returns text.

    most_characters: the middle of a longer output is cut out here, in the worker. The coordinator tokenizes outputs on
    its event loop, which a page of some MB would stop for seconds.
    """

    function: UserFunction
    most_characters: int

    def prepare_worker(self) -> None:
        self.function.prepare_worker()

    def answer_call(self, reference: str, completion: str, call: str) -> str:
        name = self.function.name
        try:
            output = self.function.imported_function(reference, completion, call)
        except Ungraded as error:
            raise Ungraded(str(error)) from None  # a user's subclass could not be unpickled in the coordinator
        except Exception as error:
            raise ToolFailed(f"{name} must return, got {describe_exception(error)}") from error
        if not isinstance(output, str):
            raise ToolFailed(f"{name} must return text, got {type(output).__name__}; return what the policy reads")
        if len(output) <= self.most_characters:
            return output
        half = self.most_characters // 2
        return output[:half] + output[-half:]


def tool_for(tools: Tools) -> Tool:
    """Build the tool of a `tools` section. Raises ValueError if the section names none."""
    if tools.answered_by.code is not None:
        return PythonInterpreter(SandboxOptions.from_section(tools.answered_by.code, "tools.answeredBy.code"))
    if tools.answered_by.python is not None:
        section = tools.answered_by.python
        function = UserFunction(section.function, section.folder, "tools.answeredBy.python")
        return FunctionTool(function, _CHARACTERS_PER_TOKEN * tools.max_output_tokens)
    raise ValueError("tools.answeredBy must have exactly one of code, python, got none; name one")
