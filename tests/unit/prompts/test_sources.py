"""Sources read what is sound and name everything that is not."""

from __future__ import annotations

import json
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from specrl.errors import DatasetInvalid
from specrl.prompts import sources
from specrl.prompts.columns import Problem
from specrl.prompts.sources import open_source
from specrl.spec.data import FieldMapping, FileSource, GeneratedSource, OnBadLine, PromptSource


def jsonl(tmp_path: Path, *lines: str | bytes, **fields: str) -> PromptSource:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b"\n".join(line.encode() if isinstance(line, str) else line for line in lines))
    return PromptSource(jsonl=FileSource(path=str(path), fields=FieldMapping(**fields)))


def parquet(tmp_path: Path, columns: dict[str, Any], **fields: str) -> PromptSource:
    path = tmp_path / "data.parquet"
    pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return PromptSource(parquet=FileSource(path=str(path), fields=FieldMapping(**fields)))


def record(question: str = "1+1?", answer: str = "2") -> str:
    return json.dumps({"question": question, "answer": answer})


def test_jsonl_keeps_the_order_of_the_file_and_skips_blank_lines(tmp_path: Path) -> None:
    source = open_source(jsonl(tmp_path, record("a", "1"), "", record("b", "2"), "  "))
    assert [source.problem(i) for i in range(len(source))] == [Problem("a", "1"), Problem("b", "2")]
    assert source.place(1).endswith("data.jsonl:3")


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps({"question": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False)
    assert open_source(jsonl(tmp_path, line)).problem(0).question == "a\u2028b\x85c"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    source = open_source(jsonl(tmp_path, b"\xef\xbb\xbf" + record("a").encode() + b"\r", record("b")))
    assert [source.problem(i).question for i in range(len(source))] == ["a", "b"]


def test_other_column_names_are_mapped(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "solution": "1", "id": 7})
    assert open_source(jsonl(tmp_path, line, question="prompt", answer="solution")).problem(0) == Problem("a", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": \n', "must be a JSON object on one line, got Expecting value at column 14; correct the syntax"),
        ("[1]", "got a list; write one object a line"),
        ("7", "got a number"),
        (b'{"question": "\xff", "answer": "1"}', "must be UTF-8, got byte 0xff at column 15"),
        ('{"question": "a"}', "field 'answer' must be there, got fields question"),
        ('{"answer": "1"}', "field 'question' must be there, got fields answer"),
        ('{"question": 7, "answer": "1"}', "field 'question' must be text, got a number; it is what the policy"),
        (
            '{"question": "a", "answer": null}',
            "field 'answer' must be text, a number or other JSON, got null; give",
        ),
        ('{"question": "a", "answer": NaN}', "field 'answer' must be a finite number, got NaN"),
        ('{"question": " ", "answer": "1"}', "field 'question' must not be empty"),
        ('{"question": "a", "answer": ""}', "field 'answer' must not be empty"),
        ('{"question": "\\ud800", "answer": "1"}', "field 'question' must be Unicode text"),
        ("[" * 100_000, "must be a JSON object on one line"),
    ],
)
def test_a_malformed_line_is_named_with_file_line_and_remedy(tmp_path: Path, line: str | bytes, said: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        open_source(jsonl(tmp_path, record(), line))
    (fault,) = [row for row in str(caught.value).splitlines() if "data.jsonl:2: " in row]
    assert said in fault
    assert "; " in fault, "a fault comes with its remedy"


def test_many_faults_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match="got 15 that break this") as caught:
        open_source(jsonl(tmp_path, *["{}"] * 7, record(), "null"))
    assert "and 5 more" in str(caught.value)


def test_a_single_fault_is_one_line(tmp_path: Path) -> None:
    """It was announced by a line that says no more than the fault itself."""
    with pytest.raises(DatasetInvalid) as caught:
        open_source(jsonl(tmp_path, record(), "{"))
    (line,) = str(caught.value).splitlines()
    assert line.startswith(f"{tmp_path}/data.jsonl:2: must be a JSON object on one line")


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("18", "18"),
        ("-0", "-0"),
        ("3.50", "3.50"),
        ("0.1000000000000000055", "0.1000000000000000055"),
        ("1e400", "1e400"),
        ("true", "true"),
        ('["a", 1.50]', '["a", 1.50]'),
        ('{"inputs": ["1 2\\n"], "outputs": [1.50]}', '{"inputs": ["1 2\\n"], "outputs": [1.50]}'),
        ('"18"', "18"),
    ],
)
def test_a_reference_that_is_no_text_is_taken_as_it_is_written(tmp_path: Path, written: str, reference: str) -> None:
    """Numbers and objects were refused, with the advice to write them in quotes, an object too."""
    line = f' {{"id": {{"answer": 1}}, "answer" : {written} , "question":"a, {{b"}} '
    assert open_source(jsonl(tmp_path, line)).problem(0) == Problem("a, {b", reference)


