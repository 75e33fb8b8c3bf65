"""Generate the CustomResourceDefinition of RLJob from the model and its rules.

    python -m specrl.spec.rljob.crd deploy/helm/templates/crd/rljobs.yaml     what `make gen` runs
    specrl crd | kubectl apply -f -                                     the same object without Helm

The chart's file is the same object inside two conditions of Helm's. The schema is structural: no references, no null,
with defaults. CEL rules check the rest, so that no webhook is needed: a dead operator must not block writes. The rules
are of three sorts:

- those of `rules/run_rules.py` and `rules/cluster_rules.py`, each at its section
- transition rules, from the fields' `ChangePolicy` marks
- the rule about the name
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_origin

import yaml
from annotated_types import MaxLen, MinLen
from pydantic import TypeAdapter
from pydantic.fields import FieldInfo

from specrl.spec.base import ChangePolicy, Section, find_section, is_optional, walk_section_types
from specrl.spec.rljob.manifest import GROUP, KIND, PLURAL, VERSION
from specrl.spec.rljob.status import Condition, RLJobStatus
from specrl.spec.rules.cluster_rules import CLUSTER_RULES
from specrl.spec.rules.run_rules import RULES
from specrl.spec.run import RunSpec

Schema = dict[str, Any]

_COLUMNS = (
    ("State", "string", ".status.state", 0),
    ("Step", "integer", ".status.progress.step", 0),
    ("Steps", "integer", ".spec.schedule.steps", 0),
    ("Replicas", "integer", ".spec.generation.replicas", 0),
    ("Ready", "integer", ".status.generation.readyReplicas", 0),
    ("Exposed", "string", ".status.progress.exposedGenerationShare", 0),
    ("Restarts", "integer", ".status.restarts", 0),
    ("Age", "date", ".metadata.creationTimestamp", 0),
    ("Exposed-S", "string", ".status.progress.exposedGenerationSeconds", 1),
    ("Hidden-S", "string", ".status.progress.hiddenGenerationSeconds", 1),
    ("Sync-S", "string", ".status.progress.weightSyncSeconds", 1),
    ("Lag", "integer", ".status.progress.policyLag", 1),
    ("Accept-Len", "string", ".status.progress.acceptanceLength", 1),
    ("Queue", "string", ".spec.scheduling.queueName", 1),
    ("Domain", "string", ".status.placement.domain", 1),
    ("Message", "string", '.status.conditions[?(@.type=="Ready")].message', 1),
)
"""Columns of `kubectl get`: name, type, path, priority. Columns with priority 1 are only shown with `-o wide`."""
_CHANGE_MESSAGES = {
    ChangePolicy.SUSPENDED: "can only be changed while the job is suspended; set suspend: true first",
    None: "cannot be changed, added or removed; create a new job",
}
_LIST_KEYS: dict[type[Section], Schema] = {
    Condition: {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
}
"""Lists whose items have a key, so that operator and coordinator can each apply their own items."""


def build_definition() -> Schema:
    """Build the whole CustomResourceDefinition."""
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
        # For `kubectl get rljobs --field-selector spec.scheduling.queueName=NAME`.
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
    """Quotes text that YAML 1.2 reads as a number and PyYAML (YAML 1.1) does not.

    Helm and kubectl would read a bare 1e-8 as a float, where the CRD needs a string.
    """


_Dumper.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def render_definition() -> str:
    """Render the definition as YAML."""
    text: str = yaml.dump(build_definition(), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)
    return text


def render_chart_template() -> str:
    """Render the definition as a template of the chart, with the conditions `crds.enabled` and `crds.keep`."""
    text = render_definition()
    assert "{{" not in text, "a description or rule contains {{, which Helm would evaluate"
    head, metadata, rest = text.partition(f"metadata:\n  name: {PLURAL}.{GROUP}\n")
    # Deleting the CRD would delete every RLJob, so `helm uninstall` can be told to keep it.
    keep = "{{- if .Values.crds.keep }}\n  annotations:\n    helm.sh/resource-policy: keep\n{{- end }}\n"
    origin = "{{- /* Written by `make gen` from services/specrl/spec. Never edited by hand. */ -}}\n"
    return origin + "{{- if .Values.crds.enabled }}\n" + head + metadata + keep + rest + "{{- end }}\n"


def _object_schema() -> Schema:
    name = RunSpec.model_fields["name"]
    (pattern,) = (bound.pattern for bound in name.metadata if getattr(bound, "pattern", None))
    # CEL instead of a pattern in the schema, so that the message can say what is allowed and why.
    is_name = {
        "rule": f"self.metadata.name.matches(r'{pattern}')",
        "message": "metadata.name must be at most 34 lower-case letters, digits and dashes, beginning with a letter; "
        "the names of pods and services are derived from it",
        "reason": "FieldValueInvalid",
    }
    return {
        "type": "object",
        "description": "RLJob is one run of reinforcement-learning post-training: a coordinator, a trainer, and "
        "generation replicas that scale separately.",
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
    del schema["properties"]["name"]  # metadata.name is the run's name
    schema["required"].remove("name")
    schema["x-kubernetes-validations"] += list(_list_transition_rules(RunSpec, ""))
    return schema


def _section_schema(section: type[Section]) -> Schema:
    fields = {str(field.alias): field for field in section.model_fields.values()}
    schema: Schema = {"type": "object", "description": _join_words(section.__doc__)}
    required = [alias for alias, field in fields.items() if field.is_required()]
    if fields:
        schema["properties"] = {alias: _field_schema(field) for alias, field in fields.items()}
    if required:
        schema["required"] = required
    rules = [
        {"rule": rule.cel, "message": rule.api_message} | ({"fieldPath": f".{rule.field}"} if rule.field else {})
        for rule in (*RULES, *CLUSTER_RULES)
        if rule.on is section
    ]
    if rules:
        schema["x-kubernetes-validations"] = rules
    return schema


def _field_schema(field: FieldInfo) -> Schema:
    section = find_section(field)
    if section is None:
        schema = build_value_schema(field)
    elif is_list(field):
        # A list without maximum length would make every rule about its items too expensive for the API server.
        (longest,) = (bound.max_length for bound in field.metadata if isinstance(bound, MaxLen))
        schema = {"type": "array", "items": _section_schema(section), "maxItems": longest}
        shortest = next((bound.min_length for bound in field.metadata if isinstance(bound, MinLen)), None)
        schema |= {"minItems": shortest} if shortest is not None else {}
        schema |= _LIST_KEYS.get(section, {"x-kubernetes-list-type": "atomic"})
    else:
        schema = _section_schema(section)
    if field.description:
        schema["description"] = _join_words(field.description)
    default = None if field.is_required() else field.get_default(call_default_factory=True)
    if default is not None:
        schema["default"] = _dump_default(default)
    return schema


def is_list(field: FieldInfo) -> bool:
    """Whether a field is a list, of scalars or of sections."""
    return get_origin(field.annotation) is tuple


def build_value_schema(field: FieldInfo) -> Schema:
    """Build the schema of a scalar or a list of scalars: pydantic's, without references and null."""
    # ChangePolicy, HubName, OnCluster and RelativePath are Enums that pydantic does not know.
    marks = [mark for mark in field.metadata if not isinstance(mark, Enum)]
    annotation: Any = Annotated[(field.annotation, *marks)] if marks else field.annotation
    described = TypeAdapter(annotation).json_schema()
    if "anyOf" in described:
        # An optional field. In a CRD it is left out instead of being null.
        (kind,) = (kind for kind in described["anyOf"] if kind != {"type": "null"})
        described = {**kind, "$defs": described.get("$defs", {})}
    if "$ref" in described:
        # An Enum, which pydantic describes under $defs.
        described = described["$defs"][described["$ref"].removeprefix("#/$defs/")]
    schema = {key: value for key, value in described.items() if key not in {"$defs", "title", "description"}}
    if schema["type"] == "integer":
        # Kubernetes' API conventions ask for an explicit width.
        schema["format"] = "int32" if schema.get("maximum", 2**63) < 2**31 else "int64"
    if schema["type"] == "array":
        schema["x-kubernetes-list-type"] = "atomic"
    return schema


