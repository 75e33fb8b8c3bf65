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

PASSED, FAILED, UNPLAIN = 10, 11, 12
"""Exit statuses. UNPLAIN: failed, where the tests passed a function or an object. 0 or 1 could be accidents: failed."""

_SWALLOWED = (StopIteration, StopAsyncIteration)
"""Exceptions that end loops instead of failing: `all(map(...))` over an answer that raises one would be true."""


class Gone(BaseException):
    """The answer's process ended or sent nonsense. No Exception, so that no test that expects one takes it for it."""


class Unplain(BaseException):
    """The tests pass the answer more than plain data."""


class Answer:
    """The answer's process, and what it has done so far."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.is_gone = False
        self.is_unplain = False
        self.is_used = False
        """Whether the tests have asked for anything that the answer does."""
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

    def refuse(self, reason: str) -> Unplain:
        self.is_unplain = True
        return Unplain(reason)


def stub(answer: Answer, name: str, of: int | None = None) -> Any:
    """A function that calls the answer's function `name`, or the method of its object number `of`."""
    from codec import Malformed, decode

    def call(*arguments: Any, **named: Any) -> Any:
        reply = _call(answer, {"call": name, "of": of}, arguments, named)
        try:
            for given, changed in zip(arguments, decode(reply.get("arguments", [])), strict=False):
                _replace(given, changed)
            return decode(reply["result"])
        except (Malformed, KeyError, RecursionError, TypeError):
            raise answer.gone("it sent nonsense") from None

    call.__name__ = call.__qualname__ = name
    return call


class ClassStub:
    """A class of the answer: calling it makes an object there."""

    def __init__(self, answer: Answer, name: str) -> None:
        self._answer, self._name = answer, name

    def __call__(self, *arguments: Any, **named: Any) -> ObjectStub:
        reply = _call(self._answer, {"make": self._name}, arguments, named)
        if type(reply.get("object")) is not int:
            raise self._answer.gone("it sent nonsense")
        return ObjectStub(self._answer, reply["object"])


class ObjectStub:
    """An object of an answer's class: its methods and plain attributes.

    Operators stay those of Python's `object`. An answer's own would decide whether it equals what is expected.
    """

    def __init__(self, answer: Answer, number: int) -> None:
        self._answer, self._number = answer, number

    def __getattr__(self, name: str) -> Any:
        from codec import decode

        if name.startswith("__"):
            raise AttributeError(name)
        found = self._answer.ask({"attribute": name, "of": self._number})
        if found.get("kind") == "function":
            return stub(self._answer, name, self._number)
        if found.get("kind") == "value":
            return decode(found.get("value"))
        raise AttributeError(name)


def _call(answer: Answer, request: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> dict[str, Any]:
    """The reply to a call. Raises what the answer's code raised."""
    from codec import NotData, encode

    answer.is_used = True
    try:
        request |= {"arguments": encode(list(arguments)), "named": encode(named)}
    except NotData as error:
        raise answer.refuse(str(error)) from None
    reply = answer.ask(request)
    if "raised" in reply:
        raised = _error(reply)
        answer.raised.append(raised)
        raise raised
    return reply


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
    """Run the tests; the exit status. Whatever they raise, they have failed: they came this far without an answer."""
    module = types.ModuleType("__main__")  # unittest.main looks for its tests there
    sys.modules["__main__"] = module
    try:
        if answer.receive().get("failed") != "":
            return FAILED
        _name(answer, names, module)
        exec(compile(source, "tests.py", "exec"), module.__dict__)  # noqa: S102 - the run's own tests
        if not answer.is_used:
            from call_tests import call_test_functions  # type: ignore[import-not-found] # lies beside this file

            call_test_functions(module)
    except SystemExit as ending:  # as unittest.main does
        has_passed = not ending.code
    except BaseException:  # noqa: BLE001 - whatever else a test raises, it has failed
        has_passed = False
    else:
        has_passed = True
    if has_passed and answer.is_used and not answer.is_gone and not answer.is_unplain:
        return PASSED
    return UNPLAIN if answer.is_unplain else FAILED


def _name(answer: Answer, names: list[str], module: types.ModuleType) -> None:
    """Give the tests what the answer has defined of the names that they use."""
    from codec import decode

    found = answer.ask({"describe": names})
    for name in names:
        description: dict[str, Any] = found[name]
        kind = description["kind"]
        if kind == "function":
            setattr(module, name, stub(answer, name))
        elif kind == "class":
            setattr(module, name, ClassStub(answer, name))
        elif kind == "value":
            answer.is_used = True
            setattr(module, name, decode(description.get("value")))


def main() -> None:
    """Load nothing of the answer, ask it everything."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to load
    import call_tests  # noqa: F401 - while it can be found
    from codec import Link

    with os.fdopen(4, "rb") as file:
        source = file.read()
    answer = Answer(Link(socket.socket(fileno=3), int(sys.argv[2])))
    packages, names = sys.argv[1], sys.argv[3:]
    if packages:
        sys.path.append(packages)
    del sys.path[0]  # `codec` and `call_tests` are loaded; the tests' own imports find no file of ours
    sys.argv[:] = ["tests.py"]
    os._exit(judge(answer, source, names))


if __name__ == "__main__":
    main()
