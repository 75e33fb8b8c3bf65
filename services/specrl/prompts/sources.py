"""Where problems come from: JSONL, Parquet, or a generated family, behind one protocol.

Stage 1 of the loop, read once when the coordinator starts (`stream.open_sources`). Invariant: a source that opens is
sound. Every record has a question and an answer, and a malformed one stops the run before it starts, named by file,
line and field; or, with `onBadLine: Skip`, is left out and counted. Problems are held in memory: a million of GSM8K's
size take about 1 GB. What columns hold is read by `columns`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Protocol

from specrl.errors import DatasetInvalid
from specrl.prompts import families
from specrl.prompts.columns import Problem, Record, json_record, table_references
from specrl.spec.data import FileSource, GeneratedSource, OnBadLine, PromptSource

LINE_BYTES = 64 << 20
"""Of one record. A line without an end would otherwise be read until memory is full."""

REMEDY = "correct the file, or leave out what is wrong with onBadLine: Skip"

SHOWN = 10
"""Faults spelled out in one message. More of them are mostly the same fault again; the rest are counted."""


@dataclass(frozen=True)
class LeftOut:
    """What a source was read without or has more than once. skipped: `file:line: fault` of each record left out."""

    skipped: tuple[str, ...] = ()
    repeated: int = 0
    """Records whose question an earlier one has, too. They are kept: such a problem is asked more often."""


class ProblemSource(Protocol):
    """A finite list of problems. Implementations: `FileProblems`, `GeneratedProblems`."""

    def __len__(self) -> int:
        """Problems in the source, at least 1."""

    def problem(self, index: int) -> Problem:
        """Problem number `index`, 0 <= index < len."""

    def place(self, index: int) -> str:
        """Where a person finds that problem: `train.jsonl:17`."""

    @property
    def left_out(self) -> LeftOut:
        """What it was read without."""

    def without(self, faults: Mapping[int, str]) -> ProblemSource:
        """The same without some problems, each with what is wrong with it. Raises DatasetInvalid if none may go."""


@dataclass(frozen=True)
class FileProblems:
    """Problems of a file. `rows[i]` is the line (JSONL) or row (Parquet) of problem i, from 1.

    can_skip: whether bad records are left out, or refused; skipped: those that were.
    """

    path: str
    problems: Sequence[Problem]
    rows: Sequence[int]
    can_skip: bool
    skipped: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.problems)

    def problem(self, index: int) -> Problem:
        return self.problems[index]

    def place(self, index: int) -> str:
        return f"{self.path}:{self.rows[index]}"

    @property
    def left_out(self) -> LeftOut:
        return LeftOut(self.skipped, len(self.problems) - len({problem.question for problem in self.problems}))

    def without(self, faults: Mapping[int, str]) -> FileProblems:
        named = [f"{self.place(index)}: {fault}" for index, fault in faults.items()]
        if not self.can_skip:
            raise DatasetInvalid(summarise(f"{self.path}: every record must be sound", named, REMEDY))
        kept = [index for index in range(len(self)) if index not in faults]
        if not kept:
            raise DatasetInvalid(summarise(f"{self.path}: a record at least must be sound", named, "correct the file"))
        return replace(
            self,
            problems=[self.problems[index] for index in kept],
            rows=[self.rows[index] for index in kept],
            skipped=(*self.skipped, *named),
        )


class GeneratedProblems:
    """Distinct problems of a family. `exclude` holds questions that must not be among them."""

    def __init__(self, source: GeneratedSource, exclude: Collection[str] = ()) -> None:
        self._name = f"{source.family}(seed={source.seed}, difficulty={source.difficulty})"
        drawn = families.held_out_problems(source.family, source.seed, source.count, exclude, _difficulty(source))
        self._problems = [Problem(problem.question, problem.answer) for problem in drawn]

    def __len__(self) -> int:
        return len(self._problems)

    def problem(self, index: int) -> Problem:
        return self._problems[index]

    def place(self, index: int) -> str:
        return f"{self._name}:{index + 1}"

    @property
    def left_out(self) -> LeftOut:
        return LeftOut()  # distinct, and sound by construction

    def without(self, faults: Mapping[int, str]) -> ProblemSource:
        named = [f"{self.place(index)}: {fault}" for index, fault in faults.items()]
        remedy = "raise prompts.maxTokens, lower difficulty, or use another verifier"
        raise DatasetInvalid(summarise(f"{self._name}: every problem must fit", named, remedy))


def open_source(source: PromptSource, exclude: Collection[str] = (), *, keeps_rows: bool = False) -> ProblemSource:
    """Read or generate every problem of `source`. Raises DatasetInvalid unless all of them are sound.

    exclude: questions that are trained on, when `source` is for validation. A family draws others in their place;
    a file that holds any of them is refused, since leaving them out would change what its accuracy means.
    keeps_rows: for a verifier that may ask for the other columns of a record; they stay in memory.
    """
    if source.jsonl is not None:
        found: ProblemSource = _read(source.jsonl, _jsonl_rows, keeps_rows)
    elif source.parquet is not None:
        found = _read(source.parquet, _parquet_rows, keeps_rows)
    elif source.generated is not None:
        return GeneratedProblems(source.generated, exclude)
    else:
        raise DatasetInvalid("a prompt source must be one of jsonl, parquet, generated, got none; name one in the run")
    rule = "validation problems must not be among the run's prompts"
    fault = "is trained on, which validation problems must not be"
    known = [f"{found.place(i)}: {fault}" for i in range(len(found)) if found.problem(i).question in exclude]
    if known:
        raise DatasetInvalid(summarise(rule, known, "take them out of either file"))
    return found


def summarise(rule: str, faults: list[str], remedy: str) -> str:
    """One message for all faults: a single one on one line, of many the first in full and the others as a count."""
    if len(faults) == 1:
        return f"{faults[0]} ({remedy})"
    lines = "".join(f"\n  {fault}" for fault in faults[:SHOWN])
    more = f"\n  and {len(faults) - SHOWN} more" if len(faults) > SHOWN else ""
    return f"{rule}, got {len(faults)} that break this; {remedy}:{lines}{more}"


def _difficulty(source: GeneratedSource) -> families.Difficulty:
    """Level n makes the shortest and the longest problem n steps longer than the family's own default."""
    usual = families.default_difficulty(source.family)
    return replace(usual, shortest=usual.shortest + source.difficulty, longest=usual.longest + source.difficulty)


