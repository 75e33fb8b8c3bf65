"""docs/run-file.md, written from the model: every field with its type, default and meaning.

    python -m specrl.spec.reference docs/run-file.md

A test compares the committed page with what this writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from specrl.spec.base import Empty, Union
from specrl.spec.run import RunSpec
from specrl.spec.stand_ins import section_of

_HEAD = """\
# The run file

<!-- Written by `python -m specrl.spec.reference docs/run-file.md` from services/specrl/spec. Never edited by hand. -->

What a run is, in one YAML file: the input of `specrl run -f run.yaml`, the file in the pods and, on Kubernetes, the
`spec` of an RLJob. `specrl spec check run.yaml` checks a file and lists all that is wrong with it at once. `examples/`
has files to copy.

- Unknown fields are refused. A whole number is written without quotes, a fraction with them
  (`learningRate: "1e-5"`): run files have no floats.
- Where a table says *one of these*, exactly one field is given (`source: {jsonl: {path: train.jsonl}}`).
- Relative paths are taken from the file's folder.
- `--set generation.replicas=2` changes a field for one command.
"""


def page() -> str:
    """The whole page, as Markdown."""
    return "\n".join([_HEAD, *_section("", RunSpec, "")])


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
    kind = f"[section](#{_anchor(place)})" if _has_page(section) else _type(field)
    cells = (f"`{field.alias}`", kind, _default(field), " ".join(meaning.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _anchor(path: str) -> str:
    """GitHub's anchor of a heading: lower case, without full stops."""
    return path.replace(".", "").lower()


def _paragraph(section: type[BaseModel]) -> str:
    return " ".join((section.__doc__ or "").split())


def _type(field: FieldInfo) -> str:
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
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return ", ".join(f"`{member.value}`" for member in kind)
    return "text" if kind is str else "list of text"


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
