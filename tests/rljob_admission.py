"""What an API server does to an RLJob that is created or changed, as far as the CRD says it: defaults, schema, CEL.

Written from Kubernetes' documentation of custom resources, with jsonschema-rs and cel-python. It knows no cost limits,
no type check of CEL before it runs, and no fields that the CRD does not define, which the real server refuses or
prunes; the e2e tier gives the same cases (`tests/rljob_cases.py`) to a real one.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import celpy
import jsonschema_rs
from celpy.adapter import json_to_cel

from specrl.spec.crd import definition

Manifest = dict[str, Any]
_CEL = celpy.Environment()
_ESCAPED = re.compile(r"\.__([a-z]+)__")
"""A field that is called like a word of CEL's."""


@dataclass(frozen=True)
class Refusal:
    """One reason why an RLJob is refused: where, and in which words."""

    path: str
    message: str


@cache
def schema() -> dict[str, Any]:
    """The schema of an RLJob."""
    found: dict[str, Any] = definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@cache
def _validator() -> jsonschema_rs.Draft7Validator:
    return jsonschema_rs.Draft7Validator(schema())


def admit(new: Manifest, old: Manifest | None = None) -> tuple[Manifest, list[Refusal]]:
    """The RLJob as it would be stored, and all reasons to refuse it. old: what is stored, if it is a change."""
    new = copy.deepcopy(new)
    _fill(schema(), new)
    refusals = [
        Refusal(".".join(map(str, error.instance_path)), error.message) for error in _validator().iter_errors(new)
    ]
    if not refusals:  # CEL is not run on what the schema refuses
        refusals += refused_by_rules(schema(), new, old)
    return new, refusals


def refused_by_rules(schema: dict[str, Any], new: Any, old: Any = None) -> list[Refusal]:
    """What CEL alone refuses of a value of this schema, in which defaults are filled in."""
    return list(_refused_by_rules(schema, json_to_cel(new), None if old is None else json_to_cel(old), ""))


def _fill(schema: dict[str, Any], value: Any) -> None:
    """Defaults, from the outside in."""
    if isinstance(value, dict):
        for name, inner in schema.get("properties", {}).items():
            if name not in value and "default" in inner:
                value[name] = copy.deepcopy(inner["default"])
            if name in value:
                _fill(inner, value[name])
    elif isinstance(value, list):
        for item in value:
            _fill(schema.get("items", {}), item)


def _refused_by_rules(schema: dict[str, Any], new: Any, old: Any, path: str) -> Iterator[Refusal]:
    for rule in schema.get("x-kubernetes-validations", []):
        if "oldSelf" in rule["rule"] and old is None:
            continue  # rules about changes run on changes alone
        scope = {"self": new} | ({} if old is None else {"oldSelf": old})
        if not bool(_program(rule["rule"]).evaluate(scope)):
            yield Refusal(f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"])
    if isinstance(new, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in new:
                before = old[name] if isinstance(old, dict) and name in old else None
                yield from _refused_by_rules(inner, new[name], before, f"{path}.{name}")
    elif isinstance(new, list):  # entries of an atomic list have no old selves
        for number, item in enumerate(new):
            yield from _refused_by_rules(schema["items"], item, None, f"{path}.{number}")


@cache
def _program(rule: str) -> celpy.Runner:
    return _CEL.program(_CEL.compile(_ESCAPED.sub(r".\1", rule)))
