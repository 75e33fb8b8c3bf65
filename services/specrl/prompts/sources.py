"""Read problems from JSONL, from Parquet, from the files of a data set on the hub, or from a generated family.

Sources are read once, when the coordinator starts (`stream.open_sources`). Invariant: every problem of an open source
has a valid question and answer. A malformed record stops the run before it starts, with file, line and field. With
`onBadLine: Skip` it is left out and counted instead. Problems are held in memory: a million of GSM8K's size take about
1 GB. `columns` reads the single record.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import BinaryIO, NamedTuple, cast

import xxhash

from specrl.errors import DatasetInvalid
from specrl.files import open_regular
from specrl.machine import available_memory_bytes
from specrl.prompts import families
from specrl.prompts.columns import (
    DatasetProblem,
    DatasetRecord,
    NumberedRow,
    measure_memory,
    parse_json_record,
)
from specrl.prompts.json_lists import has_json_list, read_json_rows
from specrl.prompts.table_rows import TableFormat, find_table_format, read_table_rows
from specrl.spec.data import FieldMapping, FileSource, GeneratedSource, HubSource, OnBadLine, PromptSource

LINE_BYTES = 64 << 20
"""Most bytes of one record, 64 MiB. A file without line ends would otherwise be read until memory is full."""

PASSED_OVER_BYTES = 1 << 30
"""Most bytes without a record: blank lines, or the rest of a line that is too long. A packed file may have many."""

FILE_REMEDY = "correct the file, or leave out the malformed records with onBadLine: Skip"

SHOWN_FAULTS = 10
"""Different faults listed in one message; the rest are counted."""
_SHOWN_RANGES = 5
"""Ranges of lines listed for one fault; the rest are counted."""


@dataclass(frozen=True)
class ProblemFault:
    """One fault of a record. source: its file or family. number: as in `ProblemSource.numbers`."""

    source: str
    number: int
    text: str

    def __str__(self) -> str:
        return f"{self.source}:{self.number}: {self.text}"


@dataclass(frozen=True)
class ProblemSource:
    """A finite list of problems.

    name: the file or the family, for messages. numbers: of each problem, its line (JSONL) or row (Parquet) from 1.
    can_skip: whether problems may be left out (`onBadLine: Skip`). remedy: what a user does if they may not.
    skipped: `file:line: faults` of each record that was left out. revision: of the data set, if it has revisions.
    """

    name: str
    problems: Sequence[DatasetProblem]
    numbers: Sequence[int]
    can_skip: bool = False
    remedy: str = FILE_REMEDY
    skipped: tuple[str, ...] = ()
    revision: str = ""

    @cached_property
    def digest(self) -> str:
        """Digest of all problems in their order: what is asked, and the reference.

        Without solutions and rows, which are kept for some verifiers only: a run may go on with another verifier.
        """
        content = xxhash.xxh3_128()
        for problem in self.problems:
            # As JSON, in which no two different problems have the same text.
            content.update(json.dumps([problem.question, problem.answer, *problem.messages]).encode())
        return content.hexdigest()

    @cached_property
    def rows_digest(self) -> str:
        """Digest of all columns of all problems; empty if they are not kept, as for most verifiers."""
        if all(problem.row is None for problem in self.problems):
            return ""
        content = xxhash.xxh3_128()
        for problem in self.problems:
            content.update(json.dumps(problem.row).encode())
        return content.hexdigest()

    def __len__(self) -> int:
        """Return the number of problems."""
        return len(self.problems)

    @property
    def repeated(self) -> int:
        """Problems with the question of an earlier one. They are kept, so such a question is asked more often."""
        return len(self.problems) - len({problem.question for problem in self.problems})

    def locate_problem(self, index: int) -> str:
        """Return where a user finds that problem: `train.jsonl:17`."""
        return f"{self.name}:{self.numbers[index]}"

    def make_fault(self, index: int, text: str) -> ProblemFault:
        """Return what is wrong with that problem, with its place."""
        return ProblemFault(self.name, self.numbers[index], text)

    def select_problems(self, indices: Sequence[int]) -> ProblemSource:
        """Return a source of these problems alone, in this order."""
        return replace(self, problems=[self.problems[i] for i in indices], numbers=[self.numbers[i] for i in indices])

    def without_problems(self, faults: Mapping[int, str]) -> ProblemSource:
        """Return the source without some problems. faults: maps each one's index to the reason.

        Raises DatasetInvalid if the source may not leave problems out, or if none would remain.
        """
        named = [self.make_fault(index, text) for index, text in faults.items()]
        kept = self.select_problems([index for index in range(len(self)) if index not in faults])
        return _check_problems(replace(kept, skipped=(*self.skipped, *_format_records(named))), named)


def open_problem_source(
    source: PromptSource, exclude: Collection[str] = (), *, keeps_rows: bool = False
) -> ProblemSource:
    """Read or generate every problem of `source`. Raises DatasetInvalid for malformed records that may not be skipped.

    exclude: the training questions, if `source` is for validation. A family draws other problems instead. A file that
    contains any of them is refused, since leaving them out would change the meaning of its accuracy.
    keeps_rows: whether problems keep all columns in memory, for a verifier that may ask for them.
    """
    if source.jsonl is not None:
        found = _read_source(source.jsonl, _read_jsonl_rows(source.jsonl.path, source.jsonl.fields.answer), keeps_rows)
    elif source.parquet is not None:
        file = source.parquet
        rows = read_table_rows(file.path, TableFormat.PARQUET, file.fields, keeps_rows)
        found = _read_source(file, rows, keeps_rows)
    elif source.dataset is not None:
        found = _read_data_set(source.dataset, keeps_rows)
    elif source.generated is not None:
        found = _generate_problems(source.generated, exclude)
    else:
        members = "jsonl, parquet, dataset, generated"
        raise DatasetInvalid(f"source must be one of {members}, got none; name one in the run file")
    rule = "validation questions must not be training questions"
    fault = "the question is also a training question, which validation must not have"
    known = [found.make_fault(i, fault) for i, problem in enumerate(found.problems) if problem.question in exclude]
    if known:
        raise DatasetInvalid(summarise_faults(rule, known, "remove them from either file"))
    return found


def summarise_faults(rule: str, faults: Sequence[ProblemFault], remedy: str) -> str:
    """Build one message for all faults: one line for a single fault, else the first lines and the number of all.

    Equal faults of one source share a line, which has the numbers of their records.
    """
    if len(faults) == 1:
        return f"{faults[0]} ({remedy})"
    numbers: dict[tuple[str, str], list[int]] = {}
    for fault in faults:
        numbers.setdefault((fault.source, fault.text), []).append(fault.number)
    lines = [f"{source}:{_format_ranges(found)}: {text}" for (source, text), found in numbers.items()]
    shown = "".join(f"\n  {line}" for line in lines[:SHOWN_FAULTS])
    left = sum(len(found) for found in list(numbers.values())[SHOWN_FAULTS:])
    more = f"\n  and {left} more" if left else ""
    return f"{rule}, got {len(faults)} faults; {remedy}:{shown}{more}"


def _format_records(faults: Sequence[ProblemFault]) -> tuple[str, ...]:
    """Format one line for each record that has faults."""
    texts: dict[tuple[str, int], list[str]] = {}
    for fault in faults:
        texts.setdefault((fault.source, fault.number), []).append(fault.text)
    return tuple(f"{source}:{number}: {'; '.join(found)}" for (source, number), found in texts.items())


def _format_ranges(numbers: Sequence[int]) -> str:
    """Format ascending numbers as in `1 to 7, 9 and 30 more`."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1] = [ranges[-1][0], number]
        else:
            ranges.append([number])
    shown = ", ".join(" to ".join(map(str, ends)) for ends in ranges[:_SHOWN_RANGES])
    left = sum(ends[-1] - ends[0] + 1 for ends in ranges[_SHOWN_RANGES:])
    return f"{shown} and {left} more" if left else shown


