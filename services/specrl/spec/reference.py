"""docs/run-file.md, written from the model: every field with its type, default and meaning.

    python -m specrl.spec.reference docs/run-file.md

A test compares the committed page with what this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specrl.spec.base import Empty, Union
from specrl.spec.cluster_rules import CLUSTER_RULES
from specrl.spec.rule import Rule
from specrl.spec.rules import RULES
from specrl.spec.run import RunSpec
from specrl.spec.stand_ins import section_of

_HEAD = """\
# The run file

<!-- Written by `python -m specrl.spec.reference docs/run-file.md` from services/specrl/spec. Never edited by hand. -->

What a run is, in one YAML file: the input of `specrl run -f run.yaml`, the file in the pods and, on Kubernetes, the
`spec` of an RLJob ([rljob.md](rljob.md)). `specrl spec check run.yaml` checks a file and lists all that is wrong with
it at once. `examples/` has files to copy.

- Unknown fields are refused. A whole number is written without quotes, a fraction with them
  (`learningRate: "1e-5"`): run files have no floats.
- Where a table says *one of these*, exactly one field is given (`source: {jsonl: {path: train.jsonl}}`).
- Relative paths are taken from the file's folder. In an RLJob paths are absolute, and mean the pods'.
- `--set generation.replicas=2` changes a field for one command.
"""


_RULES_HEAD = """\
## Rules

What a type alone does not say. `specrl spec check` and `specrl run` try them on every run file; on a cluster the API
server does, in the same words.

| field | rule | otherwise |
|---|---|---|"""
_CLUSTER_RULES_HEAD = """
These are about clusters; only RLJobs are held to them.

| field | rule | otherwise |
|---|---|---|"""


def page() -> str:
    """The whole page, as Markdown."""
    places = dict(_places(RunSpec, ""))
    rules = [_RULES_HEAD, *_rule_rows(RULES, places), _CLUSTER_RULES_HEAD, *_rule_rows(CLUSTER_RULES, places)]
    return "\n".join([_HEAD, *_section("", RunSpec, ""), *rules])


def _places(section: type[BaseModel], path: str) -> Iterator[tuple[str, type[BaseModel]]]:
    """Every place where a section stands."""
    yield path, section
    for field in section.model_fields.values():
        inner = section_of(field)
        if inner is not None:
            yield from _places(inner, f"{path}.{field.alias}".removeprefix("."))


def _rule_rows(rules: Sequence[Rule], places: dict[str, type[BaseModel]]) -> Iterator[str]:
    """One row for all fields that one rule is about."""
    fields: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        found = (f"{path}.{rule.field}".strip(".") for path, section in places.items() if section is rule.on)
        fields.setdefault((rule.must, rule.remedy), []).extend(found)
    for words, paths in fields.items():
        cells = (", ".join(f"`{path}`" for path in paths), *words)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _section(path: str, section: type[BaseModel], meaning: str) -> Iterator[str]:
    """One section as a heading and a table, followed by the sections in it."""
    yield f"## {path}\n" if path else "## Top level\n"
    yield f"{meaning or _paragraph(section)}\n"
    if issubclass(section, Union):
        yield "Give exactly one of these.\n"
    nested = [field for field in section.model_fields.values() if _has_page(section_of(field))]
    if section.model_fields:
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        yield "".join(f"{_row(path, field)}\n" for field in section.model_fields.values())
    for field in nested:
        inner = section_of(field)
        assert inner is not None
        yield from _section(f"{path}.{field.alias}".removeprefix("."), inner, field.description or "")


def _has_page(section: type[BaseModel] | None) -> bool:
    return section is not None and section is not Empty and bool(section.model_fields)


def _row(path: str, field: FieldInfo) -> str:
    section = section_of(field)
    meaning = field.description or (_paragraph(section) if section is not None else "")
    place = f"{path}.{field.alias}".removeprefix(".")
    is_list = get_origin(field.annotation) is tuple
    kind = f"[{'list' if is_list else 'section'}](#{_anchor(place)})" if _has_page(section) else _type(field)
    cells = (f"`{field.alias}`", kind, _default(field), " ".join(meaning.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _anchor(path: str) -> str:
    """GitHub's anchor of a heading: lower case, without full stops."""
    return path.replace(".", "").lower()


def _paragraph(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _type(field: FieldInfo) -> str:
    if get_origin(field.annotation) is tuple:
        return "list of `{}`" if section_of(field) is not None else "list of text"
    members = [member for member in get_args(field.annotation) if member is not type(None)] or [field.annotation]
    kind: Any = members[0]
    bounds = list(field.metadata)
    if get_origin(kind) is Annotated:  # an optional number keeps its bounds inside
        kind, *inside = get_args(kind)
        bounds += [bound for item in inside for bound in getattr(item, "metadata", ())]
    if section_of(field) is not None:
        return "`{}`"
    if kind is bool:
        return "`true`, `false`"
    if kind is Decimal:
        return "decimal in quotes"
    if kind is int:
        return "whole number" + "".join(
            f", >= {bound.ge}" if isinstance(bound, Ge) else f", <= {bound.le}"
            for bound in bounds
            if isinstance(bound, Ge | Le)
        )
    if get_origin(kind) is dict:
        return "mapping"
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return "text"


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        given = value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return f"`{json.dumps(given)}`" if given else "its defaults"
    return "null" if value is None else f"`{json.dumps(value)}`"


def main() -> None:
    """Write the page to the file named on the command line."""
    Path(sys.argv[1]).write_text(page().rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
