"""Inside a sandbox: run tests in Python. The answer is in another sandbox, behind the socket of descriptor 3.

    python tests.py PACKAGES LARGEST NAME...       source on descriptor 4; NAMEs: names of the answer that they use

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

PASSED = 10
FAILED = 11
UNPLAIN = 12
"""Exit statuses. UNPLAIN: failed, where the tests passed a function or an object. 0 or 1 could be accidents: failed."""

_SWALLOWED = (StopIteration, StopAsyncIteration)
"""Exceptions that end loops instead of failing: `all(map(...))` over an answer that raises one would be true."""


class Gone(BaseException):
    """The answer's process ended or sent nonsense. Not an Exception, so that tests that expect one do not catch it."""


class Unplain(BaseException):
    """The tests pass the answer an argument that is not plain data."""


class AnswerProcess:
    """The connection to the answer's process, and a record of its behaviour so far."""

    def __init__(self, link: Any) -> None:
        self._link = link
        self.is_gone = False
        self.is_unplain = False
        self.is_used = False
        """Whether the tests have used the answer."""
        self.raised: list[BaseException] = []

    def send_request(self, request: Any) -> dict[str, Any]:
        """Send a request and return its reply. Raises Gone."""
        try:
            self._link.send(request)
        except OSError as error:
            raise self.mark_gone(str(error)) from None
        return self.receive_reply()

    def receive_reply(self) -> dict[str, Any]:
        """Receive the answer's next message. Raises Gone."""
        from codec import Malformed  # type: ignore[import-not-found] # lies beside this file

        try:
            reply = self._link.receive()
        except (EOFError, OSError, Malformed) as error:
            raise self.mark_gone(str(error)) from None
        if not isinstance(reply, dict):
            raise self.mark_gone("a reply must be an object")
        return reply

    def mark_gone(self, reason: str) -> Gone:
        self.is_gone = True
        return Gone(reason)

    def mark_unplain(self, reason: str) -> Unplain:
        self.is_unplain = True
        return Unplain(reason)


def create_stub(answer: AnswerProcess, name: str, of: int | None = None) -> Any:
    """A function that calls the answer's function `name`, or the method of its object number `of`."""
    from codec import Malformed, decode

    def call_answer(*arguments: Any, **named: Any) -> Any:
        reply = _request_call(answer, {"call": name, "of": of}, arguments, named)
        try:
            for given, changed in zip(arguments, decode(reply.get("arguments", [])), strict=False):
                _replace_contents(given, changed)
            return decode(reply["result"])
        except (Malformed, KeyError, RecursionError, TypeError):
            raise answer.mark_gone("it sent nonsense") from None

    call_answer.__name__ = call_answer.__qualname__ = name
    return call_answer


class ClassStub:
    """A class of the answer: calling it makes an object there."""

    def __init__(self, answer: AnswerProcess, name: str) -> None:
        self._answer = answer
        self._name = name

    def __call__(self, *arguments: Any, **named: Any) -> ObjectStub:
        reply = _request_call(self._answer, {"make": self._name}, arguments, named)
        if type(reply.get("object")) is not int:
            raise self._answer.mark_gone("it sent nonsense")
        return ObjectStub(self._answer, reply["object"])


class ObjectStub:
    """An object of an answer's class: its methods and plain attributes.

    Operators are those of Python's `object`. With its own `==`, an answer could claim to equal any expected value.
    """

    def __init__(self, answer: AnswerProcess, number: int) -> None:
        self._answer = answer
        self._number = number

    def __getattr__(self, name: str) -> Any:
        from codec import decode

        if name.startswith("__"):
            raise AttributeError(name)
        found = self._answer.send_request({"attribute": name, "of": self._number})
        if found.get("kind") == "function":
            return create_stub(self._answer, name, self._number)
        if found.get("kind") == "value":
            return decode(found.get("value"))
        raise AttributeError(name)


def _request_call(
    answer: AnswerProcess, request: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> dict[str, Any]:
    """The reply to a call. Raises what the answer's code raised."""
    from codec import NotData, encode

    answer.is_used = True
    try:
        request |= {"arguments": encode(list(arguments)), "named": encode(named)}
    except NotData as error:
        raise answer.mark_unplain(str(error)) from None
    reply = answer.send_request(request)
    if "raised" in reply:
        raised = _build_error(reply)
        answer.raised.append(raised)
        raise raised
    return reply


def _build_error(reply: dict[str, Any]) -> Exception:
    """The answer's exception: of Python's own class of that name if it is an ordinary one, else a RuntimeError."""
    kind = getattr(builtins, str(reply["raised"]), None)
    if not isinstance(kind, type) or not issubclass(kind, Exception) or issubclass(kind, _SWALLOWED):
        kind = RuntimeError
    try:
        error: Exception = kind(str(reply.get("said", "")))
    except TypeError:  # some, such as UnicodeDecodeError, want more
        error = ValueError(str(reply.get("said", ""))) if issubclass(kind, ValueError) else RuntimeError(kind.__name__)
    return error


def _replace_contents(given: Any, changed: Any) -> None:
    """Do to an argument what the answer did to its copy."""
    if type(given) is not type(changed) or given == changed:
        return
    if isinstance(given, list):
        given[:] = changed
    elif isinstance(given, dict | set):
        given.clear()
        given.update(changed)


def run_tests(answer: AnswerProcess, source: bytes, names: list[str]) -> int:
    """Run the tests and return the exit status. Any exception is a failure: `load_tests` ran them without an answer."""
    module = types.ModuleType("__main__")  # unittest.main looks for its tests there
    sys.modules["__main__"] = module
    try:
        if answer.receive_reply().get("failed") != "":
            return FAILED
        _bind_names(answer, names, module)
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


def _bind_names(answer: AnswerProcess, names: list[str], module: types.ModuleType) -> None:
    """Give the tests what the answer has defined of the names that they use."""
    from codec import decode

    found = answer.send_request({"describe": names})
    for name in names:
        description: dict[str, Any] = found[name]
        kind = description["kind"]
        if kind == "function":
            setattr(module, name, create_stub(answer, name))
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
    answer = AnswerProcess(Link(socket.socket(fileno=3), int(sys.argv[2])))
    packages = sys.argv[1]
    names = sys.argv[3:]
    if packages:
        sys.path.append(packages)
    del sys.path[0]  # `codec` and `call_tests` are loaded; the tests' own imports find no file of ours
    sys.argv[:] = ["tests.py"]
    os._exit(run_tests(answer, source, names))


if __name__ == "__main__":
    main()