def test_of_two_columns_with_one_name_the_last_counts_for_a_number_too(tmp_path: Path) -> None:
    (line,) = ['{"answer": 1.0, "question": "a", "answer": 2.0}']
    assert open_source(jsonl(tmp_path, line)).problem(0).answer == "2.0"


@pytest.mark.parametrize(
    ("column", "reference"),
    [
        (pyarrow.array([18]), "18"),
        (pyarrow.array([18.0]), "18"),  # as pandas writes whole numbers of a column with a gap
        (pyarrow.array([0.1], pyarrow.float32()), "0.1"),
        (pyarrow.array([Decimal("3.50")]), "3.50"),
        (pyarrow.array([True]), "true"),
        (pyarrow.array([18]).dictionary_encode(), "18"),
        (pyarrow.array([date(2026, 11, 25)]), "2026-11-25"),
        (pyarrow.array([{"inputs": ["é"], "fn_name": None}]), '{"inputs": ["é"]}'),
        (pyarrow.array([[("a", 1)]], pyarrow.map_("string", "int64")), '{"a": 1}'),
        (pyarrow.array([[1, 2]]), "[1, 2]"),
    ],
)
def test_a_table_s_reference_that_is_no_text_becomes_text(
    tmp_path: Path, column: pyarrow.Array, reference: str
) -> None:
    """They were refused, with the advice to write them in quotes, which a table has no place for."""
    assert open_source(parquet(tmp_path, {"question": ["a"], "answer": column})).problem(0) == Problem("a", reference)


def test_the_data_s_own_solution_is_read_where_its_column_is_named(tmp_path: Path) -> None:
    lines = [
        json.dumps({"question": "a", "answer": "1", "code": code}) for code in ("x = 1", ["y = 1", "z"], None, [], " ")
    ]
    source = open_source(jsonl(tmp_path, *lines, solution="code"))
    assert [source.problem(i).solution for i in range(5)] == ["x = 1", "y = 1", None, None, None]
    with pytest.raises(DatasetInvalid, match=r"jsonl:1: field 'solved' must be there.*with fields\.solution"):
        open_source(jsonl(tmp_path, lines[0], solution="solved"))
    with pytest.raises(DatasetInvalid, match=r"jsonl:1: field 'code' must be text or null, got a number"):
        open_source(jsonl(tmp_path, '{"question": "a", "answer": "1", "code": 7}', solution="code"))


def test_a_row_is_kept_where_it_is_asked_for_and_holds_json_values_alone(tmp_path: Path) -> None:
    line = '{"question": "a", "answer": {"b": 1}, "level": 3.5, "tags": ["x", null]}'
    assert open_source(jsonl(tmp_path, line)).problem(0).row is None
    row = open_source(jsonl(tmp_path, line), keeps_rows=True).problem(0).row
    assert row == {"question": "a", "answer": {"b": 1}, "level": 3.5, "tags": ["x", None]}
    columns = {
        "question": ["a"],
        "answer": ["1"],
        "image": [b"\xff"],
        "day": [date(2026, 11, 25)],
        "at": [datetime(2026, 11, 25, 12, 30)],  # noqa: DTZ001 - a table without time zones
        "price": [Decimal("3.50")],
        "nested": [{"prices": [Decimal("1.0")]}],
    }
    row = open_source(parquet(tmp_path, columns), keeps_rows=True).problem(0).row
    assert json.loads(json.dumps(row)) == {
        "question": "a",
        "answer": "1",
        "image": "/w==",
        "day": "2026-11-25",
        "at": "2026-11-25T12:30:00",
        "price": "3.50",
        "nested": {"prices": ["1.0"]},
    }


def test_a_missing_file_a_folder_and_an_empty_file_are_told_apart(tmp_path: Path) -> None:
    for path, said in [(tmp_path / "none.jsonl", "no file there"), (tmp_path, "a folder")]:
        with pytest.raises(DatasetInvalid, match=said):
            open_source(PromptSource(jsonl=FileSource(path=str(path))))
    with pytest.raises(DatasetInvalid, match="an empty data set"):
        open_source(jsonl(tmp_path, "", ""))


