"""Read the records of Parquet, CSV and TSV files by a worker with limits of memory and time (`limited_process`).

A Parquet file of some KB may hold a column of a TB, since equal values are stored once. Its types may be nested deeper
than Arrow's own code bears. A CSV file of 10 MB may have a million columns, for which Arrow takes 8 GB. So another
process decodes them, and this one gets batches of at most BATCH_BYTES.

Every column of a CSV file is read as text, since a reference reaches its verifier as the file writes it.

Called by `sources` and `specrl init`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specrl.errors import DatasetInvalid
from specrl.files import check_regular
from specrl.prompts.columns import (
    DatasetRecord,
    NumberedRow,
    format_table_references,
    list_columns,
    select_table_column,
)
from specrl.prompts.limited_process import LimitedProcess, LimitReached
from specrl.spec.data import FieldMapping

if TYPE_CHECKING:
    import pyarrow

BATCH_BYTES = 64 << 20
"""Most bytes of a batch, and so of a record: as many as of a line of JSON."""

_WORKER_MIB = 4096
"""Memory of the worker: a page of a Parquet column has at most 2 GiB."""

_WORKER_S = 60
"""Processor seconds for one batch, which has at most 1,024 rows."""


class TableFormat(StrEnum):
    """The format of a file with a table. The values are tasks of the worker."""

    PARQUET = "parquet"
    CSV = "csv"


def find_table_format(path: str) -> TableFormat | None:
    """Find the format of a file of a data set by its name; None if it is no table. CSV and TSV may be packed as .gz."""
    name = path.lower()
    if name.endswith(".parquet"):
        return TableFormat.PARQUET
    return TableFormat.CSV if name.removesuffix(".gz").endswith((".csv", ".tsv")) else None


def read_table_rows(path: str, kind: TableFormat, fields: FieldMapping, keeps_rows: bool) -> Iterator[NumberedRow]:
    """Yield the rows of a file with their numbers. Reads only the columns that are needed.

    Raises DatasetInvalid, and OSError for a path that is no regular file.
    """
    with closing(_Reader(path, kind)) as reader:
        there = reader.read_names()
        # A dict as an ordered set, since two purposes may name the same column.
        # Of a path only the first part is a column.
        known = set(there)
        named = [name for _, name in list_columns(fields)]
        wanted = dict.fromkeys(name if name in known else name.partition(".")[0] for name in named)
        if not set(wanted) <= known:
            # Report row 1 alone: every row lacks the same columns.
            yield 1, DatasetRecord(dict.fromkeys(there), None)
            return
        number = 0
        for batch in reader.read_batches([] if keeps_rows else list(wanted)):
            for record in _convert_rows(batch, fields.answer):
                number += 1
                yield number, record


def read_first_row(path: str, kind: TableFormat) -> dict[str, Any]:
    """Return the first row of a file, or its columns with null if it has no row. Raises as above."""
    with closing(_Reader(path, kind)) as reader:
        there = reader.read_names()
        for batch in reader.read_batches([]) if there else ():
            (record,) = _convert_rows(batch.slice(0, 1), there[0])
            if isinstance(record, str):
                raise DatasetInvalid(f"{path}:1: {record}")
            return dict(record.values)
        return dict.fromkeys(there)


def _convert_rows(batch: pyarrow.RecordBatch, answer: str) -> Iterator[DatasetRecord | str]:
    """Yield a record for each row of a batch, or why it is malformed.

    A file may hold text that is not UTF-8, a date of the year 300,000, or a map with a key twice. Arrow does not say in
    which row. So a batch that cannot be converted is halved, until the malformed row is alone.
    """
    import pyarrow

    try:
        records = batch.to_pylist(maps_as_pydicts="strict")
        references = format_table_references(select_table_column(batch, answer))
    except (pyarrow.ArrowException, ValueError, OverflowError, KeyError) as error:
        if batch.num_rows > 1:
            half = batch.num_rows // 2
            yield from _convert_rows(batch.slice(0, half), answer)
            yield from _convert_rows(batch.slice(half), answer)
            return
        reason = str(error.args[0] if isinstance(error, KeyError) else error).partition("\n")[0]
        yield f"must be values that Python can hold, got {reason}; correct the row"
        return
    for values, reference in zip(records, references, strict=True):
        yield DatasetRecord(values, reference)


class _Reader:
    """A worker that reads one file."""

    def __init__(self, path: str, kind: TableFormat) -> None:
        check_regular(Path(path))
        self._path = path
        self._kind = kind
        self._worker = LimitedProcess(kind.value, _WORKER_MIB, _WORKER_S)

    def close(self) -> None:
        self._worker.close()

    def read_names(self) -> list[str]:
        """Read the names of the columns."""
        return [str(name) for answer in self._ask(None) for name in answer["names"]]

    def read_batches(self, columns: list[str]) -> Iterator[pyarrow.RecordBatch]:
        """Yield the rows of some columns; of all with []."""
        import pyarrow

        for answer in self._ask(columns):
            if isinstance(answer, bytes):
                try:
                    with pyarrow.ipc.open_stream(answer) as stream:
                        yield from (batch for batch in stream if batch.num_rows)
                except (pyarrow.ArrowException, UnicodeDecodeError) as error:
                    raise self._refuse(str(error).partition("\n")[0]) from error

    def _ask(self, columns: list[str] | None) -> Iterator[Any]:
        request = {"path": self._path, "columns": columns, "most_bytes": BATCH_BYTES}
        try:
            for answer in self._worker.ask(request):
                if isinstance(answer, dict) and "fault" in answer:
                    raise self._refuse(answer["fault"])
                yield answer
        except LimitReached as error:
            raise self._refuse(f"one that needs {error}") from error

    def _refuse(self, reason: str) -> DatasetInvalid:
        wanted = "a Parquet file" if self._kind is TableFormat.PARQUET else "a CSV file with a head line"
        return DatasetInvalid(f"{self._path}: must be {wanted}, got {reason}; check the file")
