"""Generate docs/run-file.md from the model: every field with its type, default and meaning.

    python -m specrl.spec.reference docs/run-file.md

`make gen` runs it. A test compares the committed page with the generated one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from pydantic.fields import FieldInfo

from specrl.spec.base import DECIMAL_PATTERN, EmptySection, Section, UnionSection, find_section, walk_section_types
from specrl.spec.data import VerifierSection
from specrl.spec.rljob.crd import build_value_schema, is_list
from specrl.spec.rules.cluster_rules import CLUSTER_RULES
from specrl.spec.rules.rule import Rule
from specrl.spec.rules.run_rules import RULES
from specrl.spec.run import RunSpec

_HEAD = """\
# The run file

<!-- Written by `python -m specrl.spec.reference docs/run-file.md` from services/specrl/spec. Never edited by hand. -->

One YAML file defines a run. It is the input of `specrl run -f run.yaml`, the file in the pods and, on Kubernetes, the
`spec` of an RLJob ([rljob.md](rljob.md)). `examples/` has files to copy.

`specrl spec check run.yaml` checks a file. It lists all malformed fields or, if every field parses, all broken rules.
With `--preflight` it also lists everything that `specrl run` would refuse on this machine: models, data, packages,
ports, memory. `specrl run run.yaml --dry-run` does so, too, and shows the first prompt, a graded reference, memory and
time.

- Unknown fields are rejected, and so is a field that is given twice.
- Numbers are written as numbers: `groupSize: 8`, `learningRate: 1e-5`. In an RLJob, the fields of type *decimal* are
  written in quotes (`learningRate: "1e-5"`), because Kubernetes' API has no fractions. A run file may do the same.
- Where a section says *give exactly one of these*, it has exactly one field (`source: {jsonl: {path: train.jsonl}}`).
- Relative paths are relative to the file's folder. In an RLJob, paths must be absolute; they are paths in the pods.
- `--set generation.replicas=2` changes a field for one command. Items of lists have numbers from 0:
  `--set rewards.sum.terms.0.weight=0.5`.
"""


_SHOWN_AT: dict[type[Section], str] = {VerifierSection: "rewards"}
"""Sections whose fields another section has as well, which has their tables."""

_RULES_HEAD = """\
## Rules

Rules that the type of a field does not express. `specrl spec check` and `specrl run` check them in every run file. On a
cluster the API server checks them, with the same messages.

| field | rule | if it is broken |
|---|---|---|"""
_CLUSTER_RULES_HEAD = """
The following rules concern clusters. They apply to RLJobs only.

| field | rule | if it is broken |
|---|---|---|"""


def render_page() -> str:
    """Render the whole page as Markdown."""
    places = dict(walk_section_types(RunSpec))
    rules = [
        _RULES_HEAD,
        *_render_rule_rows(RULES, places),
        _CLUSTER_RULES_HEAD,
        *_render_rule_rows(CLUSTER_RULES, places),
    ]
    return "\n".join([_HEAD, *_render_section("", RunSpec, ""), *rules])


def _render_rule_rows(rules: Sequence[Rule[Any]], places: dict[str, type[Section]]) -> Iterator[str]:
    """Yield table rows of rules. Rules with the same words share a row."""
    fields: dict[tuple[str, str], list[str]] = {}
    for rule in rules:
        found = (f"{path}.{rule.field}".strip(".") for path, section in places.items() if section is rule.on)
        fields.setdefault((rule.must, rule.remedy), []).extend(found)
    for words, paths in fields.items():
        # A bar would end the table's cell, so it is escaped.
        cells = (", ".join(f"`{path}`" for path in paths), *words)
        yield "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _render_section(path: str, section: type[Section], meaning: str) -> Iterator[str]:
    """Yield one section's heading and table, followed by the sections in it."""
    yield f"## {path}\n" if path else "## Top level\n"
    yield f"{meaning or _join_docstring(section)}\n"
    if section in _SHOWN_AT:
        place = _SHOWN_AT[section]
        yield f"Give exactly one of the verifiers of [{place}](#{_make_anchor(place)}), with the same settings.\n"
        return
    if issubclass(section, UnionSection):
        yield "Give exactly one of these.\n"
    nested = [field for field in section.model_fields.values() if _has_page(find_section(field))]
    if section.model_fields:
        yield "| field | type | default | meaning |\n|---|---|---|---|"
        yield "".join(f"{_render_row(path, field)}\n" for field in section.model_fields.values())
    for field in nested:
        inner = find_section(field)
        assert inner is not None
        yield from _render_section(f"{path}.{field.alias}".removeprefix("."), inner, field.description or "")


def _has_page(section: type[Section] | None) -> bool:
    return section is not None and section is not EmptySection and bool(section.model_fields)


def _render_row(path: str, field: FieldInfo) -> str:
    section = find_section(field)
    meaning = field.description or (_join_docstring(section) if section is not None else "")
    place = f"{path}.{field.alias}".removeprefix(".")
    kind = _describe_type(field)
    if _has_page(section):
        kind = f"[{'list' if is_list(field) else 'section'}](#{_make_anchor(place)})"
    cells = (f"`{field.alias}`", kind, _describe_default(field), " ".join(meaning.split()))
    return "| " + " | ".join(cell.replace("|", r"\|") for cell in cells) + " |"


def _make_anchor(path: str) -> str:
    """Return GitHub's anchor of a heading: lower case, without dots."""
    return path.replace(".", "").lower()


def _join_docstring(section: type[Section]) -> str:
    return " ".join((section.__doc__ or "").split())


def _describe_type(field: FieldInfo) -> str:
    is_section = find_section(field) is not None
    if is_list(field):
        return "list of `{}`" if is_section else "list of text"
    if is_section:
        return "`{}`"
    schema = build_value_schema(field)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema["type"] == "integer":
        bounds = ((">=", "minimum"), ("<=", "maximum"))
        return "whole number" + "".join(f", {sign} {schema[name]}" for sign, name in bounds if name in schema)
    if schema.get("pattern") == DECIMAL_PATTERN:
        return "decimal"
    return {"boolean": "`true`, `false`", "object": "mapping"}.get(schema["type"], "text")


def _describe_default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, Section):
        # Only what differs from the section's own defaults, which its table shows.
        given = value.model_dump(mode="json", by_alias=True, exclude_defaults=True)
        return f"`{json.dumps(given)}`" if given else "its defaults"
    return "null" if value is None else f"`{json.dumps(value)}`"


def main() -> None:
    """Write the page to the file named on the command line."""
    Path(sys.argv[1]).write_text(render_page().rstrip("\n") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
