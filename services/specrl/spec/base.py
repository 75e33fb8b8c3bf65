"""The base of every section, and the two scalar types that Kubernetes' conventions ask for.

Fields are snake_case in Python and camelCase on disk. Field docstrings become the CRD's descriptions.
There are no floats in a run file (Kubernetes API conventions): a fraction is a decimal in quotes.
"""

from __future__ import annotations

import re
from decimal import Decimal
from enum import Enum
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, WithJsonSchema
from pydantic.alias_generators import to_camel

# A power of ten of two digits: what a double holds without overflow, since the API server computes with doubles.
_DECIMAL = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?$"
_DECIMAL_LENGTH = 32


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
    if not isinstance(value, str) or len(value) > _DECIMAL_LENGTH or re.fullmatch(_DECIMAL, value) is None:
        raise ValueError('must be a decimal in quotes, as in "0.7"')
    return Decimal(value)


DecimalString = Annotated[
    Decimal,
    BeforeValidator(_decimal),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": _DECIMAL, "maxLength": _DECIMAL_LENGTH}),
]
"""A fraction, written as a quoted decimal."""

# Every text has a longest length: the API server refuses rules on text that may be of any length as too dear.
PathText = Annotated[str, Field(max_length=4096)]
"""A path; Linux has none that is longer."""
ShortText = Annotated[str, Field(max_length=256)]
"""A name, or a mark in a text."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of a Kubernetes object."""


class Change(Enum):
    """When a field of an RLJob may be changed; a field without such a mark never. Local runs go by `digest` alone."""

    SUSPENDED = "while the job is suspended"
    ANY_TIME = "at any time"


class OnCluster(Enum):
    """The mark of a field that only the operator reads. A local run accepts it and does not use it."""

    ONLY = "cluster only"


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
