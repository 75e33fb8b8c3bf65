"""What is to be graded: lines of a JSONL file, each with a reference and a completion.

Invariant: a line that cannot be graded is still a line. It carries its fault, so that it has a place and a reason in
the output, and costs the lines around it nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

from specrl.errors import DatasetInvalid
from specrl.prompts.columns import Record, type_name
from specrl.prompts.sources import read_jsonl
from specrl.records import Prompt

REFERENCE, COMPLETION = "reference", "completion"
NO_PROMPT = Prompt("", 0, (), "", "")
_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Line:
    """A completion to grade. copied: what its output line begins with."""

    place: str
    """Where a person finds it: `FILE:17`."""
    prompt: Prompt
    """As the verifier is given it: with the reference, and the other columns of the record."""
    completion: str = ""
    copied: Mapping[str, Any] = field(default_factory=dict)
    fault: str = ""
    """Why it cannot be graded: the rule that the line breaks."""


@dataclass(frozen=True)
class Completions:
    """The lines of a file, or of stdin. total: how many lines there are; None where only reading tells."""

    path: str
    total: int | None

    @property
    def name(self) -> str:
        """As messages call it."""
        return _shown(self.path)

    def __iter__(self) -> Iterator[Line]:
        with _opened(self.path) as file:
            for number, record in read_jsonl(file, REFERENCE):
                yield _line(f"{self.name}:{number}", record)


def open_completions(path: str) -> Completions:
    """The completions in this file; `-` is stdin. Raises DatasetInvalid unless it can be read."""
    if path != "-" and Path(path).is_fifo():  # opened once: its writer ends when nobody reads it
        return Completions(path, None)
    with _opened(path) as file:
        is_counted = path != "-" and Path(path).is_file()  # others can be read only once
        total = sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK_BYTES), b"")) if is_counted else None
    return Completions(path, total)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    # Not sys.stdin: a thread may wait in it when the process ends, and Python aborts over the lock that it holds.
    source: str | int = 0 if path == "-" else path
    try:
        with open(source, "rb", closefd=path != "-") as file:
            yield file
    except OSError as error:
        raise DatasetInvalid(
            f"{_shown(path)}: must be a readable file, got {error.strerror or error}; check the path of --completions"
        ) from error


def _shown(path: str) -> str:
    return "stdin" if path == "-" else path


def _line(place: str, record: Record | str) -> Line:
    if isinstance(record, str):
        return Line(place, NO_PROMPT, fault=record)
    row = {name: value for name, value in record.values.items() if name not in (REFERENCE, COMPLETION)}
    fault = next(_faults(record), "")
    if fault:
        return Line(place, NO_PROMPT, copied=row, fault=fault)
    assert record.reference is not None, "a record without faults has a reference"
    text = row.get("prompt")
    prompt = replace(NO_PROMPT, text=text if isinstance(text, str) else "", answer=record.reference, row=row)
    return Line(place, prompt, record.values[COMPLETION], row)


def _faults(record: Record) -> Iterator[str]:
    for name in (REFERENCE, COMPLETION):
        if name not in record.values:
            there = ", ".join(sorted(record.values)) or "none"
            yield f"field {name!r} must be there, got fields {there}; give every line a reference and a completion"
    yield from record.reference_faults(REFERENCE)
    completion = record.values[COMPLETION]
    if not isinstance(completion, str):
        yield f"field {COMPLETION!r} must be text, got {type_name(completion)}; write what the policy answered"
