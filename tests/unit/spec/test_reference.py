"""The page about run files, the schema and the examples agree with the model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from specrl.spec import RunSpec
from specrl.spec.base import Section, find_section
from specrl.spec.data import VerifierSection
from specrl.spec.reference import render_page
from specrl.spec.rules.cluster_rules import CLUSTER_RULES
from specrl.spec.rules.run_rules import RULES
from specrl.spec.store import Store

REPOSITORY = Path(__file__).parents[3]


def sections(model: type[Any] = RunSpec) -> Iterator[type[Any]]:
    yield model
    for field in model.model_fields.values():
        inner = find_section(field)
        if inner is not None:
            yield from sections(inner)


def test_the_committed_page_is_the_generated_one() -> None:
    committed = (REPOSITORY / "docs" / "run-file.md").read_text(encoding="utf-8")
    assert committed == render_page().rstrip("\n") + "\n", "run: python -m specrl.spec.reference docs/run-file.md"


def test_the_page_lists_every_field_with_a_meaning() -> None:
    fields, _, rules = render_page().partition("## Rules")
    assert all(rule.must in rules and rule.remedy in rules for rule in (*RULES, *CLUSTER_RULES))
    rows = [line for line in fields.splitlines() if line.startswith("| `")]
    # The verifiers of a sum are those of `rewards`, and have their tables there.
    elsewhere = sum(len(section.model_fields) for section in sections(VerifierSection))
    assert len(rows) + elsewhere == sum(len(section.model_fields) for section in sections())
    for row in rows:
        assert row.rstrip(" |").count(" | ") >= 3, f"a field without a docstring: {row}"


def test_sections_reject_unknown_fields_and_are_frozen() -> None:
    for section in sections():
        assert issubclass(section, Section)
        assert section.model_config["extra"] == "forbid"
        assert section.model_config["frozen"] is True


def kinds(schema: Any) -> Iterator[Any]:
    if isinstance(schema, dict):
        yield from [schema["type"]] if isinstance(schema.get("type"), str) else []
        for value in schema.values():
            yield from kinds(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from kinds(value)
    elif isinstance(schema, float):
        yield "number"  # a default or a bound


def test_there_are_no_floats_in_the_schema() -> None:
    found = set(kinds(RunSpec.model_json_schema()))
    assert found == {"object", "string", "integer", "boolean", "array", "null"}


def test_the_snippet_on_the_page_about_the_store_is_a_store() -> None:
    text = (REPOSITORY / "docs" / "store.md").read_text(encoding="utf-8")
    indented = [line[4:] for line in text.splitlines() if line.startswith("    ")]
    first = indented.index("store:")
    last = next(place for place, line in enumerate(indented) if place > first and not line.startswith(" "))
    store = Store.model_validate(yaml.safe_load("\n".join(indented[first:last]))["store"])
    assert store.redis is not None
    assert store.redis.replica_acks == 1
