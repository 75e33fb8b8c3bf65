"""Columns of a record: the question, the reference as text, the data's own solution, and the row for a verifier.

Called by `sources`, for each record of a file. Invariant: a reference reaches its verifier as the file has it. Text
stays as it is. Everything else but null becomes its JSON text, so that the numbers and objects of a data set need no
quotes: `3.50` is "3.50", never 3.5.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from specrl.spec.data import FieldMapping

if TYPE_CHECKING:
    import pyarrow

_NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
"""As Python's JSON reader takes them, and as pyarrow writes them."""
_TYPE_NAMES: dict[type, str] = {
    dict: "an object",
    list: "a list",
    str: "text",
    int: "a number",
    float: "a number",
    bool: "true or false",
    bytes: "bytes",
    type(None): "null",
}
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class Problem:
    """A task's text and the verifier's reference.

    solution: the data's own solution, which the check before the run judges. row: all columns of the record as JSON
    values, where a verifier may ask for them; None where none may, and of a family.
    """

    question: str
    answer: str
    solution: str | None = None
    row: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Record:
    """One record of a file. reference: the answer column as text; None where it is missing, null or no JSON value."""

    values: Mapping[str, Any]
    reference: str | None

    def problem(self, fields: FieldMapping, keeps_row: bool) -> Problem:
        """The problem of a record without faults."""
        assert self.reference is not None, "a record without faults has a reference"
        row = {name: _plain(value) for name, value in self.values.items()} if keeps_row else None
        return Problem(self.values[fields.question], self.reference, self._solution(fields), row)

    def faults(self, fields: FieldMapping) -> Iterator[str]:
        """What is wrong with it, each with its field and remedy."""
        missing = False
        for purpose in ("question", "answer", "solution"):
            name = getattr(fields, purpose)
            if name is not None and name not in self.values:
                missing = True
                there = ", ".join(sorted(self.values)) or "none"
                yield (
                    f"field {name!r} must be there, got fields {there}; "
                    f"name the column of the {purpose} with fields.{purpose}"
                )
        if missing:
            return
        question = self.values[fields.question]
        if isinstance(question, str):
            yield from _text_faults(fields.question, question, "question")
        else:
            yield f"field {fields.question!r} must be text, got {type_name(question)}; it is what the policy is asked"
        yield from self.reference_faults(fields.answer)
        if fields.solution is not None:
            solution = _first(self.values[fields.solution])
            if solution is not None and not isinstance(solution, str):
                yield f"field {fields.solution!r} must be text or null, got {type_name(solution)}; correct the record"

    def reference_faults(self, name: str) -> Iterator[str]:
        """What is wrong with the reference, which is in the column `name`."""
        if self.reference is None:
            got = type_name(self.values[name])
            remedy = "give the answer or drop the record"
            yield f"field {name!r} must be text, a number or other JSON, got {got}; {remedy}"
        elif self.reference in _NO_NUMBERS and isinstance(self.values[name], float):
            yield f"field {name!r} must be a finite number, got {self.reference}; give it or drop the record"
        else:
            yield from _text_faults(name, self.reference, "answer")

    def _solution(self, fields: FieldMapping) -> str | None:
        solution = None if fields.solution is None else _first(self.values[fields.solution])
        return solution if solution and solution.strip() else None


def _text_faults(name: str, text: str, purpose: str) -> Iterator[str]:
    if not text.strip():
        yield f"field {name!r} must not be empty, got {text!r}; give the {purpose} or drop the record"
    elif any("\ud800" <= character <= "\udfff" for character in text):
        yield f"field {name!r} must be Unicode text, got half of a surrogate pair; correct its \\u escapes"


def type_name(value: object) -> str:
    """What a value is, as JSON calls it."""
    return _TYPE_NAMES.get(type(value), type(value).__name__)


def json_record(line: str, answer: str) -> Record | str:
    """The record of a line of JSON, or what is wrong with the line. answer: the name of that column."""
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        return f"must be a JSON object on one line, got {error.msg} at column {error.colno}; correct the syntax"
    except (ValueError, RecursionError) as error:  # ValueError: of a number with too many digits, too
        return f"must be a JSON object on one line, got {error}; correct the syntax"
    if not isinstance(values, dict):
        return f"must be a JSON object on one line, got {type_name(values)}; write one object a line"
    value = values.get(answer)
    return Record(values, value if value is None or isinstance(value, str) else _member_text(line, answer))


def table_references(column: pyarrow.Array) -> list[str | None]:
    """A Parquet file's answer column as text.

    Such a file has no text of a number: it is the shortest that gives the number, and a whole one has no point, since
    tables with a gap turn whole numbers into floats. A struct has every member in every row: null ones are left out.
    """
    import pyarrow.types as kinds

    if kinds.is_dictionary(column.type):
        column = column.dictionary_decode()
    for is_kind in (kinds.is_boolean, kinds.is_integer, kinds.is_floating, kinds.is_decimal):
        if is_kind(column.type):
            return list(column.cast("string").to_pylist())
    return [_table_reference(value) for value in column.to_pylist(maps_as_pydicts="strict")]


def _table_reference(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):
        return None
    plain = _without_nulls(_plain(value))
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A value as JSON has it: bytes in base64, dates and times in ISO 8601, decimals with all their digits."""
    match value:
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case list():
            return [_plain(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case Decimal():
            return f"{value:f}"
    return value


def _member_text(line: str, name: str) -> str:
    """How a member's value is written in a line that holds a sound object. Of two with one name the last counts."""
    decoder, text = json.JSONDecoder(), ""
    at = _skip_space(line, line.index("{") + 1)
    while line[at] != "}":
        member, at = decoder.raw_decode(line, at)
        start = _skip_space(line, line.index(":", at) + 1)
        _, end = decoder.raw_decode(line, start)
        if member == name:
            text = line[start:end]
        at = _skip_space(line, end)
        if line[at] == ",":
            at = _skip_space(line, at + 1)
    return text


def _skip_space(line: str, at: int) -> int:
    match = _SPACE.match(line, at)
    return at if match is None else match.end()


def _first(value: Any) -> Any:
    """A value, or the first of a list: some data sets have several solutions of a problem."""
    if isinstance(value, list):
        return value[0] if value else None
    return value
