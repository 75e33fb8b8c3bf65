"""Inside the sandbox: run tests in Python without an answer, until they use it. They are read from descriptor 3.

python load_tests.py PACKAGES NAME...        NAMEs: names of the answer that the tests use

Prints SOUND, or why the tests cannot judge any answer: they cannot be imported, or they fail or end before they use it.
"""

from __future__ import annotations

import ast
import os
import sys
import types
from collections.abc import Iterator
from typing import Any, NoReturn

_USES = (
    "call getattr iter next len bool contains getitem setitem delitem hash str repr format int float index abs neg pos "
    "invert round eq ne lt le gt ge add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow "
    "and rand or ror xor rxor lshift rshift enter exit await"
)

SOUND = "sound"


class Reached(BaseException):
    """The tests use the answer: from here on its behaviour decides."""


class Placeholder:
    """Stands for something of the answer."""

    is_used = False


def _mark_used(*_: object, **__: object) -> NoReturn:
    Placeholder.is_used = True
    raise Reached


for _name in _USES.split():
    setattr(Placeholder, f"__{_name}__", _mark_used)


def main() -> None:
    """Load them."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120 - pathlib is slow to load
    from call_tests import call_test_functions  # type: ignore[import-not-found] # lies beside this file

    del sys.path[0]
    with os.fdopen(3, "rb") as file:
        source = file.read()
    if sys.argv[1]:
        sys.path.append(sys.argv[1])
    names = sys.argv[2:]
    said = os.dup(1)
    os.dup2(2, 1)  # what the tests print is not asked for
    sys.argv[:] = ["tests.py"]
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    fault = ""
    try:
        for statement in _find_imports(ast.parse(source)):
            exec(compile(ast.Module([statement], []), "tests.py", "exec"), {"__name__": "__main__"})  # noqa: S102
        module.__dict__.update((name, Placeholder()) for name in names)
        exec(compile(source, "tests.py", "exec"), module.__dict__)  # noqa: S102 - the run's own tests
        if not Placeholder.is_used:
            call_test_functions(module)
    except BaseException as error:  # noqa: BLE001 - whatever the tests raise
        fault = f"{type(error).__name__}: {error}"
    verdict = SOUND if Placeholder.is_used else fault or "tests that never use it"
    os.write(said, verdict.encode(errors="replace")[:1000])
    os._exit(0)


def _find_imports(node: ast.AST) -> Iterator[Any]:
    """Every import that is not inside of `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif not isinstance(child, ast.Try):
            yield from _find_imports(child)


if __name__ == "__main__":
    main()
