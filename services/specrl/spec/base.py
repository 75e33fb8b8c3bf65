"""The base classes of sections, marks of fields, look-up of fields by path, and common scalar types.

Fields are snake_case in Python and camelCase in files. Field docstrings become the CRD's descriptions.
Fractions are kept as decimals, so that no digit is lost. RLJobs write them in quotes: by Kubernetes' API conventions no
field is a float.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from enum import Enum
from typing import Annotated, Any, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainSerializer, ValidationInfo, WithJsonSchema
from pydantic.alias_generators import to_camel
from pydantic.fields import FieldInfo

Location = Sequence[int | str]
"""Path of a field in a file, as in pydantic's errors: names, and indices in lists."""

# The exponent has at most two digits: the API server computes with doubles, which overflow above 1e308.
DECIMAL_PATTERN = r"^[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]{1,2})?$"
_DECIMAL_LENGTH = 32


class Section(BaseModel):
    """A part of the run file: frozen, and unknown fields are rejected."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        validate_by_name=True,
        validate_by_alias=True,
        use_attribute_docstrings=True,
    )


IN_RLJOB = "rljob"
"""Key of pydantic's validation context: whether the fields are an RLJob's."""


def _parse_decimal(value: object, info: ValidationInfo) -> Decimal:
    if isinstance(value, Decimal):
        return value
    is_bare = isinstance(value, int | float) and not isinstance(value, bool)
    if is_bare and (info.context or {}).get(IN_RLJOB):
        raise ValueError(f'must be in quotes in an RLJob, as in "{value}"')
    # The shortest digits that YAML's double stands for are those that were written: nobody writes more than 17.
    text = repr(value) if is_bare else value
    if not isinstance(text, str) or len(text) > _DECIMAL_LENGTH or re.fullmatch(DECIMAL_PATTERN, text) is None:
        raise ValueError("must be a number, as in 0.7 or 1e-5")
    return Decimal(text)


DecimalString = Annotated[
    Decimal,
    BeforeValidator(_parse_decimal),
    PlainSerializer(str, return_type=str),
    WithJsonSchema({"type": "string", "pattern": DECIMAL_PATTERN, "maxLength": _DECIMAL_LENGTH}),
]
"""A fraction. In an RLJob it is written in quotes."""

WholeNumber = Annotated[int, Field(strict=True)]
"""A whole number without quotes. pydantic would also take text and 8.0, which the CRD refuses."""
Port = Annotated[WholeNumber, Field(ge=0, le=65535)]
"""A TCP port. 0: any free one."""

# Every text has a maximum length. The API server estimates the cost of CEL rules from it, and rejects a CRD with rules
# on text of unlimited length.
PathText = Annotated[str, Field(max_length=4096)]
"""A path; 4096 is Linux' PATH_MAX."""
ShortText = Annotated[str, Field(max_length=256)]
"""A name, or a marker in a text."""
ObjectName = Annotated[str, Field(min_length=1, max_length=253)]
"""Name of a Kubernetes object, a DNS subdomain of at most 253 characters."""


class ChangePolicy(Enum):
    """Mark of a field that may be changed in an RLJob, and when. Fields without it are immutable.

    Local runs do not use it: `digest_spec` decides whether a run can be resumed with a changed file.
    """

    SUSPENDED = "while the job is suspended"
    ANY_TIME = "at any time"


class OnCluster(Enum):
    """Mark of a field that run files of pods lack. The operator reads it, and the coordinator from the RLJob, in which
    it may change. A local run accepts it and ignores it."""

    ONLY = "cluster only"


class RelativePath(Enum):
    """Mark of a path that may be relative. In an RLJob, which is in no folder, such a path must be absolute."""

    TO_RUN_FILE = "to the run file's folder"


class HubName(Enum):
    """Mark of a path that may also be a repository's name on the Hugging Face Hub, such as Qwen/Qwen3-0.6B."""

    ALLOWED = "or a name on the hub"


