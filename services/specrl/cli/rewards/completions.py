"""The completions to grade: lines of a JSONL file, each with a reference and a completion.

Invariant: a line that cannot be graded is still yielded, with its fault. So it has a place and a reason in the output,
and the lines around it are graded. Called by `cli.rewards.command`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from specrl.errors import DatasetInvalid
from specrl.prompts.columns import DatasetRecord, format_names
from specrl.prompts.questions import type_name
from specrl.prompts.sources import read_jsonl
from specrl.records import Prompt

REFERENCE = "reference"
COMPLETION = "completion"
NO_PROMPT = Prompt("", 0, (), "", "")
_CHUNK_BYTES = 1 << 20  # read at once while lines are counted


@dataclass(frozen=True)
class CompletionLine:
    """A completion to grade. copied: the keys that its output line begins with."""

    place: str
    """Where a person finds it, as in `FILE:17`."""
    prompt: Prompt
    """The verifier's input: the reference, and the other columns of the record."""
    completion: str = ""
    copied: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """The rule that the line breaks, when it cannot be graded; else empty."""


@dataclass(frozen=True)
class Completions:
    """The lines to grade.

    display_name: of their source, in messages. line_count: number of lines; None when only reading them tells.
    """

    display_name: str
    line_count: int | None
    lines: Iterable[CompletionLine]


def open_completions(path: str) -> Completions:
    """Open a file of completions; `-` is stdin. Raises DatasetInvalid when it cannot be read."""
    total = None
    # A pipe can be opened only once: its writer ends when the first reader closes it.
    if path == "-" or not Path(path).is_fifo():
        with _open_input(path) as file:
            if path != "-" and Path(path).is_file():  # other kinds of input can be read only once
                total = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b""))
    return Completions(_display_path(path), total, _read_lines(path))


def _read_lines(path: str) -> Iterator[CompletionLine]:
    with _open_input(path) as file:
        for number, record in read_jsonl(file, REFERENCE):
            yield _make_line(f"{_display_path(path)}:{number}", record)


@contextmanager
def _open_input(path: str) -> Iterator[BinaryIO]:
    # Not sys.stdin: the reading thread may be blocked in it at exit, and Python aborts because it holds the lock.
    source: str | int = 0 if path == "-" else path
    try:
        with open(source, "rb", closefd=path != "-") as file:
            yield file
    except OSError as error:
        raise DatasetInvalid(
            f"{_display_path(path)}: must be a readable file, got {error.strerror or error}; "
            "check the path of --completions"
        ) from error


def _display_path(path: str) -> str:
    return "stdin" if path == "-" else path


def _make_line(place: str, record: DatasetRecord | str) -> CompletionLine:
    if isinstance(record, str):
        return CompletionLine(place, NO_PROMPT, fault=record)
    row = {name: value for name, value in record.values.items() if name not in (REFERENCE, COMPLETION)}
    fault = next(_find_faults(record), "")
    if fault:
        return CompletionLine(place, NO_PROMPT, copied=row, fault=fault)
    assert record.reference is not None, "a record without faults has a reference"
    text = row.get("prompt")  # optional; a Python verifier may want it
    source = row.get("source")  # optional; a reward may be restricted to sources
    prompt = replace(
        NO_PROMPT,
        text=text if isinstance(text, str) else "",
        answer=record.reference,
        row=row,
        source=source if isinstance(source, str) else NO_PROMPT.source,
    )
    return CompletionLine(place, prompt, record.values[COMPLETION], row)


def _find_faults(record: DatasetRecord) -> Iterator[str]:
    for name in (REFERENCE, COMPLETION):
        if name not in record.values:
            rule = f"must be present, got fields {format_names(record.values)}"
            yield f"field {name!r} {rule}; give every line a reference and a completion"
    yield from record.find_reference_faults(REFERENCE)
    completion = record.values[COMPLETION]
    if not isinstance(completion, str):
        yield f"field {COMPLETION!r} must be text, got {type_name(completion)}; use the policy's answer"
