"""Parse the tests of a reference, in the formats of common data sets. docs/rewards.md, "Programs", lists them.

Called by `verifier.Code`, before a run and in a worker before each verdict. Invariant: tests are parsed, never run.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

from specrl.errors import VerifierFailed

_TEST_LIST_KEYS = ("public_test_cases", "private_test_cases", "test_cases", "tests")
"""Keys under which LiveCodeBench and similar data sets keep lists of tests. All lists that are present are used."""
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*)?")
_MODULE_OF_ANSWER = "solution"
"""The module from which pytest-style tests import the answer (KodCode)."""

_WHOLE_NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class ProgramTests:
    """Cases of (standard input, expected output)."""

    required_names: ClassVar[tuple[str, ...]] = ()
    """Names that the answer must define: none, since it runs as a program."""
    cases: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class FunctionTests:
    """Cases of (arguments, expected result) for one function."""

    name: str
    cases: tuple[tuple[list[Any], Any], ...]
    may_be_wrapped: bool = False
    """Whether every expected result is a list of one. APPS writes [3] for 3, and does not say where it does so."""

    @property
    def required_names(self) -> tuple[str, ...]:
        """Names that the answer must define."""
        return (self.name,)


@dataclass(frozen=True)
class PythonTests:
    """Tests as Python source, and the names in them that the answer must define."""

    source: str
    required_names: tuple[str, ...]


Tests = ProgramTests | FunctionTests | PythonTests


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def read_tests(reference: str) -> Tests:
    """Parse the tests of a reference. Raises VerifierFailed if it has none or is malformed."""
    begins = reference.lstrip()[:1]
    if begins not in {"{", "[", '"'}:
        return _parse_python_tests(reference)
    try:
        found = json.loads(reference)
    except (ValueError, RecursionError) as error:
        if begins != "{":  # Python source may begin with a string or a list, too
            return _parse_python_tests(reference)
        raise _tests_error(str(error)) from error
    try:
        return _parse_tests(found, None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _tests_error(str(error)) from error


def _tests_error(reason: str) -> VerifierFailed:
    return VerifierFailed(
        f"the reference must have tests as JSON with inputs and outputs, got {reason}; correct the data set"
    )


def _parse_tests(found: Any, function: str | None) -> Tests:
    """Parse tests from JSON, by the keys that each data set uses.

    function: the name that an enclosing object gave. Raises ValueError, TypeError or KeyError if there are no tests.
    """
    if isinstance(found, str):  # JSON within text, or Python
        return read_tests(found) if function is None else _parse_tests(json.loads(found), function)
    if isinstance(found, list):
        return _parse_listed_tests(found, function)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}")
    function = _find_function_name(found) or function
    if "input_output" in found:
        return _parse_tests(found["input_output"], function)
    if "inputs" in found:
        return _parse_paired_tests(found, function)
    if "test_list" in found:  # MBPP
        return _parse_python_tests("\n".join([_join_lines(found.get("test_setup_code") or ""), *found["test_list"]]))
    if "entry_point" in found:  # HumanEval
        if not _ENTRY_POINT.fullmatch(found["entry_point"]):
            raise ValueError(f"entry_point {found['entry_point']!r}")
        return _parse_python_tests(f"{found['test']}\n\ncheck({found['entry_point']})\n")
    lists = [found[name] for name in _TEST_LIST_KEYS if found.get(name)]
    if not lists:
        raise ValueError(f"an object with {', '.join(map(repr, list(found)[:5])) or 'nothing in it'}")
    if len(lists) == 1:
        return _parse_tests(lists[0], function)
    lists = [json.loads(each) if isinstance(each, str) else each for each in lists]
    return _parse_listed_tests([test for each in lists for test in each], function)


def _find_function_name(found: dict[str, Any]) -> str | None:
    """Return the name of the function under test, or None for a program."""
    metadata = found.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    name = found.get("fn_name") or found.get("func_name") or metadata.get("func_name")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"a function named {name!r}")
    return name


def _parse_paired_tests(found: dict[str, Any], function: str | None) -> Tests:
    """Parse {"inputs": [...], "outputs": [...]}, the format of APPS and TACO."""
    inputs = found["inputs"]
    outputs = found["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError("inputs and outputs that are not lists of the same length, at least 1")
    if function is None:
        return ProgramTests(tuple(zip(map(_join_lines, inputs), map(_join_lines, outputs), strict=True)))
    if all(isinstance(given, str) for given in inputs) and all(isinstance(out, str) for out in outputs):
        return _parse_functional_tests(inputs, outputs, function)
    if not all(isinstance(given, list) for given in inputs):
        raise ValueError("a call whose arguments are not a list")
    may_be_wrapped = all(isinstance(out, list) and len(out) == 1 for out in outputs)
    return FunctionTests(function, tuple(zip(map(_restore_integer_keys, inputs), outputs, strict=True)), may_be_wrapped)


def _parse_listed_tests(found: list[Any], function: str | None) -> Tests:
    """Parse [{"input": ..., "output": ..., "testtype": ...}], LiveCodeBench's format, or lines of tests in Python."""
    if found and all(isinstance(test, str) for test in found):
        return _parse_python_tests("\n".join(found))
    if not found or not all(isinstance(test, dict) for test in found):
        raise ValueError("a list without tests")
    if any(test.get("testtype") == "functional" for test in found) and function is None:
        raise ValueError("functional tests without func_name")
    inputs = [test["input"] for test in found]
    outputs = [test["output"] for test in found]
    if function is not None and all(test.get("testtype") != "stdin" for test in found):
        return _parse_functional_tests(inputs, outputs, function)
    return ProgramTests(tuple(zip(map(_join_lines, inputs), map(_join_lines, outputs), strict=True)))


