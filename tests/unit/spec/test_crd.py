"""The CustomResourceDefinition is valid, matches the model, and is the committed one."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from tests.rljob_admission import Manifest, Refusal, admit, read_schema, refused_by_rules
from tests.rljob_cases import (
    AT_ANY_TIME,
    CASES,
    NEVER,
    ONE_NODE,
    TWO_NODES,
    WHILE_SUSPENDED,
    a_job,
    changes_of,
    manifest_of,
)
from typer.testing import CliRunner

from specrl.cli import app
from specrl.spec.base import ChangePolicy, EmptySection, find_section
from specrl.spec.rljob.crd import build_definition, render_chart_template, render_definition
from specrl.spec.rljob.status import RLJobStatus
from specrl.spec.run import RunSpec
from specrl.spec.store import SqliteStore

REPOSITORY = Path(__file__).parents[3]
CHART = REPOSITORY / "deploy" / "helm" / "templates" / "crd" / "rljobs.yaml"
SPEC: dict[str, Any] = read_schema()["properties"]["spec"]


def nodes(found: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every schema in a schema, with its path."""
    yield path, found
    for name, inner in found.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    if "items" in found:
        yield from nodes(found["items"], f"{path}[]")


def at(path: str, found: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema at a path such as `.spec.model`. Raises KeyError if there is none."""
    place = read_schema() if found is None else found
    for part in path.removeprefix(".").split("."):
        place = place["properties"][part]
    return place


def test_the_chart_installs_the_committed_definition_and_kubectl_the_same() -> None:
    assert CHART.read_text(encoding="utf-8") == render_chart_template(), "run: make gen"
    printed = CliRunner().invoke(app, ["crd"])
    assert printed.exit_code == 0
    assert printed.stdout == render_definition()
    assert yaml.safe_load(render_definition()) == build_definition()
    lines = render_chart_template().splitlines(keepends=True)
    annotations = lines.index("  annotations:\n")
    kept = [line for line in lines if not line.startswith("{{-")]
    assert lines[annotations - 1] == "{{- if .Values.crds.keep }}\n"
    assert [
        line for line in kept if "resource-policy" not in line and line != "  annotations:\n"
    ] == render_definition().splitlines(keepends=True)


def test_the_definition_can_be_applied_by_the_client() -> None:
    # kubectl apply stores the whole object in an annotation. Annotations of one object are limited to 256 KiB.
    assert len(json.dumps(build_definition())) < 200 * 1024


def test_the_schema_is_structural() -> None:
    allowed = {
        *("type", "description", "properties", "required", "items", "default", "enum", "format", "pattern"),
        *("minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems", "maxProperties"),
        *("nullable", "additionalProperties"),  # of a podTemplate's maps, in which null removes a key
        *("x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
        "x-kubernetes-preserve-unknown-fields",
    }
    empty = {".spec.generation.speculation.none", ".spec.store.sqlite", ".spec.telemetry.sinks.tensorboard"}
    assert (EmptySection.model_fields, SqliteStore.model_fields) == ({}, {})
    for path, node in nodes(read_schema()):
        assert set(node) <= allowed, path
        assert node["type"] in {"object", "array", "string", "integer", "boolean"}, path
        if node["type"] == "object" and path not in {*empty, ".metadata"}:
            kinds = ("properties", "additionalProperties", "x-kubernetes-preserve-unknown-fields")
            assert any(node.get(kind) for kind in kinds), path
        assert set(node.get("required", [])) <= set(node.get("properties", {})), path


def test_every_text_and_list_has_a_maximum_length() -> None:
    """Without a maximum, the API server's cost estimate assumes megabytes and refuses every rule about the text."""
    for path, node in nodes(read_schema()):
        if path in {".apiVersion", ".kind"}:
            continue
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node or node.get("format") == "date-time", path
        if node["type"] == "array":
            assert node["maxItems"] <= 64, path
            assert node["x-kubernetes-list-type"] in {"atomic", "map"}, path


def test_every_field_of_the_model_is_in_the_schema_with_description_and_default() -> None:
    def compare(section: Any, found: dict[str, Any], path: str) -> None:
        names = {str(field.alias): field for field in section.model_fields.values() if path or field.alias != "name"}
        assert set(names) == set(found.get("properties", {})), path
        for alias, field in names.items():
            inner = find_section(field)
            node = found["properties"][alias]
            assert node["description"], f"{path}.{alias}"
            assert (alias in found.get("required", [])) == field.is_required(), f"{path}.{alias}"
            assert ("default" in node) == (not field.is_required() and field.default is not None), f"{path}.{alias}"
            if inner is not None:
                compare(inner, node.get("items", node), f"{path}.{alias}")

    compare(RunSpec, SPEC, "")
    compare(RLJobStatus, read_schema()["properties"]["status"], "status")


def test_defaults_are_those_of_the_model() -> None:
    for case in CASES:
        stored, _ = admit(a_job(case.accepted))
        spec = RunSpec.model_validate({"name": "job", **stored["spec"]})
        again = manifest_of(spec)["spec"]
        assert _without_decimals(again) == _without_decimals(stored["spec"])


def _without_decimals(value: Any) -> Any:
    """Compare decimals as numbers: 1e-5 equals 0.00001."""
    if isinstance(value, dict):
        return {name: _without_decimals(inner) for name, inner in value.items()}
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def test_defaults_are_complete_and_break_no_rule() -> None:
    """The API server refuses a definition with a default that breaks a rule, or lacks a field that a rule reads."""
    for path, node in nodes(read_schema()):
        if "default" in node:
            assert refused_by_rules(node, node["default"]) == [], path


def test_columns_scale_and_rules_point_at_fields_that_exist() -> None:
    version = build_definition()["spec"]["versions"][0]
    columns = {column["name"]: column for column in version["additionalPrinterColumns"]}
    first = [name for name, column in columns.items() if "priority" not in column]
    assert first == ["State", "Step", "Steps", "Replicas", "Ready", "Exposed", "Restarts", "Age"]
    for name, column in columns.items():
        if name not in {"Age", "Message"}:
            assert at(column["jsonPath"])["type"] == column["type"], name
    scale = version["subresources"]["scale"]
    assert at(scale["specReplicasPath"])["default"] == 1, "/scale fails where there are no replicas"
    assert at(scale["statusReplicasPath"])["type"] == "integer"
    assert at(scale["labelSelectorPath"])["type"] == "string"
    for path, node in nodes(read_schema()):
        for rule in node.get("x-kubernetes-validations", []):
            assert len(rule["message"]) < 2048
            if "fieldPath" in rule:
                assert at(rule["fieldPath"], node)["type"], path


def test_fields_named_like_reserved_words_of_cel_are_escaped() -> None:
    """With an unescaped name, the API server's cost estimate finds no maximum length, and refuses the rule."""
    words = "as|break|const|continue|else|false|for|function|if|import|in|let|loop|namespace|null|package|return|true"
    for path, node in nodes(read_schema()):
        for rule in node.get("x-kubernetes-validations", []):
            assert re.search(rf"\.({words})\b(?!\()", rule["rule"]) is None, (path, rule)


def test_conditions_are_a_map_by_type_and_have_an_observed_generation() -> None:
    conditions = at(".status.conditions")
    assert (conditions["x-kubernetes-list-type"], conditions["x-kubernetes-list-map-keys"]) == ("map", ["type"])
    fields = conditions["items"]
    assert fields["required"] == ["type", "status", "lastTransitionTime", "reason", "message"]
    assert "observedGeneration" in fields["properties"]
    assert at(".status.observedGeneration")["type"] == "integer"


@pytest.mark.parametrize(
    ("name", "is_sound"),
    [("a", True), ("a" * 34, True), ("q3-8b", True), ("a" * 35, False), ("3b", False), ("a-", False), ("A", False)],
)
def test_names_of_jobs_follow_the_rule_of_run_names(name: str, is_sound: bool) -> None:
    _, refusals = admit(a_job(name=name))
    assert [refusal.path for refusal in refusals] == ([] if is_sound else [""])
    assert all("at most 34 lower-case letters" in refusal.message for refusal in refusals)


def ids(changes: list[tuple[str, Manifest, Manifest]]) -> list[str]:
    return [f"{path}-{number}" for number, (path, _, _) in enumerate(changes)]


@pytest.mark.parametrize(("path", "before", "after"), changes_of(NEVER), ids=ids(changes_of(NEVER)))
def test_immutable_fields_cannot_be_changed(path: str, before: Manifest, after: Manifest) -> None:
    stored, refusals = admit(before)
    assert refusals == []
    message = f"{path} cannot be changed, added or removed; create a new job"
    assert admit(after, stored)[1] == [Refusal(f"spec.{path}", message)]
    stored["spec"]["suspend"] = after["spec"]["suspend"] = True
    assert admit(after, stored)[1] == [Refusal(f"spec.{path}", message)], "not while it is suspended, either"
    assert admit(stored, stored)[1] == []


def test_nodes_and_gpus_of_a_trainer_cannot_be_changed() -> None:
    fields = ("trainer.numNodes", "trainer.gpusPerNode")
    refused = {Refusal(f"spec.{it}", f"{it} cannot be changed, added or removed; create a new job") for it in fields}
    assert set(admit(TWO_NODES, admit(ONE_NODE)[0])[1]) == refused


SUSPENDED = changes_of(WHILE_SUSPENDED)


@pytest.mark.parametrize(("path", "before", "after"), SUSPENDED, ids=ids(SUSPENDED))
def test_pod_settings_can_be_changed_only_while_suspended(path: str, before: Manifest, after: Manifest) -> None:
    message = f"{path} can only be changed while the job is suspended; set suspend: true first"
    assert admit(after, admit(before)[0])[1] == [Refusal(f"spec.{path}", message)]
    after["spec"]["suspend"] = True
    assert admit(after, admit(before)[0])[1] == [Refusal(f"spec.{path}", message)], "its pods are still there"
    before["spec"]["suspend"] = True
    assert admit(after, admit(before)[0])[1] == []
    after["spec"]["suspend"] = False
    assert admit(after, admit(before)[0])[1] == [], "the change may resume the job"


@pytest.mark.parametrize(("path", "before", "after"), changes_of(AT_ANY_TIME), ids=ids(changes_of(AT_ANY_TIME)))
def test_mutable_fields_can_be_changed_at_any_time(path: str, before: Manifest, after: Manifest) -> None:
    assert admit(after, admit(before)[0])[1] == [], path


def test_every_field_has_been_changed_in_a_test() -> None:
    transitions = [rule for rule in SPEC["x-kubernetes-validations"] if "oldSelf" in rule["rule"]]
    assert {rule["fieldPath"][1:] for rule in transitions} == {*NEVER, *WHILE_SUSPENDED, "trainer.gpusPerNode"}

    def free(section: Any, path: str) -> Iterator[str]:
        for field in section.model_fields.values():
            place = f"{path}.{field.alias}".removeprefix(".")
            inner = find_section(field)
            if ChangePolicy.ANY_TIME in field.metadata:
                yield place
            elif inner is not None:
                yield from free(inner, place)

    assert set(free(RunSpec, "")) == set(AT_ANY_TIME)


def test_optional_fields_are_also_tested_absent() -> None:
    for path, values in {**NEVER, **WHILE_SUSPENDED}.items():
        rule = next(
            it["rule"]
            for it in SPEC["x-kubernetes-validations"]
            if it.get("fieldPath") == f".{path}" and "old" in it["rule"]
        )
        assert ("has(" in rule) <= (... in values), path


@pytest.mark.parametrize(
    ("changes", "path"),
    [
        ({"generation.replicas": 0}, "spec.generation.replicas"),
        ({"generation.replicas": "2"}, "spec.generation.replicas"),
        ({"trainer.optimizer.learningRate": 0.1}, "spec.trainer.optimizer.learningRate"),
        ({"trainer.optimizer.learningRate": "fast"}, "spec.trainer.optimizer.learningRate"),
        ({"placement": {"nvlink": "Maybe"}}, "spec.placement.nvlink"),
        ({"volumes": [{"claimName": "", "mountPath": "/a"}]}, "spec.volumes.0.claimName"),
        ({"schedule": ...}, "spec"),
    ],
)
def test_wrong_types_and_values_are_refused_by_the_schema(changes: dict[str, Any], path: str) -> None:
    assert [refusal.path for refusal in admit(a_job(changes))[1]] == [path]


def test_no_string_of_the_definition_is_a_number_in_yaml_1_2() -> None:
    """PyYAML reads a bare 1e-8 as text. Helm and kubectl read it as a number, which the API server refuses."""
    assert re.findall(r": [-+]?\d+(?:\.\d*)?[eE][-+]?\d+$", render_definition(), re.MULTILINE) == []