def _dump_default(default: Any) -> Any:
    """Return a default as written in a file, with all nested defaults.

    The API server checks a section's rules on the default before it fills in defaults inside it.
    """
    if isinstance(default, Section):
        return default.model_dump(mode="json", by_alias=True, exclude_none=True)
    return TypeAdapter(type(default)).dump_python(default, mode="json")


def _join_words(text: str | None) -> str:
    return " ".join((text or "").split())


def _list_transition_rules(section: type[Section], path: str) -> Iterator[Schema]:
    """Yield a transition rule for every field that may not be changed at any time.

    A section without changeable fields gets one rule; otherwise its fields get their own.
    """
    for field in section.model_fields.values():
        place = f"{path}.{field.alias}"
        inner = find_section(field)
        change = next((mark for mark in field.metadata if isinstance(mark, ChangePolicy)), None)
        if place == ".name" or change is ChangePolicy.ANY_TIME:  # metadata.name is immutable anyway
            continue
        if change is None and inner is not None and not is_list(field) and _has_exceptions(inner):
            yield from _list_transition_rules(inner, place)
            continue
        new = f"self{place}"
        old = f"oldSelf{place}"
        same = f"{new} == {old}"
        # A comparison alone would not be evaluated when an optional field is added or removed.
        if is_optional(field):
            same = f"has({new}) == has({old}) && (!has({new}) || {same})"
        rule = same if change is None else f"oldSelf.suspend || ({same})"
        yield {"rule": rule, "message": f"{place[1:]} {_CHANGE_MESSAGES[change]}", "fieldPath": place}


def _has_exceptions(section: type[Section]) -> bool:
    """Whether any field of the section, at any depth, may be changed."""
    fields = (field for _, part in walk_section_types(section) for field in part.model_fields.values())
    return any(isinstance(mark, ChangePolicy) for field in fields for mark in field.metadata)


def main() -> None:
    """Write the chart's template to the path given on the command line."""
    file = Path(sys.argv[1])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(render_chart_template(), encoding="utf-8")


if __name__ == "__main__":
    main()