def _check_problems(source: ProblemSource, faults: Sequence[ProblemFault]) -> ProblemSource:
    """Return a source that has left out problems with these faults. Raises DatasetInvalid if it must not, or is empty.

    Called for a whole source: one of several files may be empty, or have no valid problem.
    """
    if not source.problems and not faults:
        raise DatasetInvalid(
            f"{source.name}: must have at least one problem, got an empty data set; check that it is the right one"
        )
    if faults and not source.can_skip:
        raise DatasetInvalid(summarise_faults(f"{source.name}: every problem must be valid", faults, source.remedy))
    if faults and not source.problems:
        rule = f"{source.name}: at least one problem must be valid"
        raise DatasetInvalid(summarise_faults(rule, faults, "correct the file"))
    return source


def _generate_problems(source: GeneratedSource, exclude: Collection[str]) -> ProblemSource:
    """Generate distinct problems of a family. exclude: questions that must not be among them."""
    usual = families.default_difficulty(source.family)
    # Level n makes problems n steps longer than the default.
    level = replace(usual, shortest=usual.shortest + source.difficulty, longest=usual.longest + source.difficulty)
    drawn = families.held_out_problems(source.family, source.seed, source.count, exclude, level)
    return ProblemSource(
        name=f"{source.family}(seed={source.seed}, difficulty={source.difficulty})",
        problems=[DatasetProblem(problem.question, problem.answer) for problem in drawn],
        numbers=range(1, len(drawn) + 1),
        # A family has no records that a user could correct, so nothing can be left out.
        remedy="raise prompts.maxTokens, lower difficulty, or use another verifier",
    )


