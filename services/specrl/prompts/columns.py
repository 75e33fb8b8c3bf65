"""Read one record of a data set: question, reference, the data set's own solution, and the row for a verifier.

Called by `sources` for each record of a file. Invariant: a reference reaches its verifier exactly as the file writes
it. Text stays as it is. Any other value except null becomes its JSON text, so numbers and objects in a data set need no
quotes: `3.50` becomes "3.50", never "3.5".

A column is named by its name, or by a path into objects and lists: `task.text`, `messages.-1.content`. A column whose
own name is that text wins. `questions` reads the question, which may be text, joined columns or messages.
"""

from __future__ import annotations

import base64
import datetime
import difflib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from specrl.prompts.questions import ProblemQuestion, list_question_columns, look_up_column, read_question, type_name
from specrl.spec.data import FieldMapping

if TYPE_CHECKING:
    import pyarrow

_NON_FINITE_NAMES = ("NaN", "Infinity", "-Infinity", "nan", "inf", "-inf")
"""Floats that are not finite: the names that Python's JSON reader accepts, then those that pyarrow writes."""

SHOWN_NAMES = 30
"""Names of columns in a message. A file may have a million."""

_UNICODE_RULE = "must be valid Unicode, got a lone surrogate; correct its \\u escapes"
_SPACE = re.compile(r"[ \t\r\n]*")


@dataclass(frozen=True, slots=True)
class DatasetProblem:
    """A question and the reference for its verifier (`answer`).

    messages: the conversation that ends with the question, as objects with role and content. Empty if the question is
    a single user message. solution: the data set's own solution, which the check before the run grades; None if there
    is none. row: all columns of the record as JSON values. None if no verifier may ask for them, or if a family
    generated the problem.
    """

    question: str
    answer: str
    solution: str | None = None
    row: Mapping[str, Any] | None = None
    messages: tuple[Mapping[str, str], ...] = ()


@dataclass(frozen=True)
class DatasetRecord:
    """One record of a file.

    reference: the answer column as text; None if it is missing, null, or has no JSON form (bytes).
    """

    values: Mapping[str, Any]
    reference: str | None

    def to_problem(self, fields: FieldMapping, keeps_row: bool) -> DatasetProblem:
        """Convert a record without faults. keeps_row: whether the problem keeps all columns."""
        # The caller skips records for which `find_faults` yields anything.
        assert self.reference is not None, "a record without faults has a reference"
        question = read_question(self.values, fields.question)
        assert isinstance(question, ProblemQuestion), "a record without faults has a question"
        row = {name: _to_json_value(value) for name, value in self.values.items()} if keeps_row else None
        solution = self._read_solution(fields)
        return DatasetProblem(question.text, self.reference, solution, row, question.messages)

    def find_faults(self, fields: FieldMapping) -> Iterator[str]:
        """Yield a message for each fault of the record, with field and remedy."""
        missing = [(purpose, name) for purpose, name in list_columns(fields) if not self._has_column(name)]
        for purpose, name in missing:
            rule = f"must exist, got fields {format_names(self.values)}"
            close = difflib.get_close_matches(name, self.values, n=1)
            hint = f"did you mean {close[0]}? Name" if close else "name"
            yield f"field {name!r} {rule}; {hint} the column of the {purpose} with fields.{purpose}"
        if missing:  # the checks below need the columns
            return
        question = read_question(self.values, fields.question)
        if isinstance(question, ProblemQuestion):
            yield from _find_text_faults(fields.question, question.text, "question")
            system = "".join(message["content"] for message in question.messages if message["role"] == "system")
            if _has_lone_surrogate(system):
                yield f"field {fields.question!r} {_UNICODE_RULE}"
        else:
            yield question
        yield from self.find_reference_faults(fields.answer)
        if fields.solution is not None:
            solution = _take_first(look_up_column(self.values, fields.solution))
            if solution is not None and not isinstance(solution, str):
                yield f"field {fields.solution!r} must be text or null, got {type_name(solution)}; correct the record"

    def _has_column(self, name: str) -> bool:
        try:
            look_up_column(self.values, name)
        except KeyError:
            return False
        return True

    def find_reference_faults(self, name: str) -> Iterator[str]:
        """Yield a message for each fault of the reference. name: its column."""
        if self.reference is None:
            rule = f"must be text, a number or other JSON, got {type_name(look_up_column(self.values, name))}"
            yield f"field {name!r} {rule}; give the answer or drop the record"
        # The text "nan" may be an answer.
        elif self.reference in _NON_FINITE_NAMES and isinstance(look_up_column(self.values, name), float):
            yield f"field {name!r} must be a finite number, got {self.reference}; give it or drop the record"
        else:
            yield from _find_text_faults(name, self.reference, "answer")

    def _read_solution(self, fields: FieldMapping) -> str | None:
        solution = None if fields.solution is None else look_up_column(self.values, fields.solution)
        solution = _take_first(solution)
        return solution if solution and solution.strip() else None  # a blank solution counts as none


