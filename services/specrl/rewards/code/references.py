"""The tests of a reference, in the forms that data sets have. docs/rewards.md, "Programs", lists them.

Called by `verifier.Code`, before a run and in a worker before each verdict. Nothing runs here.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import symtable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from specrl.errors import VerifierFailed

_LISTS = ("public_test_cases", "private_test_cases", "test_cases", "tests")
"""Where LiveCodeBench and its kin keep lists of tests; all that are there count."""
_ENTRY_POINT = re.compile(r"[A-Za-z_]\w*(\(\))?(\.[A-Za-z_]\w*)?")
_MODULE_OF_ANSWER = "solution"
"""What tests in the style of pytest import the answer from (KodCode)."""
_WHOLE = re.compile(r"0|-?[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class ProgramTests:
    """Standard input, and the output that is expected."""

    cases: tuple[tuple[str, str], ...]

    @property
    def names(self) -> tuple[str, ...]:
        """What the answer must define: nothing, as a program."""
        return ()


@dataclass(frozen=True)
class FunctionTests:
    """Arguments of a function, and the results that are expected."""

    name: str
    cases: tuple[tuple[list[Any], Any], ...]
    may_be_wrapped: bool = False
    """Whether each expected result is a list of one: APPS writes [3] for 3, and nothing says where it does."""

    @property
    def names(self) -> tuple[str, ...]:
        """What the answer must define."""
        return (self.name,)


@dataclass(frozen=True)
class PythonTests:
    """Tests in Python, and the names in them that the answer must define."""

    source: str
    names: tuple[str, ...]


Tests = ProgramTests | FunctionTests | PythonTests


@lru_cache(maxsize=256)  # the rollouts of a group share their reference
def read_tests(reference: str) -> Tests:
    """The tests of a reference. Raises VerifierFailed when there are none, or they are no tests."""
    begins = reference.lstrip()[:1]
    if begins not in {"{", "[", '"'}:
        return _python_tests(reference)
    try:
        found = json.loads(reference)
    except (ValueError, RecursionError) as error:
        if begins != "{":  # a text or a list may begin tests in Python
            return _python_tests(reference)
        raise _refused(str(error)) from error
    try:
        return _read(found, None)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise _refused(str(error)) from error


def _refused(reason: str) -> VerifierFailed:
    return VerifierFailed(
        f"the reference must be tests as JSON with inputs and outputs, got {reason}; correct the data set"
    )


def _read(found: Any, function: str | None) -> Tests:
    """Tests of JSON; `function` was named around it. Raises ValueError, TypeError or KeyError when they are none."""
    if isinstance(found, str):
        return read_tests(found) if function is None else _read(json.loads(found), function)
    if isinstance(found, list):
        return _listed(found, function)
    if not isinstance(found, dict):
        raise ValueError(f"a {type(found).__name__}")
    function = _function_name(found) or function
    if "input_output" in found:
        return _read(found["input_output"], function)
    if "inputs" in found:
        return _paired(found, function)
    if "test_list" in found:  # MBPP
        return _python_tests("\n".join([_text(found.get("test_setup_code") or ""), *found["test_list"]]))
    if "entry_point" in found:  # HumanEval
        if not _ENTRY_POINT.fullmatch(found["entry_point"]):
            raise ValueError(f"entry_point {found['entry_point']!r}")
        return _python_tests(f"{found['test']}\n\ncheck({found['entry_point']})\n")
    lists = [found[name] for name in _LISTS if found.get(name)]
    if not lists:
        raise ValueError(f"an object with {', '.join(map(repr, list(found)[:5])) or 'nothing in it'}")
    if len(lists) == 1:
        return _read(lists[0], function)
    lists = [json.loads(each) if isinstance(each, str) else each for each in lists]
    return _listed([test for each in lists for test in each], function)


def _function_name(found: dict[str, Any]) -> str | None:
    """Of the function that is called; none for a program."""
    metadata = found.get("metadata") or {}
    if isinstance(metadata, str):
        metadata = json.loads(metadata)
    name = found.get("fn_name") or found.get("func_name") or metadata.get("func_name")
    if name is not None and not (isinstance(name, str) and name.isidentifier()):
        raise ValueError(f"a function named {name!r}")
    return name


def _paired(found: dict[str, Any], function: str | None) -> Tests:
    """{"inputs": [...], "outputs": [...]}, of APPS and TACO."""
    inputs, outputs = found["inputs"], found["outputs"]
    if not isinstance(inputs, list) or not isinstance(outputs, list) or not 0 < len(inputs) == len(outputs):
        raise ValueError("as many inputs as outputs, at least one, are needed")
    if function is None:
        return ProgramTests(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))
    if all(isinstance(given, str) for given in inputs) and all(isinstance(out, str) for out in outputs):
        return _functional(inputs, outputs, function)
    if not all(isinstance(given, list) for given in inputs):
        raise ValueError("a function needs a list of arguments for each call")
    may_be_wrapped = all(isinstance(out, list) and len(out) == 1 for out in outputs)
    return FunctionTests(function, tuple(zip(map(_arguments, inputs), outputs, strict=True)), may_be_wrapped)


def _listed(found: list[Any], function: str | None) -> Tests:
    """[{"input": ..., "output": ..., "testtype": ...}], of LiveCodeBench; or lines of tests in Python."""
    if found and all(isinstance(test, str) for test in found):
        return _python_tests("\n".join(found))
    if not found or not all(isinstance(test, dict) for test in found):
        raise ValueError("a list without tests")
    if any(test.get("testtype") == "functional" for test in found) and function is None:
        raise ValueError("functional tests without func_name")
    inputs, outputs = [test["input"] for test in found], [test["output"] for test in found]
    if function is not None and all(test.get("testtype") != "stdin" for test in found):
        return _functional(inputs, outputs, function)
    return ProgramTests(tuple(zip(map(_text, inputs), map(_text, outputs), strict=True)))


def _functional(inputs: list[Any], outputs: list[Any], function: str) -> FunctionTests:
    """LiveCodeBench's calls: each argument is a line of JSON."""
    calls = []
    for given, out in zip(inputs, outputs, strict=True):
        lines = [line for line in _text(given).split("\n") if line.strip()]
        calls.append(([json.loads(line) for line in lines], json.loads(_text(out))))
    return FunctionTests(function, tuple(calls))


def _arguments(given: list[Any]) -> list[Any]:
    """A dict that comes first has whole numbers as keys where JSON could only write them as text (APPS, TACO)."""
    if given and isinstance(given[0], dict) and given[0] and all(map(_WHOLE.fullmatch, given[0])):
        return [{int(key): value for key, value in given[0].items()}, *given[1:]]
    return given


def _text(value: object) -> str:
    """Lines may be given one by one."""
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    if not isinstance(value, str):
        raise ValueError(f"a {type(value).__name__} where inputs, outputs and lines are text; a function needs fn_name")
    return value


def _python_tests(source: str) -> PythonTests:
    try:
        source = _without_imports_of_the_answer(source)
        names = _free_names(symtable.symtable(source, "tests.py", "exec"))
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


def _without_imports_of_the_answer(source: str) -> str:
    """`from solution import add` names what the answer must define, and there is no such module."""
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
    """Refuse tests that hand the answer a function: only plain data passes between the two."""
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
