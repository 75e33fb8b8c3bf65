"""Load a file or a mapping as a RunSpec, and report every problem at once with path, rule and remedy.

The CLI, every process at its start and the operator call this module. Invariant: loading changes no value that is
given, except that `load_spec` makes paths absolute. It only fills in defaults.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specrl.errors import SpecInvalid, SpecProblem, raise_problems
from specrl.files import resolve_path
from specrl.spec.base import (
    IN_RLJOB,
    HubName,
    OnCluster,
    RelativePath,
    Section,
    find_field,
    find_section,
    is_decimal,
    is_gguf,
    is_hub_name,
    rewrite_sections,
)
from specrl.spec.rljob.manifest import extract_run_fields, find_envelope_problems, is_rljob
from specrl.spec.rules.cluster_rules import CLUSTER_RULES
from specrl.spec.rules.rule import find_broken_rules
from specrl.spec.rules.run_rules import RULES, UNIONS
from specrl.spec.run import Dtype, RunSpec
from specrl.spec.yaml_input import convert_error, parse_override, read_documents

_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""libyaml, if PyYAML was built with it: the operator dumps a run file in every reconciliation."""


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run file, apply `path=value` overrides, and return the RunSpec.

    Relative paths in the file are resolved against its folder; names on the hub stay. An RLJob manifest, alone or among
    others, is read as its run, and the cluster rules apply to it. Raises SpecInvalid with every problem.
    """
    spec, problems = read_spec(path, overrides)
    raise_problems(problems)
    return spec


def load_process_spec(path: Path) -> RunSpec:
    """Read the run file that a process of a run was given, or that is in the run's folder.

    Raises SpecInvalid, also when nobody has chosen the run's precision: processes could choose differently.
    """
    spec = load_spec(path)
    if spec.model.dtype is Dtype.AUTO:
        rule = "must be float32 or bfloat16 in the file of a run's folder or process, got Auto"
        remedy = "write the precision; `specrl run -f FILE` and the operator choose it when they start a run"
        raise SpecInvalid((SpecProblem("model.dtype", rule, remedy),))
    return spec


def read_spec(file: Path | Mapping[str, Any], overrides: Sequence[str] = ()) -> tuple[RunSpec, tuple[SpecProblem, ...]]:
    """Read a run file as `load_spec` does, but return the broken rules instead of raising them.

    file: its path, or its content. Relative paths in a content are resolved against the working folder.

    Callers that add their own findings use it, such as the preflight checks. Raises SpecInvalid with all malformed
    fields. If a union has no member or several, it raises all broken rules, too: callers read the member that is set.
    """
    folder = Path.cwd()
    if isinstance(file, Mapping):
        raw = deepcopy(dict(file))  # the overrides below change it
    else:
        folder = resolve_path(file).parent
        raw = _find_run_document(read_documents(file), file)
    is_manifest = is_rljob(raw)
    if is_manifest:
        raw = _read_manifest(raw)
    # Overrides are applied before the fields are checked, so that they can correct or add a field.
    raise_problems(problem for override in overrides for problem in _apply_override(raw, override))
    spec, problems = _parse_run(raw, is_rljob=is_manifest)
    if any(find_broken_rules(spec, UNIONS)):
        raise_problems(problems)
    return _resolve_paths(spec, folder), problems


def _find_run_document(documents: Sequence[Any], path: Path) -> dict[str, Any]:
    """Return the run file, or the one RLJob among other manifests. Raises SpecInvalid if there is not exactly one."""
    # An empty document, such as the one after a last `---`, is None.
    found = [document for document in documents if isinstance(document, dict)]
    if len(documents) > 1:
        found = [document for document in found if is_rljob(document)]
    if len(found) == 1:
        return found[0]
    rule = "must be a mapping of sections"
    remedy = "see examples/ for a run file"
    if len(documents) > 1:
        rule = f"must contain exactly one RLJob, got {len(found)}"
        remedy = "put each RLJob into its own file"
    raise SpecInvalid((SpecProblem(str(path), rule, remedy),))


def parse_spec(raw: dict[str, Any], *, is_rljob: bool = False) -> RunSpec:
    """Parse a mapping and check every cross-field rule. is_rljob: check the cluster rules, too.

    Raises SpecInvalid with all malformed fields; if every field parses, with all broken rules.
    """
    spec, problems = _parse_run(raw, is_rljob=is_rljob)
    raise_problems(problems)
    return spec


def _parse_run(raw: dict[str, Any], *, is_rljob: bool) -> tuple[RunSpec, tuple[SpecProblem, ...]]:
    """Return the run and the rules that it breaks. Raises SpecInvalid with all malformed fields."""
    rules = (*RULES, *CLUSTER_RULES) if is_rljob else RULES
    # Rules read several fields at once, so they can only be checked when all fields are valid.
    try:
        spec = RunSpec.model_validate(raw, by_alias=True, by_name=False, context={IN_RLJOB: is_rljob})
    except ValidationError as error:
        raise SpecInvalid(tuple(_convert_error(detail, is_rljob) for detail in error.errors())) from error
    return spec, tuple(find_broken_rules(spec, rules))


def parse_rljob(manifest: Mapping[str, Any]) -> RunSpec:
    """Parse the run of an RLJob. Raises SpecInvalid with all problems."""
    return parse_spec(_read_manifest(manifest), is_rljob=True)


def _read_manifest(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Return an RLJob's fields as those of a run file. Raises SpecInvalid with the problems of its envelope."""
    raise_problems(find_envelope_problems(manifest))
    return extract_run_fields(manifest)