def format_names(names: Iterable[str]) -> str:
    """Format the names of a record's columns for a message; only the first of many."""
    known = sorted(names)
    shown = [name[:100] for name in known[:SHOWN_NAMES]]
    more = [f"and {len(known) - SHOWN_NAMES} more"] if len(known) > SHOWN_NAMES else []
    return ", ".join(shown + more) or "none"


def measure_memory(value: object) -> int:
    """Return about how many bytes a value takes: a problem, faults, or a row with whatever is in it."""
    size = 0
    left = [value]
    while left:
        item = left.pop()
        size += sys.getsizeof(item) + 16  # and its places in lists
        if isinstance(item, Mapping):
            left += [*item.keys(), *item.values()]
        elif isinstance(item, list | tuple):
            left += item
        elif isinstance(item, DatasetProblem):
            left += [item.question, item.answer, item.solution, item.row, item.messages]
    return size


def _find_text_faults(name: str, text: str, purpose: str) -> Iterator[str]:
    if not text.strip():
        yield f"field {name!r} must not be empty, got {text!r}; give the {purpose} or drop the record"
    elif _has_lone_surrogate(text):
        yield f"field {name!r} {_UNICODE_RULE}"


def _has_lone_surrogate(text: str) -> bool:
    return any("\ud800" <= character <= "\udfff" for character in text)


NumberedRow = tuple[int, DatasetRecord | str]
"""A line or row number from 1, with the record or a message that says why it is malformed."""


def list_columns(fields: FieldMapping) -> list[tuple[str, str]]:
    """List the columns that a mapping names, each with its purpose: question, answer or solution."""
    named = [("question", name) for name in list_question_columns(fields.question)]
    named.append(("answer", fields.answer))
    return named if fields.solution is None else [*named, ("solution", fields.solution)]


def parse_json_record(line: str, answer: str) -> DatasetRecord | str:
    """Parse a line of JSON. Returns the record, or a message that says why the line is malformed.

    answer: the name of the answer column.
    """
    try:
        values = json.loads(line)
    except json.JSONDecodeError as error:
        what = error.msg.removesuffix(" at")  # as in "Unterminated string starting at"
        return f"must be a JSON object on one line, got {what} at column {error.colno}; correct the syntax"
    except (ValueError, RecursionError) as error:  # int() raises ValueError for a number with too many digits
        return f"must be a JSON object on one line, got {error}; correct the syntax"
    if not isinstance(values, dict):
        return f"must be a JSON object on one line, got {type_name(values)}; write one object a line"
    try:
        value = look_up_column(values, answer)
    except KeyError:  # reported by `find_faults`
        value = None
    return DatasetRecord(values, value if value is None or isinstance(value, str) else _find_value_text(line, answer))