class _FileRecords(NamedTuple):
    """The valid problems of a file, the line or row of each, and the faults of the others."""

    problems: list[DatasetProblem]
    numbers: list[int]
    faults: list[ProblemFault]


def _read_source(source: FileSource, rows: Iterator[NumberedRow], keeps_rows: bool) -> ProblemSource:
    found = _read_file(source.path, source.fields, rows, keeps_rows)
    return _check_problems(
        ProblemSource(
            str(Path(source.path)),
            found.problems,
            found.numbers,
            can_skip=source.on_bad_line is OnBadLine.SKIP,
            skipped=_format_records(found.faults),
        ),
        found.faults,
    )


def _read_file(name: str, fields: FieldMapping, rows: Iterator[NumberedRow], keeps_rows: bool) -> _FileRecords:
    path = Path(name)
    if not path.is_file():
        raise DatasetInvalid(
            f"{path}: must be a readable file, got {_describe_path(path)}; check the path in the run file"
        )
    problems: list[DatasetProblem] = []
    numbers: list[int] = []
    faults: list[ProblemFault] = []  # all faults are reported at once
    room_bytes = available_memory_bytes() // 2  # a file of some KB may hold a thousand times as much
    try:
        for number, record in rows:
            wrong = [record] if isinstance(record, str) else list(record.find_faults(fields))
            faults += [ProblemFault(str(path), number, text) for text in wrong]
            room_bytes -= measure_memory(wrong)
            if not wrong and isinstance(record, DatasetRecord):
                problem = record.to_problem(fields, keeps_rows)
                room_bytes -= measure_memory(problem)
                problems.append(problem)
                numbers.append(number)
            if room_bytes < 0:
                raise DatasetInvalid(
                    f"{path}: must fit in half of the memory that this machine has free, got more by record {number}; "
                    "split the file, or leave out columns that no verifier needs"
                )
    except OSError as error:
        raise DatasetInvalid(
            f"{path}: must be a readable file, got {error.strerror or error}; check its permissions"
        ) from error
    return _FileRecords(problems, numbers, faults)