def test_parquet_reads_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    source = open_source(parquet(tmp_path, {"id": [1, 2], "question": ["a", "b"], "answer": ["1", "2"]}))
    assert [source.problem(i) for i in range(len(source))] == [Problem("a", "1"), Problem("b", "2")]
    assert source.place(1).endswith("data.parquet:2")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": ["a", "b"]}, "field 'answer' must be there, got fields question"),
        ({"question": ["a", None], "answer": ["1", "2"]}, "parquet:2: field 'question' must be text, got null"),
        ({"question": ["a", "b"], "answer": ["1", None]}, "parquet:2: field 'answer' must be text, a number or other"),
        ({"question": ["a", "b"], "answer": [1.5, float("nan")]}, "field 'answer' must be a finite number, got nan"),
        (
            {"question": ["a", "b"], "answer": [b"1", b"2"]},
            "field 'answer' must be text, a number or other JSON, got b",
        ),
        ({"question": ["a", ""], "answer": ["1", "2"]}, "parquet:2: field 'question' must not be empty"),
        ({"question": pyarrow.array([], "string"), "answer": pyarrow.array([], "string")}, "an empty data set"),
    ],
)
def test_a_malformed_table_is_refused(tmp_path: Path, columns: dict[str, Any], said: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        open_source(parquet(tmp_path, columns))
    assert said in str(caught.value)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DatasetInvalid, match="must be a"):
        open_source(PromptSource(parquet=FileSource(path=str(path))))


def test_a_generated_source_holds_distinct_problems_and_is_the_same_again() -> None:
    section = PromptSource(generated=GeneratedSource(family="ledger", count=200, seed=3))
    first, second = open_source(section), open_source(section)
    problems = [first.problem(i) for i in range(len(first))]
    assert len({problem.question for problem in problems}) == 200
    assert problems == [second.problem(i) for i in range(200)]


def test_a_higher_difficulty_makes_longer_problems() -> None:
    def mean_length(difficulty: int) -> float:
        source = open_source(
            PromptSource(generated=GeneratedSource(family="wordProblem", count=100, difficulty=difficulty))
        )
        return sum(len(source.problem(i).question) for i in range(100)) / 100

    assert mean_length(0) < mean_length(1) < mean_length(3)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DatasetInvalid, match="family must be one of"):
        open_source(PromptSource(generated=GeneratedSource(family="nope", count=1)))


def test_trained_questions_are_drawn_around_in_a_family_and_refused_in_a_file(tmp_path: Path) -> None:
    section = PromptSource(generated=GeneratedSource(family="addition", count=50))
    trained = frozenset(open_source(section).problem(i).question for i in range(50))
    held_out = open_source(section, exclude=trained)
    assert trained.isdisjoint(held_out.problem(i).question for i in range(50))
    with pytest.raises(DatasetInvalid, match="jsonl:2: is trained on"):
        open_source(jsonl(tmp_path, record("new"), record("old")), exclude={"old"})


def skipping(path: Path) -> PromptSource:
    kind = "parquet" if path.suffix == ".parquet" else "jsonl"
    return PromptSource(**{kind: FileSource(path=str(path), on_bad_line=OnBadLine.SKIP)})


def test_bad_lines_may_be_skipped_and_are_counted_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        record("a").encode(),
        b"{",
        b'{"question": "\xff", "answer": "1"}',
        record("").encode(),
        record("b").encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    source = open_source(skipping(path))
    assert [(source.problem(i).question, source.place(i)) for i in range(len(source))] == [
        ("a", f"{path}:1"),
        ("b", f"{path}:5"),
    ]
    assert [fault.split(": ")[0] for fault in source.left_out.skipped] == [f"{path}:{line}" for line in (2, 3, 4)]


def test_bad_rows_of_a_table_may_be_skipped(tmp_path: Path) -> None:
    parquet(tmp_path, {"question": ["a", None, " "], "answer": ["1", "2", "3"]})
    source = open_source(skipping(tmp_path / "data.parquet"))
    assert (len(source), len(source.left_out.skipped)) == (1, 2)


def test_a_file_of_bad_lines_alone_is_refused_though_they_may_be_skipped(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{\nnull\n")
    with pytest.raises(DatasetInvalid, match=r"data\.jsonl:1: must be a JSON object"):
        open_source(skipping(path))


def test_a_question_that_is_there_again_is_kept_and_counted(tmp_path: Path) -> None:
    source = open_source(jsonl(tmp_path, record("a"), record("b"), record("a"), record("a", "3")))
    assert (len(source), source.left_out.repeated) == (4, 2)


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 1000)
    path = tmp_path / "data.jsonl"
    path.write_bytes(record("a").encode() + b"\n" + b"x" * 5000 + b"\n" + record("b").encode())
    source = open_source(skipping(path))
    assert [source.place(i) for i in range(len(source))] == [f"{path}:1", f"{path}:3"]
    assert "must be at most 1000 bytes" in source.left_out.skipped[0]