def _parse_functional_tests(inputs: list[Any], outputs: list[Any], function: str) -> FunctionTests:
    """Parse LiveCodeBench's calls, in which each argument is a line of JSON."""
    calls = []
    for given, out in zip(inputs, outputs, strict=True):
        lines = [line for line in _join_lines(given).split("\n") if line.strip()]
        calls.append(([json.loads(line) for line in lines], json.loads(_join_lines(out))))
    return FunctionTests(function, tuple(calls))


def _restore_integer_keys(given: list[Any]) -> list[Any]:
    """Turn the keys of a dict that comes first into integers if all of them are whole numbers (APPS, TACO).

    JSON can write keys only as text.
    """
    if given and isinstance(given[0], dict) and given[0] and all(map(_WHOLE_NUMBER.fullmatch, given[0])):
        return [{int(key): value for key, value in given[0].items()}, *given[1:]]
    return given


def _join_lines(value: object) -> str:
    """Return text as it is, and join lines that are given as a list."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where inputs, outputs and lines are text; a function needs fn_name")
    return value


def _parse_python_tests(source: str) -> PythonTests:
    try:
        source = _remove_answer_imports(source)
        names = _find_free_names(symtable.symtable(source, "tests.py", "exec"))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise VerifierFailed(
            f"the reference must be tests in Python, or JSON, got {error} in {source[:80]!r}; correct the data set"
        ) from error
    if not names:
        raise VerifierFailed(
            f"the tests must use something of the answer, got none in {source[:80]!r}; correct the data set"
        )
    _check_arguments(ast.parse(source), names)
    return PythonTests(source, tuple(sorted(names)))


def _remove_answer_imports(source: str) -> str:
    """Remove `from solution import add`: the module does not exist, and `add` is what the answer must define.

    An alias becomes an assignment. Line numbers stay the same.
    """
    tree = ast.parse(source)
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == _MODULE_OF_ANSWER]
    lines = source.split("\n")
    for node in imports:
        renamed = [f"{alias.asname} = {alias.name}" for alias in node.names if alias.asname]
        last = node.end_lineno or node.lineno
        indent = " " * node.col_offset
        lines[node.lineno - 1 : last] = [indent + ("; ".join(renamed) or "pass"), *[""] * (last - node.lineno)]
    return "\n".join(lines)


def _check_arguments(tree: ast.Module, names: set[str]) -> None:
    """Raise VerifierFailed for tests that pass a function to the answer: only plain data crosses the sandbox."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in names:
            for given in [*node.args, *(keyword.value for keyword in node.keywords)]:
                if isinstance(given, ast.Lambda | ast.GeneratorExp) or (
                    isinstance(given, ast.Name) and given.id in own
                ):
                    raise VerifierFailed(
                        f"the tests must pass the answer plain data, got {ast.unparse(given)[:80]} in line "
                        f"{node.lineno}; correct the data set"
                    )


def _find_free_names(module: symtable.SymbolTable) -> set[str]:
    """Return the names that the tests use but neither define nor find among Python's built-ins."""
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
