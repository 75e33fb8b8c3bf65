"""docs/logs.md, written from the sources: every event that is logged, its levels, its fields, and who logs it.

    python tools/events.py docs/logs.md

The names are what searches and alerts on logs go by: a change shows in this page's diff. Tests hold them to the past
tense, and compare the committed page with what this writes.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
ROOTS = ("services/specrl", "operators/specrl_operator")
LEVELS = ("debug", "info", "warning", "error")

_HEAD = """\
# Logs

<!-- Written by `python tools/events.py docs/logs.md` from the sources. Never edited by hand. -->

Every process logs to standard error: text where that is a terminal, one JSON object a line elsewhere. So a local run
has JSON in `RUN/logs/NAME.log`, one file a process, and so have the pods' logs. A line has `event`, `level`,
`timestamp` (UTC), `process` and `run`, and the fields below; a traceback is in `exception`. What a library logs or
warns of takes the same way, its text as `event` and its name as `logger`. vLLM and torch's native code write some lines
of their own, which are not JSON. `telemetry.logLevel` sets the least severe level.

Prompts, completions, tools' calls and their outputs are in no line at INFO or above: nor are the words of an exception
that a verifier or tool of one's own raised, since they may quote them; its class and place are. With `logLevel: debug`
the words are, too. A test trains a run whose prompts and completions hold marks, and searches everything that its
processes write and serve.

| event | level | fields | logged by |
|---|---|---|---|"""


@dataclass
class Event:
    """One name. fields: of all places together, those that are passed on as a whole left out."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def events() -> dict[str, Event]:
    """Every event of the sources, by name."""
    found: dict[str, Event] = {}
    for root in ROOTS:
        for path in sorted((REPOSITORY / root).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            for name, level, fields in _logged(tree):
                event = found.setdefault(name, Event())
                event.levels.add(level)
                event.fields |= fields
                event.modules.add(str(path.relative_to(REPOSITORY / root).with_suffix("")))
    return dict(sorted(found.items()))


def _logged(tree: ast.Module) -> Iterator[tuple[str, str, set[str]]]:
    """Name, level and fields of each `log.LEVEL(name, ...)`; a name may be chosen by `if` or from a module's table."""
    tables = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log"), attr=method), args=[first, *_]):
                level = {"exception": "error"}.get(method, method)
                if level in LEVELS:
                    fields = {keyword.arg for keyword in node.keywords if keyword.arg not in {None, "exc_info"}}
                    for name in _names(first, tables):
                        yield name, level, {str(name) for name in fields}


def _names(first: ast.expr, tables: dict[str, ast.Dict]) -> list[str]:
    match first:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp(body=body, orelse=other):
            return _names(body, tables) + _names(other, tables)
        case ast.Subscript(value=ast.Name(id=table)) if table in tables:
            return [name for value in tables[table].values for name in _names(value, tables)]
    raise ValueError(f"an event must be named where it is logged, got {ast.unparse(first)}; write its name there")


def page() -> str:
    rows = [
        f"| `{name}` | {', '.join(sorted(event.levels, key=LEVELS.index))} "
        f"| {', '.join(sorted(event.fields))} | {', '.join(sorted(event.modules))} |"
        for name, event in events().items()
    ]
    return "\n".join([_HEAD, *rows]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
