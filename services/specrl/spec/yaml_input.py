"""YAML that people write: the documents of a file, `path=value` overrides, and pydantic's errors in our words.

For run files (`load.py`) and for the simulator's scenarios (`simulator/scenario_file.py`). Both are models of sections
in camelCase that refuse unknown fields.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel
from pydantic_core import ErrorDetails

from specrl.errors import Problem, SpecInvalid
from specrl.files import read_text
from specrl.spec.stand_ins import Location, field_at, section_of

UNREADABLE = (yaml.YAMLError, ValueError, RecursionError)
"""What PyYAML raises. ValueError: of a date with 13 months, and of bytes that are not UTF-8."""

_REMEDIES = {
    "missing": "add it",
    "greater_than": "raise it",
    "greater_than_equal": "raise it",
    "less_than": "lower it",
    "less_than_equal": "lower it",
    "enum": "use one of the values listed",
    "int_parsing": "write a whole number",
    "int_type": "write a whole number",
    "int_from_float": "write a whole number",
    "float_parsing": "write a number",
    "float_type": "write a number",
    "bool_parsing": "write true or false",
    "string_type": "write text",
    "string_too_long": "shorten it",
    "string_too_short": "write text",
    "too_long": "remove some",
    "value_error": "write it as the rule says",
    "string_pattern_mismatch": "use at most 34 lower-case letters, digits and dashes",
    "model_type": "write a mapping of its fields",
    "model_attributes_type": "write a mapping of its fields",
}

_VERBS = ("match", "have")
"""How pydantic begins a rule that `must be` does not fit."""


def read_documents(path: Path) -> list[Any]:
    """The YAML documents of a file. Raises SpecInvalid."""
    try:
        return list(yaml.safe_load_all(read_text(path)))
    except OSError as error:
        problem = Problem(str(path), f"must be a readable file, got {error.strerror}", "check the path")
        raise SpecInvalid((problem,)) from error
    except UNREADABLE as error:
        reason = " ".join(str(error).split())
        raise SpecInvalid((Problem(str(path), f"must be YAML, got {reason}", "fix the syntax"),)) from error


@dataclass(frozen=True)
class Override:
    """`a.b.c=value` of a command line. text: the value as it was written; value: what it is as YAML."""

    keys: tuple[str, ...]
    text: str
    value: Any

    @property
    def path(self) -> str:
        return ".".join(self.keys)

    def set_in(self, raw: dict[str, Any]) -> dict[str, Any]:
        """Give the field its value; returns its section.

        Sections on the way that are missing, or no mappings, become mappings.
        """
        *parents, last = self.keys
        place = raw
        for key in parents:
            if not isinstance(place.get(key), dict):
                place[key] = {}
            place = place[key]
        place[last] = self.value
        return place


def parse_override(override: str, example: str) -> Override:
    """Raises SpecInvalid for one without path or value, which shows `example`, and for a value that is no YAML."""
    path, separator, text = override.partition("=")
    keys = tuple(path.split("."))
    if not separator or not all(keys):
        raise SpecInvalid((Problem("--set", f"must be path=value, got {override!r}", f"as in {example}"),))
    try:
        value = yaml.safe_load(text)
    except UNREADABLE as error:
        raise SpecInvalid((Problem(f"--set {path}", f"must be YAML, got {text!r}", "quote the value"),)) from error
    return Override(keys, text, value)


def problem_of(detail: ErrorDetails, model: type[BaseModel], fallback: str) -> Problem:
    """An error of pydantic's about an instance of `model`. fallback: the remedy where the kind of error has none."""
    location, kind = detail["loc"], detail["type"]
    remedy = _REMEDIES.get(kind, fallback)
    if kind == "missing":
        return Problem(path_of(location), "must be given", remedy)
    if kind == "extra_forbidden":
        return unknown_field(model, location)
    message = detail["msg"].removeprefix("Value error, ").removeprefix("Input should be ")
    message = message.removeprefix("String should ").removeprefix("Tuple should ")
    rule = message if message.startswith("must") else f"must {'' if message.startswith(_VERBS) else 'be '}{message}"
    shown = detail["input"] if not isinstance(detail["input"], dict | list) else type(detail["input"]).__name__
    return Problem(path_of(location), f"{rule}, got {shown!r}", remedy)


def unknown_field(model: type[BaseModel], location: Location) -> Problem:
    """The problem of a field that its section does not have, with the nearest name of one that it has."""
    *parents, last = location
    field = field_at(model, parents)
    section = model if not parents else section_of(field) if field is not None else None
    names = [str(field.alias) for field in section.model_fields.values()] if section is not None else []
    close = difflib.get_close_matches(str(last), names, n=1)
    return Problem(path_of(location), "is not a field here", f"did you mean {close[0]}?" if close else "remove it")


def path_of(location: Sequence[int | str]) -> str:
    """A location as files and messages write it."""
    return ".".join(str(part) for part in location)