Row = tuple[int, Record | str]
"""A line or row number from 1, and its record, or what is wrong with it."""


def _read(source: FileSource, rows: Callable[[FileSource, bool], Iterator[Row]], keeps_rows: bool) -> FileProblems:
    path = Path(source.path)
    if not path.is_file():
        raise DatasetInvalid(f"{path}: must be a readable file, got {_kind_of(path)}; check the path in the run file")
    problems: list[Problem] = []
    numbers: list[int] = []
    faults: list[str] = []
    can_skip = source.on_bad_line is OnBadLine.SKIP
    try:
        for number, record in rows(source, keeps_rows):
            wrong = [record] if isinstance(record, str) else list(record.faults(source.fields))
            faults += [f"{path}:{number}: {fault}" for fault in wrong]
            if not wrong and isinstance(record, Record):
                problems.append(record.problem(source.fields, keeps_rows))
                numbers.append(number)
    except OSError as error:
        raise DatasetInvalid(
            f"{path}: must be a readable file, got {error.strerror or error}; check its permissions"
        ) from error
    if faults and not can_skip:
        raise DatasetInvalid(summarise(f"{path}: every record must be sound", faults, REMEDY))
    if faults and not problems:
        raise DatasetInvalid(summarise(f"{path}: a record at least must be sound", faults, "correct the file"))
    if not problems:
        raise DatasetInvalid(f"{path}: must hold at least one problem, got an empty data set; check the path")
    return FileProblems(str(path), problems, numbers, can_skip, tuple(faults))


def _kind_of(path: Path) -> str:
    return "a folder" if path.is_dir() else "something that is no file" if path.exists() else "no file there"


def _jsonl_rows(source: FileSource, _keeps_rows: bool) -> Iterator[Row]:
    with Path(source.path).open("rb") as file:
        yield from read_jsonl(file, source.fields.answer)


def read_jsonl(file: BinaryIO, answer: str) -> Iterator[Row]:
    """Lines of a JSONL file; blank ones are skipped. Only a line feed ends a line: U+2028 may stand inside text.

    answer: the name of the column that holds references.
    """
    number = 0
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            yield number, f"must be at most {LINE_BYTES} bytes, got more; is this the right file?"
            while line and not line.endswith(b"\n"):
                line = file.readline(LINE_BYTES)
        elif line.strip():
            yield number, _line_record(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, answer)


def _line_record(line: bytes, answer: str) -> Record | str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"must be UTF-8, got byte {line[error.start]:#04x} at column {error.start + 1}; convert the file"
    return json_record(text.rstrip("\r\n"), answer)


def _parquet_rows(source: FileSource, keeps_rows: bool) -> Iterator[Row]:
    """Rows of a Parquet file. Only the columns that are asked for are read."""
    import pyarrow
    import pyarrow.parquet

    fields = source.fields
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            there = file.schema_arrow.names
            wanted = {name: None for name in (fields.question, fields.answer, fields.solution) if name is not None}
            if not set(wanted) <= set(there):
                # One row stands for all: the same columns are missing in each of them.
                yield 1, Record(dict.fromkeys(there), None)
                return
            number = 0
            for batch in file.iter_batches(columns=None if keeps_rows else list(wanted)):
                records = batch.to_pylist(maps_as_pydicts="strict")
                references = table_references(batch.column(fields.answer))
                for values, reference in zip(records, references, strict=True):
                    number += 1
                    yield number, Record(values, reference)
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).partition("\n")[0]
        raise DatasetInvalid(f"{source.path}: must be a Parquet file, got {reason}; check the path") from error
