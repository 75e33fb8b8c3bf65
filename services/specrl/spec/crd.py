"""The CustomResourceDefinition of RLJob, written from the model and its rules.

    python -m specrl.spec.crd deploy/helm/templates/crd/rljobs.yaml     what `make gen` runs
    specrl crd | kubectl apply -f -                                     the same object without Helm

One object, two ways to install it: the chart's file is what `definition` gives with two conditions of Helm's around
it. A structural schema (no references, no null, defaults in it), and CEL for the rest, so that no webhook is needed:
a dead operator must not block writes. Three kinds of CEL rules, all written here: those of `rules.py` and
`cluster_rules.py`, at the section that each is about; what may change later, from the fields' `Change`; the name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_origin

import yaml
from annotated_types import MaxLen
from pydantic import BaseModel, TypeAdapter
from pydantic.fields import FieldInfo

from specrl.spec.base import Change
from specrl.spec.cluster_rules import CLUSTER_RULES
from specrl.spec.rljob import GROUP, KIND, PLURAL, VERSION
from specrl.spec.rules import RULES
from specrl.spec.run import RunSpec
from specrl.spec.stand_ins import section_of
from specrl.spec.status import Condition, RLJobStatus

Schema = dict[str, Any]

_COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Steps", "integer", ".spec.schedule.steps", 0),
    ("Gen-Ready", "integer", ".status.generation.readyReplicas", 0),
    ("Gen", "integer", ".spec.generation.replicas", 0),
    ("Exposed", "string", ".status.progress.exposedGenerationShare", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Lag", "integer", ".status.progress.policyLag", 1),
    ("Accept-Len", "string", ".status.progress.acceptanceLength", 1),
    ("Queue", "string", ".spec.scheduling.queueName", 1),
    ("Domain", "string", ".status.placement.domain", 1),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', 1),
)
"""Of `kubectl get`; those with 1 only with `-o wide`."""
_MESSAGES = {
    Change.SUSPENDED: "can only be changed while the job is suspended; set suspend: true first",
    None: "cannot be changed, added or removed; make a new job",
}
_LIST_KEYS: dict[type[BaseModel], Schema] = {
    Condition: {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
}
"""Lists whose entries are told apart by a key, so that each can be applied alone."""


def definition() -> Schema:
    """The whole CustomResourceDefinition."""
    names = {
        "kind": KIND,
        "listKind": f"{KIND}List",
        "plural": PLURAL,
        "singular": KIND.lower(),
        "shortNames": ["rlj"],
        "categories": ["specrl"],
    }
    scale = {
        "specReplicasPath": ".spec.generation.replicas",
        "statusReplicasPath": ".status.generation.replicas",
        "labelSelectorPath": ".status.generation.selector",
    }
    columns = [
        {"name": name, "type": kind, "jsonPath": path} | ({"priority": priority} if priority else {})
        for name, kind, path, priority in _COLUMNS
    ]
    version = {
        "name": VERSION,
        "served": True,
        "storage": True,
        "subresources": {"status": {}, "scale": scale},
        "selectableFields": [{"jsonPath": ".spec.scheduling.queueName"}],
        "additionalPrinterColumns": columns,
        "schema": {"openAPIV3Schema": _object_schema()},
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL}.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": [version]},
    }


class _Dumper(yaml.SafeDumper):
    """Quotes what only newer YAML than PyYAML's takes for a number: to Helm and kubectl a bare 1e-8 is no string."""


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def page() -> str:
    """The definition as YAML."""
    text: str = yaml.dump(definition(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def chart_page() -> str:
    """The definition as a template of the chart: `crds.enabled` installs it, `crds.keep` keeps it past the release."""
    text = page()
    assert "{{" not in text, "Helm would read it"
    head, metadata, rest = text.partition(f"metadata:\n  name: {PLURAL}.{GROUP}\n")
    keep = "{{- if .Values.crds.keep }}\n  annotations:\n    helm.sh/resource-policy: keep\n{{- end }}\n"
    origin = "{{- /* Written by `make gen` from services/specrl/spec. Never edited by hand. */ -}}\n"
    return origin + "{{- if .Values.crds.enabled }}\n" + head + metadata + keep + rest + "{{- end }}\n"


def _object_schema() -> Schema:
    name = RunSpec.model_fields["name"]
    (pattern,) = (bound.pattern for bound in name.metadata if getattr(bound, "pattern", None))
    is_name = {
        "rule": f"self.metadata.name.matches(r'{pattern}')",
        "message": "metadata.name must be at most 34 lower-case letters, digits and dashes, beginning with a letter; "
        "the names of pods and services are made from it",
        "reason": "FieldValueInvalid",
    }
    return {
        "type": "object",
        "description": "RLJob runs one job of reinforcement-learning post-training: a coordinator, a trainer, and "
        "replicas of generation that scale on their own.",
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string"},
            "kind": {"type": "string"},
            "metadata": {"type": "object"},
            "spec": _spec_schema(),
            "status": _section_schema(RLJobStatus),
        },
        "x-kubernetes-validations": [is_name],
    }


def _spec_schema() -> Schema:
    schema = _section_schema(RunSpec)
    del schema["properties"]["name"]
    schema["required"].remove("name")
    schema["x-kubernetes-validations"] += list(_transitions(RunSpec, ""))
    return schema


def _section_schema(section: type[BaseModel]) -> Schema:
    fields = {str(field.alias): field for field in section.model_fields.values()}
    schema: Schema = {"type": "object", "description": _words(section.__doc__)}
    required = [alias for alias, field in fields.items() if field.is_required()]
    if fields:
        schema["properties"] = {alias: _field_schema(field) for alias, field in fields.items()}
    if required:
        schema["required"] = required
    rules = [
        {"rule": rule.cel, "message": rule.message} | ({"fieldPath": f".{rule.field}"} if rule.field else {})
        for rule in (*RULES, *CLUSTER_RULES)
        if rule.on is section
    ]
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def _field_schema(field: FieldInfo) -> Schema:
    section = section_of(field)
    if section is None:
        schema = _value_schema(field)
    elif _is_list(field):
        (longest,) = (bound.max_length for bound in field.metadata if isinstance(bound, MaxLen))
        schema = {"type": "array", "items": _section_schema(section), "maxItems": longest}
        schema |= _LIST_KEYS.get(section, {"x-kubernetes-list-type": "atomic"})
    else:
        schema = _section_schema(section)
    if field.description:
        schema["description"] = _words(field.description)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default is not None:
        schema["default"] = _plain(default)
    return schema


def _is_list(field: FieldInfo) -> bool:
    return get_origin(field.annotation) is tuple


def _value_schema(field: FieldInfo) -> Schema:
    """A field that holds a value, or a list of them, as pydantic describes it, without references and nulls."""
    marks = [mark for mark in field.metadata if not isinstance(mark, Enum)]
    annotation: Any = Annotated[(field.annotation, *marks)] if marks else field.annotation
    described = TypeAdapter(annotation).json_schema()
    if "anyOf" in described:
        (kind,) = (kind for kind in described["anyOf"] if kind != {"type": "null"})
        described = {**kind, "$defs": described.get("$defs", {})}
    if "$ref" in described:
        described = described["$defs"][described["$ref"].removeprefix("#/$defs/")]
    schema = {key: value for key, value in described.items() if key not in {"$defs", "title", "description"}}
    if schema["type"] == "integer":
        schema["format"] = "int32" if schema.get("maximum", 2**63) < 2**31 else "int64"
    if schema["type"] == "array":
        schema["x-kubernetes-list-type"] = "atomic"
    return schema


def _plain(default: Any) -> Any:
    """A default as it stands in a file, whole: an API server tries a section's rules on it before it fills in any."""
    if isinstance(default, BaseModel):
        return default.model_dump(mode="json", by_alias=True, exclude_none=True)
    return TypeAdapter(type(default)).dump_python(default, mode="json")


def _words(text: str | None) -> str:
    return " ".join((text or "").split())


def _transitions(section: type[BaseModel], path: str) -> Iterator[Schema]:
    """A rule for every field, or section without exceptions in it, that may not be changed at any time.

    `self == oldSelf` alone would let an optional field be removed or added.
    """
    for field in section.model_fields.values():
        place, inner = f"{path}.{field.alias}", section_of(field)
        change = next((mark for mark in field.metadata if isinstance(mark, Change)), None)
        if place == ".name" or change is Change.ANY_TIME:
            continue
        if change is None and inner is not None and not _is_list(field) and _has_exceptions(inner):
            yield from _transitions(inner, place)
            continue
        new, old = f"self{place}", f"oldSelf{place}"
        same = f"{new} == {old}"
        if not field.is_required() and field.default is None:
            same = f"has({new}) == has({old}) && (!has({new}) || {same})"
        rule = same if change is None else f"oldSelf.suspend || ({same})"
        yield {"rule": rule, "message": f"{place[1:]} {_MESSAGES[change]}", "fieldPath": place}


def _has_exceptions(section: type[BaseModel]) -> bool:
    """Whether any field in it may be changed."""
    for field in section.model_fields.values():
        inner = section_of(field)
        if any(isinstance(mark, Change) for mark in field.metadata) or (inner is not None and _has_exceptions(inner)):
            return True
    return False


def main() -> None:
    """Write the chart's file to the path named on the command line."""
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(chart_page(), encoding="utf-8")


if __name__ == "__main__":
    main()
