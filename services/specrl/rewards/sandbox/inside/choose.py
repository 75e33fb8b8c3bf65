"""Inside the sandbox: which of several blocks of code is the program. They are read from descriptor 3, as JSON.

python choose.py PACKAGES NAME...        NAMEs: what the tests use of the answer; none for a program with input

Prints the block's place. No line of the blocks runs: they are parsed, here because that may take any time and memory.
The last block of the highest rank is chosen. The ranks, and why: docs/rewards.md, "Programs".
"""

from __future__ import annotations

import ast
import json
import os
import sys

_READ_CALLS = {"input", "raw_input"}
_WRITE_CALLS = {"print"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def main() -> None:
    """Choose, and say which."""
    with os.fdopen(3, "rb") as file:
        blocks = json.loads(file.read())
    names = set(sys.argv[2:])
    ranks = [_rank_block(block, names) for block in blocks]
    best = max(ranks)
    sys.stdout.write(str(max(place for place, rank in enumerate(ranks) if rank == best)))


def _rank_block(block: str, names: set[str]) -> tuple[int, ...]:
    try:
        tree = ast.parse(block)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return (-1,)
    return (_count_defined_names(tree, names),) if names else _rank_program(tree)


def _count_defined_names(tree: ast.Module, names: set[str]) -> int:
    """How many of the names a block defines with content: the head of a function alone is a draft or a summary."""
    defined = set()
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            if any(not isinstance(inner, _Function) or not _is_empty(inner) for inner in statement.body):
                defined |= {statement.name}
            if statement.name == "Solution":
                methods = [inner for inner in statement.body if isinstance(inner, _Function)]
                defined |= {method.name for method in methods if not _is_empty(method)}
        elif isinstance(statement, _Function):
            if not _is_empty(statement):
                defined |= {statement.name}
        else:
            defined |= {
                node.id
                for node in ast.walk(statement)
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
            }
            if isinstance(statement, ast.Import | ast.ImportFrom):
                defined |= {alias.asname or alias.name for alias in statement.names}
    return len(names & defined)


def _is_empty(function: _Function) -> bool:
    """Whether its body is `pass`, `...`, a text, or `raise NotImplementedError`."""
    return all(
        isinstance(line, ast.Pass)
        or (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
        or (isinstance(line, ast.Raise) and line.exc is not None and "NotImplementedError" in ast.dump(line.exc))
        for line in function.body
    )


def _rank_program(tree: ast.Module) -> tuple[int, ...]:
    """Whether a block does something when it runs; then whether it reads its input and writes; then one of both."""
    acts = any(_acts_when_run(statement) for statement in tree.body)
    reads = writes = False
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            reads = reads or node.func.id in _READ_CALLS or (node.func.id == "open" and _is_descriptor(node))
            writes = writes or node.func.id in _WRITE_CALLS
        elif isinstance(node, ast.Attribute):
            reads = reads or node.attr in {"stdin", "fileinput"}
            writes = writes or node.attr == "stdout"
        elif isinstance(node, ast.Name):  # from sys import stdin; import fileinput; print as an argument
            reads = reads or node.id in {"stdin", "fileinput", "input"}
            writes = writes or node.id in {"stdout", "print"}
    if _replaces_stdin(tree):
        reads = False
    return (acts and reads and writes, acts, reads + writes)


def _acts_when_run(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Import | ast.ImportFrom | ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    return any(isinstance(node, ast.Call) for node in ast.walk(statement))


def _is_descriptor(call: ast.Call) -> bool:
    return bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0


def _replaces_stdin(tree: ast.Module) -> bool:
    """Whether it puts a text in the place of standard input, as a test of another block does."""
    return any(
        isinstance(node, ast.Assign)
        and any(isinstance(target, ast.Attribute) and target.attr == "stdin" for target in node.targets)
        and any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in ast.walk(node.value))
        for node in ast.walk(tree)
    )


main()
