"""Writes the tables of docs/scripting.md from the models of what commands print and runs write: `make gen`.

    python -m tools.scripting_page docs/scripting.md

A table stands below its heading, between the comments `<!-- fields: Name -->` and `<!-- end -->`. Meanings are the
docstrings below the fields. The table of counters stands between `<!-- counters -->` and `<!-- end -->`.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from pydantic.fields import ComputedFieldInfo, FieldInfo

from specrl.formats import checkpoint_rows, doctor_report, reports, rollout_samples, run_report
from specrl.formats.counters import COUNTERS

MODELS: tuple[type[BaseModel], ...] = (
    reports.RunState,
    reports.ReplicaReport,
    reports.RunSummary,
    reports.BestVersion,
    reports.DrafterInitReport,
    reports.DrafterAnswersPoint,
    reports.StepReport,
    reports.PhaseSeconds,
    reports.SourceReport,
    reports.ValidationReport,
    reports.PassAt,
    rollout_samples.RolloutSample,
    run_report.RunReport,
    run_report.PhaseFigures,
    run_report.SpeedFigures,
    run_report.EdgeFigures,
    run_report.ComparisonReport,
    checkpoint_rows.CheckpointRow,
    checkpoint_rows.CheckpointVerdict,
    doctor_report.DoctorReport,
    doctor_report.Finding,
)
TABLE = re.compile(r"(<!-- fields: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
COUNTER_TABLE = re.compile(r"(<!-- counters -->\n).*?(<!-- end -->)", re.DOTALL)
WORDS = {int: "whole number", float: "number", str: "text", bool: "true or false"}


def list_fields(model: type[BaseModel]) -> Iterator[tuple[str, str, str]]:
    """Yield the rows of a model: JSON key, type, meaning. Raises ValueError if a field has no meaning."""
    meanings = _read_docstrings(model)
    fields: dict[str, FieldInfo | ComputedFieldInfo] = {**model.model_fields, **model.model_computed_fields}
    for name, field in fields.items():
        meaning = meanings.get(name) or field.description
        if not meaning:
            raise ValueError(f"{model.__name__}.{name} must have a docstring below it, got none; say what it means")
        annotation = field.annotation if isinstance(field, FieldInfo) else field.return_type
        yield str(field.alias), describe_type(annotation), _name_keys(" ".join(meaning.split()))


def _name_keys(meaning: str) -> str:
    """Write the names of fields as JSON has them: `first_reward` becomes `firstReward`."""
    return re.sub(r"`([a-z]+(?:_[a-z]+)+)`", lambda match: f"`{to_camel(match[1])}`", meaning)


def describe_type(annotation: Any) -> str:
    """Describe the type of a field in JSON, in words."""
    members = [member for member in get_args(annotation) if member is not NoneType]
    origin = get_origin(annotation)
    if origin in (Union, UnionType):
        return f"{describe_type(members[0])}, null"
    if origin is list:
        return f"list of {describe_type(members[0])}"
    if origin is dict:
        return f"object of {describe_type(members[1])}"
    if isinstance(annotation, type) and issubclass(annotation, StrEnum):
        return ", ".join(f"`{item.value}`" for item in annotation)
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return f"[{annotation.__name__}](#{annotation.__name__.lower()})"
    return WORDS.get(annotation, "any value")


def render_table(model: type[BaseModel]) -> str:
    """Render the table of a model's fields."""
    rows = ["| field | type | meaning |", "|---|---|---|"]
    for key, kind, meaning in list_fields(model):
        rows.append(f"| `{key}` | {kind} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(rows)


def render_counters() -> str:
    """Render the table of the counters in a run's status."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in COUNTERS.items()]
    return "\n".join(["| counter | counts |", "|---|---|", *rows])


def replace_tables(text: str) -> str:
    """Replace every table of the page. Raises ValueError if a model has no table, or a table no model."""
    known = {model.__name__: model for model in MODELS}
    found = [match[2] for match in TABLE.finditer(text)]
    if sorted(found) != sorted(known):
        raise ValueError(f"docs/scripting.md must have one table of each of {sorted(known)}, got {sorted(found)}")
    text = TABLE.sub(lambda match: f"{match[1]}\n{render_table(known[match[2]])}\n\n{match[3]}", text)
    return COUNTER_TABLE.sub(lambda match: f"{match[1]}\n{render_counters()}\n\n{match[2]}", text)


def _read_docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Read the docstrings of a model's fields and computed fields, inherited ones included."""
    found: dict[str, str] = {}
    for cls in reversed(model.__mro__):
        if not issubclass(cls, BaseModel) or cls is BaseModel:
            continue
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(tree, ast.ClassDef)
        before: ast.stmt | None = None
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef):
                found[statement.name] = ast.get_docstring(statement) or ""
            elif isinstance(before, ast.AnnAssign) and isinstance(statement, ast.Expr):
                assert isinstance(before.target, ast.Name)
                assert isinstance(statement.value, ast.Constant)
                found[before.target.id] = str(statement.value.value)
            before = statement
    return found


def main() -> None:
    """Replace the tables in the page that the command line names."""
    file = Path(sys.argv[1])
    file.write_text(replace_tables(file.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
