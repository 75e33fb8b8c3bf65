"""Admits or refuses a created or changed RLJob by the CRD, as an API server would: defaults, schema, CEL rules.

Follows Kubernetes' documentation of custom resources, with jsonschema-rs and cel-python. It has no cost limits, no type
check of CEL, and no pruning of unknown fields. The e2e tier runs the same cases (`tests/rljob_cases.py`) on a real
server.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import celpy
import jsonschema_rs
from celpy.adapter import json_to_cel

from specrl.spec.rljob.crd import build_definition

Manifest = dict[str, Any]
_CEL = celpy.Environment()
_ESCAPED = re.compile(r"\.__([a-z]+)__")
"""A field whose name is a reserved word of CEL."""


@dataclass(frozen=True)
class Refusal:
    """One reason why an RLJob is refused: path and message."""

    path: str
    message: str


@cache
def read_schema() -> dict[str, Any]:
    """Read the OpenAPI schema of an RLJob from the CRD."""
    found: dict[str, Any] = build_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return found


@cache
def _validator() -> jsonschema_rs.Draft7Validator:
    return jsonschema_rs.Draft7Validator(read_schema())


def admit(new: Manifest, old: Manifest | None = None) -> tuple[Manifest, list[Refusal]]:
    """Return the RLJob as it would be stored, and all reasons to refuse it. old: the stored one, for a change."""
    new = copy.deepcopy(new)
    _fill(read_schema(), new)
    refusals = [
        Refusal(".".join(map(str, error.instance_path)), error.message) for error in _validator().iter_errors(new)
    ]
    if not refusals:  # the server does not run CEL on what the schema refuses
        refusals += refused_by_rules(read_schema(), new, old)
    return new, refusals


def refused_by_rules(schema: dict[str, Any], new: Any, old: Any = None) -> list[Refusal]:
    """List what CEL refuses in a value of this schema. Defaults must be filled in."""
    return list(_refused_by_rules(schema, new, old, ""))


def _fill(schema: dict[str, Any], value: Any) -> None:
    """Fill in defaults, from the outside in."""
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
            continue  # transition rules run only on changes
        if not _holds(rule["rule"], _read_by(rule["rule"], new), None if old is None else _read_by(rule["rule"], old)):
            yield Refusal(f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"])
    if isinstance(new, dict):
        for name, inner in schema.get("properties", {}).items():
            if name in new:
                before = old[name] if isinstance(old, dict) and name in old else None
                yield from _refused_by_rules(inner, new[name], before, f"{path}.{name}")
    elif isinstance(new, list):  # entries of an atomic list have no old value
        for number, item in enumerate(new):
            yield from _refused_by_rules(schema["items"], item, None, f"{path}.{number}")


def _read_by(rule: str, value: Any) -> str:
    """Return the JSON of those fields of a value that a rule reads. If it reads the whole value, return that."""
    if isinstance(value, dict) and (fields := _fields_of(rule)) is not None:
        value = {name: value[name] for name in fields if name in value}
    return json.dumps(value, sort_keys=True)


@cache
def _fields_of(rule: str) -> frozenset[str] | None:
    """Return the fields that a rule reads of `self` and `oldSelf`; None if it also reads them as a whole."""
    names = [match[1] for match in re.finditer(r"\b(?:self|oldSelf)\b(?:\.(\w+))?", _ESCAPED.sub(r".\1", rule))]
    return None if None in names else frozenset(names)


@cache  # evaluating CEL in Python takes long, and most parts of most jobs are the same
def _holds(rule: str, new: str, old: str | None) -> bool:
    scope = {"self": _value(new)} | ({} if old is None else {"oldSelf": _value(old)})
    return bool(_program(rule).evaluate(scope))


@lru_cache(maxsize=1000)
def _value(text: str) -> Any:
    return json_to_cel(json.loads(text))


@cache
def _program(rule: str) -> celpy.Runner:
    return _CEL.program(_CEL.compile(_ESCAPED.sub(r".\1", rule)))
