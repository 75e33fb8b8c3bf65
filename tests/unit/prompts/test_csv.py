"""CSV files of a stranger are read as they are written, within limits of memory and time, or refused in one line."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from specrl.errors import DatasetInvalid
from specrl.prompts import table_rows
from specrl.prompts.limited_worker import BATCH_ROWS, MOST_COLUMNS
from specrl.prompts.sources import ProblemSource, open_problem_source
from specrl.prompts.table_rows import TableFormat, read_first_row
from specrl.spec.data import FieldMapping, HubSource, PromptSource


def read(
    tmp_path: Path, content: bytes, name: str = "train.csv", *, keeps_rows: bool = False, **fields: str
) -> ProblemSource:
    """Write a file, and read it as that of a data set from the hub."""
    path = tmp_path / name
    path.write_bytes(content)
    found = HubSource(name="team/sums", files=(str(path),), fields=FieldMapping(**fields))
    return open_problem_source(PromptSource(dataset=found), keeps_rows=keeps_rows)


def test_every_column_is_text_as_the_file_has_it(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbfquestion,answer,other\n"a, ""b""\nc",0.50,1\n\nd,007,\ne,NaN,x\n'
    source = read(tmp_path, content, keeps_rows=True)
    assert [(problem.question, problem.answer) for problem in source.problems] == [
        ('a, "b"\nc', "0.50"),
        ("d", "007"),
        ("e", "NaN"),
    ]
    assert list(source.numbers) == [1, 2, 3]
    assert [dict(problem.row or {})["other"] for problem in source.problems] == ["1", "", "x"]
    assert read(tmp_path, content).problems[0].row is None


@pytest.mark.parametrize("name", ["train.tsv", "train.tsv.gz", "TRAIN.TSV"])
def test_tabs_separate_a_tsv_file(tmp_path: Path, name: str) -> None:
    content = b"question\tanswer\na, b\t1\n"
    (problem,) = read(tmp_path, gzip.compress(content) if name.endswith("gz") else content, name).problems
    assert (problem.question, problem.answer) == ("a, b", "1")


def test_the_last_of_two_columns_with_the_same_name_counts(tmp_path: Path) -> None:
    """As in JSON."""
    (problem,) = read(tmp_path, b"question,answer,answer\na,1,2\n").problems
    assert problem.answer == "2"


def test_a_missing_column_is_reported_once(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"train\.csv:1: field 'answer' must exist, got fields question, result"):
        read(tmp_path, b"question,result\na,1\nb,2\n")
    assert read(tmp_path, b"question,result\na,1\n", answer="result").problems[0].answer == "1"


def test_large_files_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [f"{number},{number}" for number in range(3 * BATCH_ROWS + 7)]
    source = read(tmp_path, "\n".join(["question,answer", *rows]).encode())
    assert [problem.question for problem in source.problems] == [row.partition(",")[0] for row in rows]
    assert list(source.numbers) == list(range(1, len(rows) + 1))
    monkeypatch.setattr(table_rows, "BATCH_BYTES", 1000)
    assert len(read(tmp_path, "\n".join(["question,answer", *rows]).encode())) == len(rows)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b'question,answer\na,1\n"' + b"x" * 50_000, "a head line or a record of more than 4000 bytes"),
        (b'question,answer\n"' + b"x" * 5000 + b'",1\n', "more than 4000 bytes in row 1"),
        (b"question,answer\n" + b"a" * 5000 + b",1\n", "more than 4000 bytes in row 1"),
        (b",".join(b"%d" % number for number in range(MOST_COLUMNS + 1)) + b"\n", "10001 columns, of at most 10000"),
        (b",".join(b"%d" % number for number in range(100_000)) + b"\n", "100000 columns, of at most 10000"),
        (
            b",".join(b"%d" % number for number in range(5000)) + b"\n",
            "a head line or a record of more than 4000 bytes",
        ),
        (b"question,answer\na,1,2\n", "Expected 2 columns, got 3"),
        (b"question,answer\na\xff,1\n", "invalid UTF8"),
        (b"question\xff,answer\na,1\n", "can't decode"),
        (b"", "Empty CSV file"),
    ],
    ids=[
        *("no end of a field", "a long field", "a long word", "many columns", "very many columns"),
        *("a long head line", "an odd row"),
        *("no UTF-8", "no UTF-8 in a name", "nothing"),
    ],
)
def test_a_file_that_is_not_a_small_table_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, reason: str
) -> None:
    """The coordinator read it itself: a head line of 7 MB took 8 GB of memory."""
    monkeypatch.setattr(table_rows, "BATCH_BYTES", 4000)
    with pytest.raises(DatasetInvalid, match=rf"train\.csv: must be a CSV file with a head line, got .*{reason}") as it:
        read(tmp_path, content)
    assert len(str(it.value).splitlines()) == 1


@pytest.mark.timeout(300)
def test_a_packed_file_without_records_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of 16 MB has 16 GB of blank lines. The limit is that of the worker's processor time."""
    monkeypatch.setattr(table_rows, "_WORKER_S", 2)
    content = gzip.compress(b"question,answer\na,1\n") + gzip.compress(b"\n" * (1 << 24)) * 1000
    with pytest.raises(DatasetInvalid, match="got one that needs more than 2 s of processor time"):
        read(tmp_path, content, "train.csv.gz")


def test_the_first_row_shows_the_columns_also_of_a_file_without_rows(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3,4\n")
    assert read_first_row(str(tmp_path / "a.csv"), TableFormat.CSV) == {"a": "1", "b": "2"}
    (tmp_path / "a.csv").write_text("a,b\n")
    assert read_first_row(str(tmp_path / "a.csv"), TableFormat.CSV) == {"a": None, "b": None}
