"""The base of every section, and the two scalar types that Kubernetes' conventions ask for.

Fields are snake_case in Python and camelCase on disk. Field docstrings become the CRD's descriptions.
There are no floats in a run file (Kubernetes API conventions): a fraction is a decimal in quotes.
"""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

_DECIMAL = r"^[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?$"


class Section(BaseModel):
    """A part of the run file: frozen, unknown fields refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


def _decimal(value: object) -> Decimal:
    if isinstance(value, Decimal):
        return value
    if not isinstance(value, str) or re.match(_DECIMAL, value) is None:
        raise ValueError('must be a decimal in quotes, as in "0.7"')
    return Decimal(value)


DecimalString = Annotated[
    Decimal,
    BeforeValidator(_decimal),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _DECIMAL}),
]
"""A fraction, written as a quoted decimal."""


def only_member(section: Section) -> str:
    """Name of the one member that is set in a Kubernetes-style union (`{jsonl: {...}}`)."""
    return next(name for name in type(section).model_fields if getattr(section, name) is not None)


class Union(Section):
    """A section of which exactly one member is set. The rule itself is checked in `load.py`, with every other rule."""

    @property
    def kind(self) -> str:
        """Name of the member that is set, in snake_case."""
        return only_member(self)


class Empty(Section):
    """A union member without settings."""
