"""Inside a sandbox of their own: tests in Python, whose answer is in another one, behind descriptor 3.

    python tests.py PACKAGES LARGEST NAME...       source on descriptor 4; NAMEs are what they use of the answer

No code of the answer runs here: its functions are stubs that send arguments and receive plain data. So it can change
neither the tests nor their verdict, which is this program's exit status:
"""

from __future__ import annotations

import builtins
import os
import socket
import sys
import types
from typing import Any

PASSED, FAILED, BROKEN = 10, 11, 12
"""Exit statuses. BROKEN: the tests themselves cannot judge. No other status is a verdict: 0 or 1 could be accidents."""

_SWALLOWED = (StopIteration, StopAsyncIteration)
"""Exceptions that end loops instead of failing: `all(map(...))` over an answer that raises one would be true."""


class Gone(BaseException):
    """The answer's process ended or sent nonsense. No Exception, so that no test that expects one takes it for it."""


class Unjudgeable(BaseException):
    """The tests need more of the answer than plain data."""


class Answer:
    """The answer's process, and what it has done so far."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.is_gone = False
        self.is_unjudgeable = False
        self.raised: list[BaseException] = []

    def ask(self, request: Any) -> dict[str, Any]:
        """One request, one reply. Raises Gone."""
        try:
            self._link.send(request)
        except OSError as error:
            raise self.gone(str(error)) from None
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """What the answer says next. Raises Gone."""
        from codec import Malformed  # type: ignore[import-not-found] # lies beside this file

        try:
            reply = self._link.receive()
        except (EOFError, OSError, Malformed) as error:
            raise self.gone(str(error)) from None
        if not isinstance(reply, dict):
            raise self.gone("a reply must be an object")
        return reply

    def gone(self, reason: str) -> Gone:
        self.is_gone = True
        return Gone(reason)

    def refuse(self, reason: str) -> Unjudgeable:
        self.is_unjudgeable = True
        return Unjudgeable(reason)


def stub(answer: Answer, name: str) -> Any:
    """A function that calls the answer's function `name`."""
    from codec import Malformed, NotData, decode, encode

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            request = {"call": name, "arguments": encode(list(arguments)), "named": encode(named)}
        except NotData as error:
            raise answer.refuse(str(error)) from None
        reply = answer.ask(request)
        try:
            if "raised" in reply:
                raised = _error(reply)
                answer.raised.append(raised)
                raise raised
            for given, changed in zip(arguments, decode(reply.get("arguments", [])), strict=False):
                _replace(given, changed)
            return decode(reply["result"])
        except (Malformed, KeyError, RecursionError, TypeError) as error:
            if error in answer.raised:
                raise
            raise answer.gone("it sent nonsense") from None

    call.__name__ = call.__qualname__ = name
    return call


def _error(reply: dict[str, Any]) -> Exception:
    """The answer's exception: of Python's own class of that name if it is an ordinary one, else a RuntimeError."""
    kind = getattr(builtins, str(reply["raised"]), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, _SWALLOWED):
        kind = RuntimeError
    try:
        error: Exception = kind(str(reply.get("said", "")))
    except TypeError:  # some, such as UnicodeDecodeError, want more
        error = ValueError(str(reply.get("said", ""))) if issubclass(kind, ValueError) else RuntimeError(kind.__name__)
    return error


def _replace(given: Any, changed: Any) -> None:
    """Do to an argument what the answer did to its copy."""
    if type(given) is not type(changed) or given == changed:
        return
    if isinstance(given, list):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


def judge(answer: Answer, source: bytes, names: list[str]) -> int:
    """Run the tests; the exit status."""
    from codec import decode

    module = types.ModuleType("__main__")  # unittest.main looks for its tests there
    sys.modules["__main__"] = module
    try:
        if answer.receive().get("failed") != "":
            return FAILED
        for name, found in answer.ask({"describe": names}).items():
            if name in names and found["kind"] == "function":
                setattr(module, name, stub(answer, name))
            elif name in names and found["kind"] == "value":
                setattr(module, name, decode(found["value"]))
            elif name in names and found["kind"] == "class":
                return BROKEN
        exec(compile(source, "tests.py", "exec"), module.__dict__)  # noqa: S102 - the run's own tests
    except SystemExit as ending:  # as unittest.main does
        verdict = FAILED if ending.code else PASSED
    except ImportError as error:
        verdict = FAILED if error in answer.raised else BROKEN
    except MemoryError as error:
        verdict = FAILED if error in answer.raised else BROKEN
    except BaseException:  # noqa: BLE001 - whatever else a test raises, it has failed
        verdict = FAILED
    else:
        verdict = PASSED
    if answer.is_gone:
        return FAILED
    return BROKEN if answer.is_unjudgeable else verdict


def main() -> None:
    """Load nothing of the answer, ask it everything."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to load
    from codec import Link

    with os.fdopen(4, "rb") as file:
        source = file.read()
    answer = Answer(Link(socket.socket(fileno=3), int(sys.argv[2])))
    packages, names = sys.argv[1], sys.argv[3:]
    if packages:
        sys.path.append(packages)
    del sys.path[0]  # `codec` is loaded; the tests' own imports find no file of ours
    sys.argv[:] = ["tests.py"]
    os._exit(judge(answer, source, names))


if __name__ == "__main__":
    main()
