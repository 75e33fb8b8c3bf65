"""From a file (or a mapping) to a RunSpec, reporting every problem at once with its path, rule and remedy.

Called by the CLI, by every process at its start, and by the operator. Nothing is rewritten: what loads is what was
written, with defaults filled in.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from specrl.errors import Problem, SpecInvalid
from specrl.spec.rules import RULES
from specrl.spec.run import RunSpec
from specrl.spec.stand_ins import field_at, lasting_problems, section_of

_REMEDIES = {
    "missing": "add it",
    "extra_forbidden": "remove it",
    "greater_than_equal": "raise it",
    "less_than_equal": "lower it",
    "enum": "use one of the values listed",
    "int_parsing": "write a whole number",
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "bool_parsing": "write true or false",
    "string_type": "write text",
    "value_error": "write it as the rule says",
    "string_pattern_mismatch": "use at most 35 lower-case letters, digits and dashes",
    "model_type": "write a mapping of its fields",
    "model_attributes_type": "write a mapping of its fields",
}

_VERBS = ("match", "have")
"""How pydantic begins a rule that `must be` does not fit."""


def load_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Read a run file, apply `path=value` overrides, return the RunSpec.

    Paths inside the file become absolute, relative to the file's folder. An RLJob manifest is read by its `spec`.
    Raises SpecInvalid with every problem found.
    """
    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SpecInvalid(
            (Problem(str(path), f"must be a readable file, got {error.strerror}", "check the path"),)
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = str(error).replace("\n", " ")
        raise SpecInvalid((Problem(str(path), f"must be YAML, got {reason}", "fix the syntax"),)) from error
    if not isinstance(raw, dict):
        raise SpecInvalid((Problem(str(path), "must be a mapping of sections", "see examples/ for a run file"),))
    if raw.get("kind") == "RLJob" and isinstance(raw.get("spec"), dict):
        raw = raw["spec"]
    malformed = [problem for override in overrides for problem in _apply(raw, override)]
    if malformed:
        raise SpecInvalid(tuple(malformed))
    spec = parse_spec(raw)
    return _with_absolute_paths(spec, path.resolve().parent)


def parse_spec(raw: dict[str, Any]) -> RunSpec:
    """Check a mapping against the model and against every cross-field rule. Raises SpecInvalid with all problems.

    Cross-field rules are tried on the fields that are sound even when others are not: one run of the command lists
    everything there is to fix, and nothing that is owed to a field that is missing.
    """
    try:
        spec = RunSpec.model_validate(raw)
    except ValidationError as error:
        errors = error.errors()
        found = [_problem(detail) for detail in errors]
        known = {problem.path for problem in found}
        found += [problem for problem in lasting_problems(raw, errors) if problem.path not in known]
        raise SpecInvalid(tuple(found)) from error
    broken = [problem for rule in RULES for problem in rule(spec)]
    if broken:
        raise SpecInvalid(tuple(broken))
    return spec


def dump(spec: RunSpec) -> str:
    """The RunSpec as YAML, camelCase, with defaults and without nulls; `load_spec` reads an equal RunSpec back."""
    text: str = yaml.safe_dump(
        spec.model_dump(mode="json", by_alias=True, exclude_none=True), sort_keys=False, allow_unicode=True
    )
    return text


def digest(spec: RunSpec) -> str:
    """sha256 of the resolved run, the number of replicas aside: that may change while the run goes on."""
    fields = spec.model_dump(mode="json", by_alias=True)
    del fields["generation"]["replicas"]
    return hashlib.sha256(yaml.safe_dump(fields, sort_keys=True).encode()).hexdigest()


def _apply(raw: dict[str, Any], override: str) -> Iterator[Problem]:
    """`a.b.c=value`: value is YAML, except that a fraction stays text, since run files have no floats."""
    path, separator, text = override.partition("=")
    *parents, last = path.split(".")
    if not separator or not all([*parents, last]):
        yield Problem("--set", f"must be path=value, got {override!r}", "as in schedule.maxPolicyLag=1")
        return
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        yield Problem(f"--set {path}", f"must be YAML, got {text!r}", "quote the value")
        return
    if isinstance(value, float):
        value = text
    place = raw
    for key in parents:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[last] = value


def _path(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location)


def _problem(detail: ErrorDetails) -> Problem:
    location, kind = detail["loc"], detail["type"]
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.removeprefix("String should ")
    remedy = _REMEDIES.get(kind, "see docs/run-file.md")
    if kind == "missing":
        return Problem(_path(location), "must be given", remedy)
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(location[-1]), _fields_at(location[:-1]), n=1)
        return Problem(_path(location), "is not a field here", f"did you mean {close[0]}?" if close else remedy)
    rule = message if message.startswith("must") else f"must {'' if message.startswith(_VERBS) else 'be '}{message}"
    shown = detail["input"] if not isinstance(detail["input"], dict | list) else type(detail["input"]).__name__
    return Problem(_path(location), f"{rule}, got {shown!r}", remedy)


def _fields_at(location: Sequence[int | str]) -> list[str]:
    """Names, as written in files, of the fields of the section at `location`."""
    field = field_at(RunSpec, location)
    section = RunSpec if not location else section_of(field) if field is not None else None
    return [str(field.alias) for field in section.model_fields.values()] if section is not None else []


def _with_absolute_paths(spec: RunSpec, base: Path) -> RunSpec:
    """Paths in the file are relative to the file, so that a run can be started from anywhere."""

    def absolute(value: str) -> str:
        return str((base / Path(value).expanduser()).resolve())

    def source(section: Any) -> Any:
        if section.kind == "generated":
            return section
        file = getattr(section, section.kind)
        return section.model_copy(update={section.kind: file.model_copy(update={"path": absolute(file.path)})})

    update: dict[str, Any] = {
        "model": spec.model.model_copy(update={"path": absolute(spec.model.path)}),
        "prompts": spec.prompts.model_copy(update={"source": source(spec.prompts.source)}),
    }
    if spec.validation is not None:
        update["validation"] = spec.validation.model_copy(update={"source": source(spec.validation.source)})
    speculation = spec.generation.speculation
    drafter = speculation.eagle3 or speculation.draft_model
    if drafter is not None and drafter.path is not None:
        moved = drafter.model_copy(update={"path": absolute(drafter.path)})
        update["generation"] = spec.generation.model_copy(
            update={"speculation": speculation.model_copy(update={speculation.kind: moved})}
        )
    return spec.model_copy(update=update)