def _read_data_set(source: HubSource, keeps_rows: bool) -> ProblemSource:
    """Read the files of a data set that has been fetched, as one source. Its rows are numbered across the files."""
    name = source.name if source.config is None else f"{source.name}/{source.config}"
    if not source.is_fetched:
        raise DatasetInvalid(
            f"{name}: must have been fetched before it is read, got no files; start it with `specrl run`, or fetch it "
            "with `specrl fetch` and name its files"
        )
    can_skip = source.on_bad_line is OnBadLine.SKIP
    parts: list[_FileRecords] = []
    for path in source.files:
        parts.append(_read_file(path, source.fields, _read_rows(path, source.fields, keeps_rows), keeps_rows))
        if parts[-1].faults and not can_skip:
            break  # with a wrong name of a column, every record of a large data set would have a fault
    problems = [problem for part in parts for problem in part.problems]
    faults = [fault for part in parts for fault in part.faults]
    return _check_problems(
        ProblemSource(
            f"{name}:{source.split}",
            problems,
            range(1, len(problems) + 1),
            can_skip,
            skipped=_format_records(faults),
            revision=source.revision or "",
        ),
        faults,
    )


def _read_rows(path: str, fields: FieldMapping, keeps_rows: bool) -> Iterator[NumberedRow]:
    """Yield the records of a file of a data set, in the format that its name tells."""
    kind = find_table_format(path)
    if kind is None:
        yield from read_json_records(path, fields.answer)
    else:
        yield from read_table_rows(path, kind, fields, keeps_rows)


def read_json_records(path: str, answer: str) -> Iterator[NumberedRow]:
    """Yield the records of a JSON or JSON Lines file, in the format that its name tells.

    A name that ends in .gz is unpacked. answer: the name of the answer column. Raises DatasetInvalid, OSError.
    """
    if path.lower().endswith(".json") and has_json_list(path):
        yield from read_json_rows(path, answer)
    else:
        yield from _read_jsonl_rows(path, answer)


def _describe_path(path: Path) -> str:
    return "a folder" if path.is_dir() else "something that is not a file" if path.exists() else "no such file"


def _read_jsonl_rows(path: str, answer: str) -> Iterator[NumberedRow]:
    try:
        with open_regular(Path(path)) as raw, gzip.open(raw) if path.endswith(".gz") else raw as file:
            yield from read_jsonl(cast("BinaryIO", file), answer)
    except (EOFError, zlib.error) as error:
        raise DatasetInvalid(f"{path}: must be whole, got {error}; fetch it again") from error


def read_jsonl(file: BinaryIO, answer: str) -> Iterator[NumberedRow]:
    """Yield the records of a JSONL file with their line numbers. Blank lines are skipped.

    Only a line feed ends a line, since U+2028 may stand inside text. answer: the name of the answer column.
    """
    number = 0
    passed_over = 0  # bytes since the last record
    while line := file.readline(LINE_BYTES + 1):
        number += 1
        if len(line) > LINE_BYTES:
            yield number, f"must be at most {LINE_BYTES} bytes, got more; check that this is the right file"
            # Read on to the end of the line, so that the next record starts at a line start.
            while line and not line.endswith(b"\n") and passed_over <= PASSED_OVER_BYTES:
                passed_over += len(line)
                line = file.readline(LINE_BYTES)
        elif line.strip():
            passed_over = 0
            # A UTF-8 byte order mark, which some editors write, is not part of the first record.
            yield number, _parse_line(line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line, answer)
        passed_over += len(line)
        if passed_over > PASSED_OVER_BYTES:
            yield number, f"must be followed by a record within {PASSED_OVER_BYTES} bytes, got none; check the file"
            return


def _parse_line(line: bytes, answer: str) -> DatasetRecord | str:
    try:
        text = line.decode("utf-8")
    except UnicodeDecodeError as error:
        return f"must be UTF-8, got byte {line[error.start]:#04x} at column {error.start + 1}; convert the file"
    return parse_json_record(text.rstrip("\r\n"), answer)