def select_table_column(batch: pyarrow.RecordBatch, name: str) -> pyarrow.Array:
    """Return the column of a name or path in Arrow's types, with null where a row lacks it."""
    import pyarrow
    import pyarrow.compute
    import pyarrow.types as kinds

    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    column = batch.column(first)
    for part in rest:
        if kinds.is_struct(column.type) and column.type.get_field_index(part) >= 0:
            column = pyarrow.compute.struct_field(column, part)
        elif kinds.is_list(column.type) or kinds.is_large_list(column.type):
            items = [_pick_item(value, part) for value in column.to_pylist(maps_as_pydicts="strict")]
            column = pyarrow.array(items, type=column.type.value_type)
        else:
            return pyarrow.nulls(len(column))
    return column


def _pick_item(value: list[Any] | None, part: str) -> Any:
    try:
        return None if value is None else look_up_column({"": value}, f".{part}")
    except KeyError:
        return None


def format_table_references(column: pyarrow.Array) -> list[str | None]:
    """Convert a Parquet file's answer column to text, one reference or None per row.

    Parquet does not keep how a number was written. The text is the shortest one for the number. Whole numbers have no
    decimal point, since tables with missing values turn integers into floats. Null members of a struct are left out,
    since Parquet gives every row all members.
    """
    import pyarrow.types as kinds

    if kinds.is_dictionary(column.type):  # pandas' categories
        column = column.dictionary_decode()
    for is_kind in (kinds.is_boolean, kinds.is_integer, kinds.is_floating, kinds.is_decimal):
        if is_kind(column.type):
            # Arrow's cast, since Python would write 18.0 for a float column with whole numbers.
            return list(column.cast("string").to_pylist())
    return [_format_table_reference(value) for value in column.to_pylist(maps_as_pydicts="strict")]


def _format_table_reference(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bytes):  # no JSON form; reported as a fault
        return None
    plain = _drop_nulls(_to_json_value(value))
    return plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False)


def _drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _drop_nulls(item) for name, item in value.items() if item is not None}
    return [_drop_nulls(item) for item in value] if isinstance(value, list) else value


def _to_json_value(value: Any) -> Any:
    """Convert a value to JSON: bytes in base64, dates and times in ISO 8601, durations in seconds, decimals as text."""
    match value:
        case dict():
            return {name: _to_json_value(item) for name, item in value.items()}
        case list():
            return [_to_json_value(item) for item in value]
        case bytes():
            return base64.b64encode(value).decode()
        case datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case Decimal():
            return f"{value:f}"
    return value


def _find_value_text(line: str, name: str) -> str:
    """Return the source text of a value. The line must be a JSON object in which `look_up_column` finds the name."""
    found = dict(_split_values(line))
    if name in found:
        return found[name]
    text = line
    for part in name.split("."):
        found = dict(_split_values(text))
        key = part
        if text.lstrip().startswith("["):  # an index, which may count from the end
            key = str(int(part) % len(found))
        text = found[key]
    return text


def _split_values(text: str) -> Iterator[tuple[str, str]]:
    """Yield name and source text of each member of a JSON object, or index and source text of each item of a list.

    If two members have the same name, the last one counts, as in `json.loads`.
    """
    # The decoder only finds where values end, so that the text keeps `3.50` and the order of keys.
    decoder = json.JSONDecoder()
    at = _skip_space(text, 0)
    is_object = text[at] == "{"
    at = _skip_space(text, at + 1)
    number = 0
    # `text` has been parsed, so indices stay in range and every member has its colon.
    while text[at] not in "}]":
        name = str(number)
        if is_object:
            name, at = decoder.raw_decode(text, at)
            at = _skip_space(text, text.index(":", at) + 1)
        _, end = decoder.raw_decode(text, at)
        yield name, text[at:end]
        number += 1
        at = _skip_space(text, end)
        if text[at] == ",":
            at = _skip_space(text, at + 1)


def _skip_space(line: str, at: int) -> int:
    match = _SPACE.match(line, at)
    return at if match is None else match.end()


def _take_first(value: Any) -> Any:
    """Return the first item of a list, or any other value: some data sets list several solutions of a problem."""
    if isinstance(value, list):
        return value[0] if value else None
    return value
