"""Inside the sandbox: load an answer from descriptor 4, then call its functions as asked over descriptor 3.

    python functions.py PACKAGES LARGEST       LARGEST: bytes of the largest message

The answer controls this process completely. It gets arguments but no expected results. Anything that it writes to the
socket counts as one of its results.
"""

from __future__ import annotations

import os
import socket
import sys
import types
from collections.abc import Callable
from typing import Any

_MISSING = object()


def main() -> None:
    """Answer requests until the other side hangs up."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to load
    from codec import Link  # type: ignore[import-not-found] # lies beside this file
    from dialect import compile_answer  # type: ignore[import-not-found] # so does this

    link = Link(socket.socket(fileno=3), int(sys.argv[2]))
    del sys.path[0]
    with os.fdopen(4, "rb") as file:
        source = file.read()
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    sys.argv[:] = ["answer.py"]
    module = types.ModuleType("answer")
    sys.modules["answer"] = module
    try:
        exec(compile_answer(source, "answer.py"), module.__dict__)  # noqa: S102 - what the sandbox is for
        failed = ""
    except SystemExit:
        failed = ""  # definitions before the exit count
    except BaseException as error:  # noqa: BLE001 - whatever an answer raises is news for the other side
        failed = type(error).__name__
    link.send({"failed": failed})
    objects: list[Any] = []
    while True:
        try:
            request = link.receive()
        except (EOFError, OSError):
            return
        link.send(_answer_request(request, module.__dict__, objects))


def _answer_request(request: dict[str, Any], names: dict[str, Any], objects: list[Any]) -> dict[str, Any]:
    from codec import NotData, decode, encode

    if "describe" in request:
        return {name: _describe_value(names.get(name, _MISSING)) for name in request["describe"]}
    if "attribute" in request:
        return _describe_value(_read_attribute(objects[request["of"]], request["attribute"]))
    try:
        arguments = decode(request["arguments"])
        named = decode(request["named"])
        if "make" in request:
            objects.append(names[request["make"]](*arguments, **named))
            return {"object": len(objects) - 1}
        if request.get("of") is not None:
            function = getattr(objects[request["of"]], request["call"])
        else:
            function = _find_function(names, request["call"])
        result = encode(function(*arguments, **named))
    except NotData as error:
        return {"raised": "TypeError", "said": str(error)}
    except RecursionError:
        return {"raised": "RecursionError", "said": ""}
    except BaseException as error:  # noqa: BLE001 - whatever an answer raises is its result
        return {"raised": _find_builtin_class(error), "said": _read_message(error)}
    reply = {"result": result}
    try:
        changed = [encode(argument) for argument in arguments]
    except NotData:
        return reply
    return reply if changed == request["arguments"] else reply | {"arguments": changed}


def _find_function(names: dict[str, Any], name: str) -> Callable[..., Any]:
    """A function of the answer, or a method of its class Solution, as some data sets ask for."""
    if name not in names and "Solution" in names:
        method: Callable[..., Any] = getattr(names["Solution"](), name)
        return method
    function: Callable[..., Any] = names[name]
    return function


def _describe_value(found: Any) -> dict[str, Any]:
    from codec import NotData, encode

    if found is _MISSING:
        return {"kind": "missing"}
    if isinstance(found, type):
        return {"kind": "class"}
    if callable(found):
        return {"kind": "function"}
    try:
        return {"kind": "value", "value": encode(found)}
    except NotData:
        return {"kind": "object"}


def _read_attribute(found: object, name: str) -> Any:
    try:
        return getattr(found, name, _MISSING)
    except Exception:  # noqa: BLE001 - a property of the answer's may raise anything
        return _MISSING


def _find_builtin_class(error: BaseException) -> str:
    """The nearest class of the error that Python itself has."""
    return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ == "builtins")


def _read_message(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception:  # noqa: BLE001 - the answer's own class may fail even here
        return ""


main()