_PART = "[A-Za-z0-9][A-Za-z0-9._-]*"
HUB_NAME_PATTERN = f"^{_PART}/{_PART}$"
"""OWNER/NAME. Python's re and CEL read it alike."""
HUB_URI_PATTERN = rf"^hf://(datasets/)?({_PART}/{_PART})(@[A-Za-z0-9._/-]+)?$"
"""A model or a data set on the Hugging Face Hub, as in hf://OWNER/NAME@REVISION or hf://datasets/OWNER/NAME."""
COMMIT_PATTERN = "@[0-9a-f]{40}$"
"""The end of a URI that names a commit, which never changes."""


def is_hub_name(text: str) -> bool:
    """Whether the text can be a repository's name. `./x`, `~/x`, absolute paths and names without an owner cannot."""
    return re.fullmatch(HUB_NAME_PATTERN, text) is not None


def is_gguf(text: str) -> bool:
    """Whether a path is that of a GGUF file, by its name. Such a path is never a repository's name."""
    return text.endswith(".gguf")


class UnionSection(Section):
    """A Kubernetes-style union (`{jsonl: {...}}`): exactly one member is set. `rules/run_rules.py` has the rule."""

    @property
    def kind(self) -> str:
        """Name of the member that is set, in snake_case."""
        return next(name for name in type(self).model_fields if getattr(self, name) is not None)


class EmptySection(Section):
    """A union member without settings."""


def find_field(model: type[Section], location: Location) -> FieldInfo | None:
    """Find the field at a location, by its name in files or in Python; None if there is none.

    An index in a list is skipped: all items have the same section.
    """
    found: FieldInfo | None = None
    section: type[Section] | None = model
    for part in location:
        if isinstance(part, int):
            continue
        if section is None:  # the path goes on below a scalar field
            return None
        fields = section.model_fields.items()
        found = next((field for name, field in fields if part in (field.alias, name)), None)
        if found is None:
            return None
        section = find_section(found)
    return found


def find_section(field: FieldInfo) -> type[Section] | None:
    """Return the section type of a field, also of an optional one or a list; None for a field with a scalar value."""
    members = get_args(field.annotation) or (field.annotation,)
    return next((member for member in members if isinstance(member, type) and issubclass(member, Section)), None)


def is_decimal(field: FieldInfo | None) -> bool:
    """Whether a field is a `DecimalString`, optional or not."""
    members = get_args(field.annotation) or (field.annotation,) if field is not None else ()
    return any(member is Decimal or get_args(member)[:1] == (Decimal,) for member in members)


def is_optional(field: FieldInfo) -> bool:
    """Whether a field has no value if it is not given. In a CRD such a field is left out; it is never null."""
    return not field.is_required() and field.default is None


def rewrite_sections[S: Section](section: S, rewrite: Callable[[str, Section], Section], path: str = "") -> S:
    """Return the section after `rewrite(path, section)` of every section in it, also those in lists, and of itself.

    Inner sections are rewritten before outer ones, and all of them in the order of the fields. `rewrite` returns a
    section of the same type. path: of the section, as in `prompts.sources[1].source`; empty for the whole run file.
    """
    changed = dict[str, Any]()
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        place = f"{path}.{field.alias}".removeprefix(".")
        if isinstance(value, Section):
            changed[name] = rewrite_sections(value, rewrite, place)
        elif isinstance(value, tuple):
            changed[name] = tuple(
                rewrite_sections(item, rewrite, f"{place}[{number}]") if isinstance(item, Section) else item
                for number, item in enumerate(value)
            )
    rewritten = rewrite(path, section.model_copy(update=changed))
    assert isinstance(rewritten, type(section))
    return rewritten


def walk_section_types(section: type[Section], path: str = "") -> Iterator[tuple[str, type[Section]]]:
    """Yield path and type of the section and of every section in it, one type as often as it is used."""
    yield path, section
    for field in section.model_fields.values():
        inner = find_section(field)
        if inner is not None:
            yield from walk_section_types(inner, f"{path}.{field.alias}".removeprefix("."))
