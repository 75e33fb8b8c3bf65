"""From a file (or a mapping) to a RunSpec, reporting every problem at once with its path, rule and remedy.

Called by the CLI, by every process at its start, and by the operator. Nothing is rewritten: what loads is what was
written, with defaults filled in.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from specrl.errors import Problem, SpecInvalid
from specrl.spec.rules import RULES
from specrl.spec.run import RunSpec

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
    for override in overrides:
        _apply(raw, override)
    spec = parse_spec(raw)
    return _with_absolute_paths(spec, path.resolve().parent)


def parse_spec(raw: dict[str, Any]) -> RunSpec:
    """Check a mapping against the model and against every cross-field rule. Raises SpecInvalid with all problems.

    Fields that fail on their own are taken out (their default stands in) so that the cross-field rules can still be
    tried on the rest: one run of the command lists everything there is to fix.
    """
    try:
        spec = RunSpec.model_validate(raw)
        found: list[Problem] = []
    except ValidationError as error:
        errors = error.errors()
        found = [_problem(raw, detail) for detail in errors]
        rest = _without(raw, errors)
        try:
            spec = RunSpec.model_validate(rest)
        except ValidationError:
            raise SpecInvalid(tuple(found)) from error
    known = {problem.path for problem in found}
    found += [problem for rule in RULES for problem in rule(spec) if problem.path not in known]
    if found:
        raise SpecInvalid(tuple(found))
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


def _apply(raw: dict[str, Any], override: str) -> None:
    """`a.b.c=value`: value is YAML, except that a fraction stays text, since run files have no floats."""
    path, separator, text = override.partition("=")
    if not separator or not path:
        raise SpecInvalid((Problem("--set", f"must be path=value, got {override!r}", "as in schedule.maxPolicyLag=1"),))
    value = yaml.safe_load(text)
    if isinstance(value, float):
        value = text
    *parents, last = path.split(".")
    place = raw
    for key in parents:
        if not isinstance(place.get(key), dict):
            place[key] = {}
        place = place[key]
    place[last] = value


def _path(location: Sequence[int | str]) -> str:
    return ".".join(str(part) for part in location)


def _problem(raw: dict[str, Any], detail: ErrorDetails) -> Problem:
    location, kind = detail["loc"], detail["type"]
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    remedy = _REMEDIES.get(kind, "see docs/run-file.md")
    if kind == "missing":
        return Problem(_path(location), "must be given", remedy)
    if kind == "extra_forbidden":
        close = difflib.get_close_matches(str(location[-1]), _fields_at(location[:-1]), n=1)
        return Problem(_path(location), "is not a field here", f"did you mean {close[0]}?" if close else remedy)
    rule = message if message.startswith("must") else f"must be {message}"
    shown = detail["input"] if not isinstance(detail["input"], dict | list) else type(detail["input"]).__name__
    return Problem(_path(location), f"{rule}, got {shown!r}", remedy)


def _fields_at(location: Sequence[int | str]) -> list[str]:
    """Names, as written in files, of the fields of the section at `location`."""
    model: type[BaseModel] = RunSpec
    for part in location:
        field = next((f for f in model.model_fields.values() if f.alias == part), None)
        if field is None:
            return []
        members = getattr(field.annotation, "__args__", (field.annotation,))
        nested = next((m for m in members if isinstance(m, type) and issubclass(m, BaseModel)), None)
        if nested is None:
            return []
        model = nested
    return [field.alias or name for name, field in model.model_fields.items()]


def _without(raw: dict[str, Any], errors: Sequence[ErrorDetails]) -> dict[str, Any]:
    rest = copy.deepcopy(raw)
    for detail in errors:
        place: Any = rest
        for part in detail["loc"][:-1]:
            place = place.get(part) if isinstance(place, dict) else None
        if isinstance(place, dict):
            place.pop(detail["loc"][-1], None)
    return rest


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
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is not None and eagle3.path is not None:
        speculation = spec.generation.speculation.model_copy(
            update={"eagle3": eagle3.model_copy(update={"path": absolute(eagle3.path)})}
        )
        update["generation"] = spec.generation.model_copy(update={"speculation": speculation})
    return spec.model_copy(update=update)
