"""Stand-ins for fields that are missing or malformed, so that cross-field rules can be tried on the others.

`load.parse_spec` calls `lasting_problems` when a mapping does not validate. A rule's finding must not be owed to an
invented value. So the rules are tried twice, with every stand-in at the lower, then at the upper end of what its type
allows, and only what both trials find, word for word, is reported. Findings name what they got, which gives away a
stand-in wherever the extremes themselves do not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from decimal import Decimal
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin

from annotated_types import Ge, Le
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from specrl.errors import Problem
from specrl.spec.base import Union
from specrl.spec.rule import Rule, broken
from specrl.spec.run import RunSpec

Location = Sequence[int | str]
_LARGEST = 10**9
"""Above every sensible setting, and small enough for sums of several."""


class End(StrEnum):
    """The end of a type's range that stand-ins are taken from."""

    LOWER = "lower"
    UPPER = "upper"


def lasting_problems(raw: dict[str, Any], errors: Sequence[ErrorDetails], rules: Sequence[Rule]) -> list[Problem]:
    """What the rules find in `raw` whatever stands in the places of `errors`; [] if `raw` cannot be completed."""
    try:
        lower, upper = (RunSpec.model_validate(_complete(raw, errors, end)) for end in End)
    except ValidationError:
        return []
    found = set(broken(upper, rules))
    return [problem for problem in broken(lower, rules) if problem in found]


def field_at(model: type[BaseModel], location: Location) -> FieldInfo | None:
    """The field that a location in a file leads to, by names as written there or in Python; None if there is none.

    A number is a place in the list before it, and leads to what the list holds.
    """
    found: FieldInfo | None = None
    section: type[BaseModel] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        if section is None:
            return None
        fields = section.model_fields.items()
        found = next((field for name, field in fields if part in (field.alias, name)), None)
        if found is None:
            return None
        section = section_of(found)
    return found


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a field holds, given or null; None for a field that holds a value."""
    members = get_args(field.annotation) or (field.annotation,)
    return next((member for member in members if isinstance(member, type) and issubclass(member, BaseModel)), None)


def _complete(raw: dict[str, Any], errors: Sequence[ErrorDetails], end: End) -> dict[str, Any]:
    completed = copy.deepcopy(raw)
    for detail in errors:
        *parents, last = _field_location(detail["loc"])
        place: Any = completed
        for part in parents:
            # A section that is itself malformed is replaced when its own error comes.
            place = place.get(part) if isinstance(place, dict) else None
        if not isinstance(place, dict):
            continue
        field = field_at(RunSpec, [*parents, last])
        place.pop(last, None)
        if field is not None:
            place[last] = _stand_in(field, [*parents, last], end)
    return completed


def _field_location(location: Location) -> list[int | str]:
    """The part of a location that leads to a field: an error in a list is an error of the list."""
    names = list(location)
    first_index = next((index for index, part in enumerate(names) if isinstance(part, int)), len(names))
    return names[:first_index]


def _stand_in(field: FieldInfo, location: Location, end: End) -> Any:
    """A value that the field accepts."""
    section = section_of(field)
    if get_origin(field.annotation) is tuple:
        return ()
    if section is not None:
        return _stand_in_section(section, location, end)
    if field.annotation is not None and type(None) in get_args(field.annotation):
        (kind,) = (member for member in get_args(field.annotation) if member is not type(None))
        kind = get_args(kind)[0] if get_origin(kind) is Annotated else kind
    else:
        kind = field.annotation
    if kind is bool:
        return end is End.UPPER
    if kind is Decimal:
        return "0" if end is End.LOWER else str(_LARGEST)
    if kind is int:
        lowest = next((bound.ge for bound in field.metadata if isinstance(bound, Ge)), -_LARGEST)
        highest = next((bound.le for bound in field.metadata if isinstance(bound, Le)), _LARGEST)
        return lowest if end is End.LOWER else highest
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        members = list(kind)
        return members[0 if end is End.LOWER else -1].value
    if kind is str:
        # Different for every field, so that no two stand-ins are equal by accident; a name as `RunSpec.name` wants it.
        is_name = any(getattr(bound, "pattern", None) for bound in field.metadata)
        return f"stand-in-{end}" if is_name else f"{end} stand-in for {'.'.join(map(str, location))}"
    return ()


def _stand_in_section(section: type[BaseModel], location: Location, end: End) -> dict[str, Any]:
    """A section with its required fields; a union with its first member."""
    needed: Iterator[FieldInfo] = (field for field in section.model_fields.values() if field.is_required())
    if issubclass(section, Union):
        needed = iter([next(iter(section.model_fields.values()))])
    return {str(field.alias): _stand_in(field, [*location, str(field.alias)], end) for field in needed}