def dump_spec(spec: RunSpec) -> str:
    """Dump a run as YAML: camelCase, with defaults, without nulls and without fields that only the operator reads.

    `load_spec` reads the same run back: an equal RunSpec, if no such field was set.
    """
    fields = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    text: str = yaml.dump(_drop_cluster_fields(RunSpec, fields), Dumper=_DUMPER, sort_keys=False, allow_unicode=True)
    return text


def digest_spec(spec: RunSpec) -> str:
    """Compute the sha256 of a run in hexadecimal. A run can be resumed with any file that has the same digest.

    Defaults do not count, so that a field that a newer version adds changes no digest.
    """
    fields = select_run_fields(spec, exclude_defaults=True)
    # Sorted, so that the digest does not depend on the order of the model's fields.
    return hashlib.sha256(yaml.safe_dump(fields, sort_keys=True).encode()).hexdigest()


def select_run_fields(spec: RunSpec, *, exclude_none: bool = False, exclude_defaults: bool = False) -> dict[str, Any]:
    """Return the fields that must not change while a run goes on, as in a file, with defaults unless excluded."""
    # The resolved fields: a file that spells out a default has the same ones.
    fields = spec.model_dump(mode="json", by_alias=True, exclude_none=exclude_none, exclude_defaults=exclude_defaults)
    fields = _drop_cluster_fields(type(spec), fields)
    # The number of replicas may change, and so may their KV cache: GPUs may be shared with other programs, or not.
    for name in ("replicas", "kvCacheMib"):
        fields["generation"].pop(name, None)
    return fields


def find_differences(first: Any, second: Any, path: str = "") -> dict[str, tuple[Any, Any]]:
    """Find the fields in which two run files differ: path to both values."""
    if isinstance(first, dict) and isinstance(second, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for name in dict.fromkeys([*first, *second]):
            found |= find_differences(first.get(name), second.get(name), f"{path}.{name}".removeprefix("."))
        return found
    # Lists are compared as a whole, because their items have no names.
    return {} if first == second else {path: (first, second)}


def keep_known_fields(fields: Mapping[str, Any], section: type[Section] = RunSpec) -> dict[str, Any]:
    """Return the fields of a run file without those that this version does not know, as a newer one may write them."""
    kept: dict[str, Any] = {}
    for field in section.model_fields.values():
        name = str(field.alias)
        value = fields.get(name, ...)
        inner = find_section(field)
        if value is ...:
            continue
        if inner is not None and isinstance(value, Mapping):
            value = keep_known_fields(value, inner)
        elif inner is not None and isinstance(value, list):
            value = [keep_known_fields(item, inner) if isinstance(item, Mapping) else item for item in value]
        kept[name] = value
    return kept


def _drop_cluster_fields(section: type[Section], fields: dict[str, Any]) -> dict[str, Any]:
    """Return a section's fields without those that only the operator reads."""
    kept: dict[str, Any] = {}
    for field in section.model_fields.values():
        value = fields.get(str(field.alias), ...)  # `...`: dropped by model_dump; None is a value here
        inner = find_section(field)
        if value is ... or OnCluster.ONLY in field.metadata:
            continue
        if inner is not None and isinstance(value, dict):
            found = _drop_cluster_fields(inner, value)
            # Without defaults nothing may be left of a section, which then is as if it were not given.
            if value and not found and field.default is not None:
                continue
            value = found
        kept[str(field.alias)] = value
    return kept


def _apply_override(raw: dict[str, Any], override: str) -> Iterator[SpecProblem]:
    """Apply an override to the fields of a file."""
    try:
        given = parse_override(override, "schedule.maxPolicyLag=1")
    except SpecInvalid as error:
        yield from error.problems
        return
    is_number = isinstance(given.value, int | float) and not isinstance(given.value, bool)
    location = [int(key) if key.isdecimal() else key for key in given.keys]
    if is_number and is_decimal(find_field(RunSpec, location)):  # in quotes, in case the file is an RLJob
        given = replace(given, value=given.text)
    try:
        given.set_in(raw)
    except SpecInvalid as error:
        yield from error.problems


def _convert_error(detail: ErrorDetails, is_rljob: bool) -> SpecProblem:
    problem = convert_error(detail, RunSpec, "see docs/run-file.md")
    if problem.path != "name":
        return problem
    if detail["type"] == "string_pattern_mismatch":
        problem = replace(problem, remedy="use at most 34 lower-case letters, digits and dashes")
    return replace(problem, path="metadata.name") if is_rljob else problem


def _resolve_paths(spec: RunSpec, base: Path) -> RunSpec:
    """Resolve relative paths against `base`, so that the run does not depend on the working folder.

    A name on the hub stays as it is, so a path that may be one is a name exactly if it is not absolute.
    """

    def resolve(_place: str, section: Section) -> Section:
        moved = dict[str, Any]()
        for name, field in type(section).model_fields.items():
            value = getattr(section, name)
            if RelativePath.TO_RUN_FILE in field.metadata and value is not None:
                found = resolve_path(base / os.path.expanduser(value))  # noqa: PTH111 - pathlib's raises RuntimeError
                # An existing folder wins. Other names stay as they are, until the launcher has fetched what they name.
                is_name = HubName.ALLOWED in field.metadata and is_hub_name(value) and not is_gguf(value)
                moved[name] = value if is_name and not found.exists() else str(found)
        return section.model_copy(update=moved) if moved else section

    return rewrite_sections(spec, resolve)
