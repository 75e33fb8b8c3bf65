"""The tests of a reference, in every form that is accepted."""

from __future__ import annotations

import ast
import builtins
import json
import symtable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specrl.errors import VerifierFailed


@dataclass(frozen=True)
class ProgramTests:
    """Standard input, and the output that is expected."""

    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FunctionTests:
    """Arguments of a function, and the results that are expected."""

    name: str
    cases: tuple[tuple[list[Any], Any], ...]


@dataclass(frozen=True)
class PythonTests:
    """Tests in Python, and the names in them that the answer must define."""

    source: str
    names: tuple[str, ...]


Tests = ProgramTests | FunctionTests | PythonTests


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def read_tests(reference: str) -> Tests:
    """The tests of a reference. Raises VerifierFailed when there are none, or they are no tests."""
    if not reference.lstrip().startswith("{"):
        return _python_tests(reference)
    try:
        found = json.loads(reference)
        inputs, outputs, name = found["inputs"], found["outputs"], found.get("fn_name")
        if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
            raise ValueError("as many inputs as outputs, at least one, are needed")
        if name is None:
            return ProgramTests(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))
        if not isinstance(name, str) or not all(isinstance(arguments, list) for arguments in inputs):
            raise ValueError("a function needs a name, and a list of arguments for each call")
        return FunctionTests(name, tuple(zip(inputs, outputs, strict=True)))
    except (ValueError, KeyError, RecursionError) as error:
        raise VerifierFailed(
            f"the reference must be tests as JSON with inputs and outputs, got {error}; correct the data set"
        ) from error


def _python_tests(source: str) -> PythonTests:
    try:
        ast.parse(source)
        names = tuple(sorted(_free_names(symtable.symtable(source, "tests.py", "exec"))))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierFailed(
            f"the reference must be tests in Python, or JSON, got {error} in {source[:80]!r}; correct the data set"
        ) from error
    if not names:
        raise VerifierFailed(
            f"the tests must use something of the answer, got none in {source[:80]!r}; correct the data set"
        )
    return PythonTests(source, names)


def _free_names(module: symtable.SymbolTable) -> set[str]:
    """Names that the tests use and neither define nor find among Python's own."""
    own = {
        symbol.get_name()
        for symbol in module.get_symbols()
        if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()
    }
    used: set[str] = set()
    tables = [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (table is module or symbol.is_global()):
                used.add(symbol.get_name())
            if symbol.is_declared_global() and symbol.is_assigned():
                own.add(symbol.get_name())
    return used - own - set(dir(builtins)) - {"__name__", "__file__", "__doc__"}


def _text(value: object) -> str:
    """Lines may be given one by one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError("without fn_name, inputs and outputs must be text")
    return value
