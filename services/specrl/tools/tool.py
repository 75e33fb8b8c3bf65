"""What a tool is, and the two that there are. `pool.ToolPool` calls them, in processes that it can kill.

Invariant: a call cannot choose whether it is answered. What it causes - it is no program, raises, breaks a limit, makes
the tool raise - is output, in words that the policy reads: made here, or in `pool` where the tool could not say it.
`Ungraded` is for what no call can cause; the rollout is sampled again. No empty output ever stands for a failure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from specrl.errors import ToolFailed
from specrl.rewards.choice import check_ready
from specrl.rewards.code.machine_check import check_machine
from specrl.rewards.code.trial import Sandbox, Trial
from specrl.rewards.custom import UserFunction
from specrl.rewards.judging import raised
from specrl.rewards.sandbox.confine import CannotConfine
from specrl.rewards.verifier import Ungraded
from specrl.spec.tools import Tools


class Tool(Protocol):
    """Answers calls. Instances pickle: they run in other processes."""

    preloads: ClassVar[tuple[str, ...]] = ()
    """Modules that take long to load; the pool loads them once for all of its workers."""

    def ready(self) -> None:
        """Once in a worker before the first call: raise SpecInvalid when none can be answered on this machine."""

    def answer(self, reference: str, completion: str, call: str) -> str:
        """The output of one call. reference: the prompt's; completion: all text since the prompt, the call included.

        Raises Ungraded when there is none for a reason that no call can cause. What else it raises is the call's doing.
        """


@dataclass(frozen=True)
class Interpreter(Tool):
    """Runs calls as Python in the sandbox of the verifier `code`."""

    sandbox: Sandbox

    def ready(self) -> None:
        check_machine(self.sandbox)

    def answer(self, reference: str, completion: str, call: str) -> str:
        try:
            run = Trial(self.sandbox).run("cell.py", call, "")
        except CannotConfine as error:
            raise Ungraded(f"the sandbox must start, got {error}") from error
        said = run.said.decode(errors="replace").rstrip()
        if run.is_success:
            return said
        return f"{said}\nError: the program {run.how}".lstrip()


@dataclass(frozen=True)
class Function(Tool):
    """Calls a function of the user's."""

    function: UserFunction

    def ready(self) -> None:
        self.function.ready()

    def answer(self, reference: str, completion: str, call: str) -> str:
        name = self.function.name
        try:
            output = self.function(reference, completion, call)
        except Ungraded as error:
            raise Ungraded(str(error)) from None  # a subclass of the user's could not be unpickled elsewhere
        except Exception as error:
            raise ToolFailed(f"{name} must answer, got {raised(error)}") from error
        if not isinstance(output, str):
            raise ToolFailed(f"{name} must answer with text, got {type(output).__name__}; return what the policy reads")
        return output


def tool_for(tools: Tools) -> Tool:
    """The tool that the run asks for."""
    if tools.answered_by.code is not None:
        return Interpreter(Sandbox.of(tools.answered_by.code, "tools.answeredBy.code"))
    if tools.answered_by.python is not None:
        section = tools.answered_by.python
        return Function(UserFunction(section.function, section.folder, "tools.answeredBy.python"))
    raise ValueError("tools.answeredBy must have exactly one of code, python, got none; name one")


def check_tools(tools: Tools) -> None:
    """Raise SpecInvalid when calls cannot be answered here. In a process of its own: it may run code of the user's."""
    check_ready(tool_for(tools), "tools")
