"""Writes docs/logs.md from the sources: every log event with its levels, its fields and the modules that log it.

    python tools/events.py docs/logs.md

Users search and alert by these names, so a change must be visible in this page's diff. Tests check that names are in
the past tense, and that the committed page is current.
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

Every process logs to standard error: text on a terminal, otherwise one JSON object per line. A local run has one JSON
file per process, `RUN/logs/NAME.log`. Each line has `event`, `level`, `timestamp` (UTC), `process` and `run`, and the
fields below. `...` stands for further fields, such as the figures of a canary. A traceback is in `exception`. Log
records and warnings of libraries have their text in `event` and the library's name in `logger`. vLLM and torch's native
code write some lines of their own, which are not JSON. `telemetry.logLevel` sets the lowest level that is logged.
`main`, `reconcile` and `cluster/...` are modules of the operator, whose level is the chart's `operator.logLevel`.

No line at INFO or above contains prompts, completions, tool calls or tool outputs. An exception of a user's verifier or
tool might quote them. When a verifier fails on an answer, only class and place of the exception are logged
(`verifier_failed`); its message is in `rollouts.jsonl`. When a tool fails, or a verifier on a reference,
`question_failed` has the whole traceback, with `logLevel: debug` only. A test trains a run with marked prompts and
completions, and searches everything that its processes write and serve.

Two places keep texts on purpose. `rollouts.jsonl` in the run's folder has a few rollouts of each step, with prompt and
completion. `telemetry.rollouts: 0` switches it off. The run's store has the rollouts of steps that are not trained yet.
So protect a run's folder as you protect the data set.

| event | level | fields | logged by |
|---|---|---|---|"""


@dataclass
class Event:
    """One event: its levels, fields and modules. fields: of all calls together; `...` for those of a mapping."""

    levels: set[str] = field(default_factory=set)
    fields: set[str] = field(default_factory=set)
    modules: set[str] = field(default_factory=set)


def find_events() -> dict[str, Event]:
    """Find every log event in the sources, by name."""
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
    """Yield name, level and fields of each `log.LEVEL(name, ...)`.

    The name may be an `if` expression, or come from a dictionary of the module. So may the level, as in
    `(log.warning if is_trouble else log.info)(name, ...)`.
    """
    tables = {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=called, args=[first, *_]):
                fields = {keyword.arg or "..." for keyword in node.keywords if keyword.arg != "exc_info"}
                for level in _levels(called):
                    for name in _names(first, tables):
                        yield name, level, fields


def _levels(called: ast.expr) -> list[str]:
    """Return the levels at which a call logs; none if it calls something else."""
    match called:
        case ast.Attribute(value=ast.Name(id="log"), attr=method):
            level = {"exception": "error"}.get(method, method)
            return [level] if level in LEVELS else []
        case ast.IfExp(body=body, orelse=other):
            return _levels(body) + _levels(other)
    return []


def _names(first: ast.expr, tables: dict[str, ast.Dict]) -> list[str]:
    match first:
        case ast.Constant(value=str(name)):
            return [name]
        case ast.IfExp(body=body, orelse=other):
            return _names(body, tables) + _names(other, tables)
        case ast.Subscript(value=ast.Name(id=table)) if table in tables:
            return [name for value in tables[table].values for name in _names(value, tables)]
    raise ValueError(f"the name of a log event must be a literal, got {ast.unparse(first)}; write the name in the call")


def render_page() -> str:
    rows = [
        f"| `{name}` | {', '.join(sorted(event.levels, key=LEVELS.index))} "
        f"| {', '.join(sorted(event.fields))} | {', '.join(sorted(event.modules))} |"
        for name, event in find_events().items()
    ]
    return "\n".join([_HEAD, *rows]) + "\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render_page(), encoding="utf-8")
