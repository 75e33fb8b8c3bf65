"""Sources read valid records, and report every malformed one."""

from __future__ import annotations

import io
import json
import re
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from specrl.errors import DatasetInvalid
from specrl.prompts import sources, table_rows
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.json_lists import read_json_rows
from specrl.prompts.sources import open_problem_source
from specrl.spec.data import FieldMapping, FileSource, GeneratedSource, HubSource, OnBadLine, PromptSource


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
    source = open_problem_source(jsonl(tmp_path, record("a", "1"), "", record("b", "2"), "  "))
    assert [source.problems[i] for i in range(len(source))] == [DatasetProblem("a", "1"), DatasetProblem("b", "2")]
    assert source.locate_problem(1).endswith("data.jsonl:3")


def test_a_line_separator_inside_text_does_not_end_the_line(tmp_path: Path) -> None:
    line = json.dumps({"question": "a\u2028b\x85c", "answer": "1"}, ensure_ascii=False)
    assert open_problem_source(jsonl(tmp_path, line)).problems[0].question == "a\u2028b\x85c"


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    source = open_problem_source(jsonl(tmp_path, b"\xef\xbb\xbf" + record("a").encode() + b"\r", record("b")))
    assert [source.problems[i].question for i in range(len(source))] == ["a", "b"]


def test_other_column_names_are_mapped(tmp_path: Path) -> None:
    line = json.dumps({"prompt": "a", "solution": "1", "id": 7})
    assert open_problem_source(jsonl(tmp_path, line, question="prompt", answer="solution")).problems[
        0
    ] == DatasetProblem("a", "1")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"question": \n', "must be a JSON object on one line, got Expecting value at column 14; correct the syntax"),
        ('{"question": "a', "got Unterminated string starting at column 14; correct the syntax"),
        ('{"question": "a\tb", "answer": "1"}', "got Invalid control character at column 16; correct the syntax"),
        ("[1]", "got a list; write one object a line"),
        ("7", "got a number"),
        (b'{"question": "\xff", "answer": "1"}', "must be UTF-8, got byte 0xff at column 15"),
        ('{"question": "a"}', "field 'answer' must exist, got fields question"),
        ('{"answer": "1"}', "field 'question' must exist, got fields answer"),
        (
            '{"question": 7, "answer": "1"}',
            "field 'question' must be text or messages, got a number; it is what the policy",
        ),
        (
            '{"question": "a", "answer": null}',
            "field 'answer' must be text, a number or other JSON, got null; give",
        ),
        ('{"question": "a", "answer": NaN}', "field 'answer' must be a finite number, got NaN"),
        ('{"question": " ", "answer": "1"}', "field 'question' must not be empty"),
        ('{"question": "a", "answer": ""}', "field 'answer' must not be empty"),
        ('{"question": "\\ud800", "answer": "1"}', "field 'question' must be valid Unicode"),
        ("[" * 100_000, "must be a JSON object on one line"),
    ],
)
def test_a_malformed_line_is_reported_with_file_line_and_remedy(tmp_path: Path, line: str | bytes, said: str) -> None:
    with pytest.raises(DatasetInvalid) as caught:
        open_problem_source(jsonl(tmp_path, record(), line))
    (fault,) = [row for row in str(caught.value).splitlines() if "data.jsonl:2: " in row]
    assert said in fault
    assert "; " in fault, "a fault comes with its remedy"


def test_equal_faults_share_a_line(tmp_path: Path) -> None:
    """A wrong column gave ten equal lines."""
    with pytest.raises(DatasetInvalid, match="got 15 faults") as caught:
        open_problem_source(jsonl(tmp_path, *["{}"] * 7, record(), "null"))
    _, question, answer, null = str(caught.value).splitlines()
    assert f"{tmp_path}/data.jsonl:1 to 7: field 'question' must exist" in question
    assert f"{tmp_path}/data.jsonl:1 to 7: field 'answer' must exist" in answer
    assert f"{tmp_path}/data.jsonl:9: must be a JSON object" in null


def test_a_wrong_column_is_one_line_with_a_suggestion(tmp_path: Path) -> None:
    lines = [json.dumps({"question": "a", "anwser": "1"})] * 3
    with pytest.raises(DatasetInvalid) as caught:
        open_problem_source(jsonl(tmp_path, *lines, record(), *lines))
    _, line = str(caught.value).splitlines()
    assert f"{tmp_path}/data.jsonl:1 to 3, 5 to 7: field 'answer' must exist, got fields anwser, question" in line
    assert "did you mean anwser? Name the column of the answer with fields.answer" in line


def test_many_faults_are_counted_and_the_first_are_shown(tmp_path: Path) -> None:
    lines = [json.dumps({f"column-{number}": 1, "question": "a"}) for number in range(15)]
    with pytest.raises(DatasetInvalid, match="got 15 faults") as caught:
        open_problem_source(jsonl(tmp_path, *lines))
    assert len(str(caught.value).splitlines()) == 12
    assert "and 5 more" in str(caught.value)
    scattered = [line for _ in range(8) for line in (record(), "null")]
    with pytest.raises(DatasetInvalid, match=r"data\.jsonl:2, 4, 6, 8, 10 and 3 more: must be a JSON object"):
        open_problem_source(jsonl(tmp_path, *scattered))


def test_a_single_fault_is_one_line(tmp_path: Path) -> None:
    """A heading line used to repeat what the fault says."""
    with pytest.raises(DatasetInvalid) as caught:
        open_problem_source(jsonl(tmp_path, record(), "{"))
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
def test_a_reference_that_is_not_text_keeps_its_json_text(tmp_path: Path, written: str, reference: str) -> None:
    """Numbers and objects used to be refused, with the advice to quote them."""
    line = f' {{"id": {{"answer": 1}}, "answer" : {written} , "question":"a, {{b"}} '
    assert open_problem_source(jsonl(tmp_path, line)).problems[0] == DatasetProblem("a, {b", reference)


def test_the_last_of_two_columns_with_the_same_name_counts(tmp_path: Path) -> None:
    (line,) = ['{"answer": 1.0, "question": "a", "answer": 2.0}']
    assert open_problem_source(jsonl(tmp_path, line)).problems[0].answer == "2.0"


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
def test_a_parquet_reference_that_is_not_text_becomes_text(
    tmp_path: Path, column: pyarrow.Array, reference: str
) -> None:
    """These values used to be refused, with the advice to quote them, which Parquet does not allow."""
    assert open_problem_source(parquet(tmp_path, {"question": ["a"], "answer": column})).problems[0] == DatasetProblem(
        "a", reference
    )


def test_the_data_sets_own_solution_is_read_from_its_column(tmp_path: Path) -> None:
    lines = [
        json.dumps({"question": "a", "answer": "1", "code": code}) for code in ("x = 1", ["y = 1", "z"], None, [], " ")
    ]
    source = open_problem_source(jsonl(tmp_path, *lines, solution="code"))
    assert [source.problems[i].solution for i in range(5)] == ["x = 1", "y = 1", None, None, None]
    with pytest.raises(DatasetInvalid, match=r"jsonl:1: field 'solved' must exist.*with fields\.solution"):
        open_problem_source(jsonl(tmp_path, lines[0], solution="solved"))
    with pytest.raises(DatasetInvalid, match=r"jsonl:1: field 'code' must be text or null, got a number"):
        open_problem_source(jsonl(tmp_path, '{"question": "a", "answer": "1", "code": 7}', solution="code"))


def test_a_row_is_kept_on_request_and_has_only_json_values(tmp_path: Path) -> None:
    line = '{"question": "a", "answer": {"b": 1}, "level": 3.5, "tags": ["x", null]}'
    assert open_problem_source(jsonl(tmp_path, line)).problems[0].row is None
    row = open_problem_source(jsonl(tmp_path, line), keeps_rows=True).problems[0].row
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
    row = open_problem_source(parquet(tmp_path, columns), keeps_rows=True).problems[0].row
    assert json.loads(json.dumps(row)) == {
        "question": "a",
        "answer": "1",
        "image": "/w==",
        "day": "2026-11-25",
        "at": "2026-11-25T12:30:00",
        "price": "3.50",
        "nested": {"prices": ["1.0"]},
    }


def test_a_missing_file_a_folder_and_an_empty_file_have_different_messages(tmp_path: Path) -> None:
    for path, said in [(tmp_path / "none.jsonl", "no such file"), (tmp_path, "a folder")]:
        with pytest.raises(DatasetInvalid, match=said):
            open_problem_source(PromptSource(jsonl=FileSource(path=str(path))))
    with pytest.raises(DatasetInvalid, match="an empty data set"):
        open_problem_source(jsonl(tmp_path, "", ""))


def a_data_set(tmp_path: Path, on_bad_line: OnBadLine, **files: str) -> PromptSource:
    for name, content in files.items():
        (tmp_path / f"{name}.jsonl").write_text(content)
    paths = tuple(str(tmp_path / f"{name}.jsonl") for name in files)
    return PromptSource(dataset=HubSource(name="team/data", files=paths, on_bad_line=on_bad_line))


BAD_LINES = '{"question": "a"}\n' * 2


@pytest.mark.parametrize(("on_bad_line", "other"), [(OnBadLine.FAIL, ""), (OnBadLine.SKIP, BAD_LINES)])
def test_a_data_set_may_have_files_without_problems(tmp_path: Path, on_bad_line: OnBadLine, other: str) -> None:
    """One shard without rows, or with malformed ones alone, made the whole data set unusable."""
    found = open_problem_source(a_data_set(tmp_path, on_bad_line, a=other, b=record("b", "1"), c=other))
    assert [problem.question for problem in found.problems] == ["b"]
    assert len(found.skipped) == 2 * len(other.splitlines())  # the files a and c
    with pytest.raises(DatasetInvalid, match=r"team/data:train: .*at least one problem"):
        open_problem_source(a_data_set(tmp_path, on_bad_line, a=other, b=other))


def test_malformed_records_of_a_data_set_are_named_by_file(tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"team/data:train: every problem .* got 2 faults(.|\n)*b\.jsonl:1 to 2: "):
        open_problem_source(a_data_set(tmp_path, OnBadLine.FAIL, a=record(), b=BAD_LINES))


def test_parquet_reads_the_same_problems_as_jsonl(tmp_path: Path) -> None:
    source = open_problem_source(parquet(tmp_path, {"id": [1, 2], "question": ["a", "b"], "answer": ["1", "2"]}))
    assert [source.problems[i] for i in range(len(source))] == [DatasetProblem("a", "1"), DatasetProblem("b", "2")]
    assert source.locate_problem(1).endswith("data.parquet:2")


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"question": ["a", "b"]}, "field 'answer' must exist, got fields question"),
        (
            {"question": ["a", None], "answer": ["1", "2"]},
            "parquet:2: field 'question' must be text or messages, got null",
        ),
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
        open_problem_source(parquet(tmp_path, columns))
    assert said in str(caught.value)


def test_a_file_that_is_not_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1 but not really")
    with pytest.raises(DatasetInvalid, match="must be a"):
        open_problem_source(PromptSource(parquet=FileSource(path=str(path))))


def test_a_generated_source_is_reproducible_and_has_distinct_problems() -> None:
    section = PromptSource(generated=GeneratedSource(family="ledger", count=200, seed=3))
    first = open_problem_source(section)
    second = open_problem_source(section)
    problems = [first.problems[i] for i in range(len(first))]
    assert len({problem.question for problem in problems}) == 200
    assert problems == [second.problems[i] for i in range(200)]


def test_a_higher_difficulty_makes_longer_problems() -> None:
    def mean_length(difficulty: int) -> float:
        source = open_problem_source(
            PromptSource(generated=GeneratedSource(family="wordProblem", count=100, difficulty=difficulty))
        )
        return sum(len(source.problems[i].question) for i in range(100)) / 100

    assert mean_length(0) < mean_length(1) < mean_length(3)


def test_an_unknown_family_is_refused_with_the_known_ones() -> None:
    with pytest.raises(DatasetInvalid, match="family must be one of"):
        open_problem_source(PromptSource(generated=GeneratedSource(family="nope", count=1)))


def test_training_questions_are_replaced_in_a_family_and_refused_in_a_file(tmp_path: Path) -> None:
    section = PromptSource(generated=GeneratedSource(family="addition", count=50))
    trained = frozenset(open_problem_source(section).problems[i].question for i in range(50))
    held_out = open_problem_source(section, exclude=trained)
    assert trained.isdisjoint(held_out.problems[i].question for i in range(50))
    with pytest.raises(DatasetInvalid, match="jsonl:2: the question is also a training question"):
        open_problem_source(jsonl(tmp_path, record("new"), record("old")), exclude={"old"})


def skipping(path: Path) -> PromptSource:
    kind = "parquet" if path.suffix == ".parquet" else "jsonl"
    return PromptSource(**{kind: FileSource(path=str(path), on_bad_line=OnBadLine.SKIP)})


def test_malformed_lines_may_be_skipped_and_are_listed_with_their_line(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    lines = [
        record("a").encode(),
        b"{",
        b'{"question": "\xff", "answer": "1"}',
        record("").encode(),
        record("b").encode(),
    ]
    path.write_bytes(b"\n".join(lines))
    source = open_problem_source(skipping(path))
    assert [(source.problems[i].question, source.locate_problem(i)) for i in range(len(source))] == [
        ("a", f"{path}:1"),
        ("b", f"{path}:5"),
    ]
    assert [fault.split(": ")[0] for fault in source.skipped] == [f"{path}:{line}" for line in (2, 3, 4)]


@pytest.mark.parametrize("is_data_set", [False, True])
def test_a_record_with_several_faults_is_skipped_once(tmp_path: Path, is_data_set: bool) -> None:
    """Each of its faults counted as a skipped problem."""
    content = '{"text": "a"}\n' + record("b", "1") + '\n{"question": "", "answer": null}\n'
    (tmp_path / "a.jsonl").write_text(content)
    wanted = a_data_set(tmp_path, OnBadLine.SKIP, a=content) if is_data_set else skipping(tmp_path / "a.jsonl")
    first, third = open_problem_source(wanted).skipped
    assert re.search(r"a\.jsonl:1: field 'question' must exist.*; field 'answer' must exist", first)
    assert re.search(r"a\.jsonl:3: field 'question' must not be empty.*; field 'answer' must be text", third)


def test_malformed_rows_of_a_parquet_file_may_be_skipped(tmp_path: Path) -> None:
    parquet(tmp_path, {"question": ["a", None, " "], "answer": ["1", "2", "3"]})
    source = open_problem_source(skipping(tmp_path / "data.parquet"))
    assert (len(source), len(source.skipped)) == (1, 2)


def test_a_file_with_only_malformed_lines_is_refused_even_with_skip(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text("{\nnull\n")
    with pytest.raises(DatasetInvalid, match=r"data\.jsonl:1: must be a JSON object"):
        open_problem_source(skipping(path))


def test_a_repeated_question_is_kept_and_counted(tmp_path: Path) -> None:
    source = open_problem_source(jsonl(tmp_path, record("a"), record("b"), record("a"), record("a", "3")))
    assert (len(source), source.repeated) == (4, 2)


def test_a_line_without_an_end_is_not_read_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "LINE_BYTES", 1000)
    path = tmp_path / "data.jsonl"
    path.write_bytes(record("a").encode() + b"\n" + b"x" * 5000 + b"\n" + record("b").encode())
    source = open_problem_source(skipping(path))
    assert [source.locate_problem(i) for i in range(len(source))] == [f"{path}:1", f"{path}:3"]
    assert "must be at most 1000 bytes" in source.skipped[0]


def test_a_line_is_asked_for_with_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that no more of it is ever in memory."""

    class AskedFile(io.BytesIO):
        def readline(self, size: int | None = -1, /) -> bytes:
            assert size is not None
            assert 0 < size <= 1001
            return super().readline(size)

    monkeypatch.setattr(sources, "LINE_BYTES", 1000)
    rows = list(sources.read_jsonl(AskedFile(record("a").encode() + b"\n" + b"x" * 5000), "answer"))
    assert [number for number, _ in rows] == [1, 2]
    assert rows[1][1] == "must be at most 1000 bytes, got more; check that this is the right file"


def test_column_that_is_larger_than_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal values are stored once: a file of some KB made a list of a TB."""
    monkeypatch.setattr(table_rows, "_WORKER_MIB", 256)
    source = parquet(tmp_path, {"question": ["x" * 1_000_000] * 400, "answer": ["1"] * 400})
    with pytest.raises(
        DatasetInvalid, match=r"data\.parquet: must be a Parquet file, got one that needs more than 256"
    ):
        open_problem_source(source)


TEXT_WITHOUT_UTF8 = pyarrow.Array.from_buffers(
    pyarrow.string(),
    3,
    [None, pyarrow.py_buffer(np.array([0, 1, 2, 3], np.int32).tobytes()), pyarrow.py_buffer(b"1\x803")],
)


@pytest.mark.parametrize("keeps_rows", [False, True])
@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        (TEXT_WITHOUT_UTF8, "can't decode byte 0x80"),
        (TEXT_WITHOUT_UTF8.dictionary_encode(), "can't decode byte 0x80"),
        (pyarrow.StructArray.from_arrays([TEXT_WITHOUT_UTF8], ["x"]), "can't decode byte 0x80"),
        (pyarrow.ListArray.from_arrays([0, 1, 2, 3], TEXT_WITHOUT_UTF8), "can't decode byte 0x80"),
        (pyarrow.array([1, 2**30, 3], pyarrow.date32()), "days=1073741824"),
        (pyarrow.array([1, 2**62, 3], pyarrow.duration("s")), "too large"),
        (
            pyarrow.array([[("k", 1)], [("k", 1), ("k", 2)], []], pyarrow.map_(pyarrow.string(), pyarrow.int64())),
            "duplicate key was 'k'",
        ),
    ],
)
def test_a_row_that_python_cannot_hold_is_malformed_and_the_others_are_kept(
    tmp_path: Path, answers: pyarrow.Array, reason: str, keeps_rows: bool
) -> None:
    """`make fuzz SEED=34001` found a file whose text was not UTF-8: the start ended with a UnicodeDecodeError."""
    source = parquet(tmp_path, {"question": ["a", "b", "c"], "answer": answers})
    with pytest.raises(DatasetInvalid, match=rf"data\.parquet:2: must be values that Python can hold, got .*{reason}"):
        open_problem_source(source, keeps_rows=keeps_rows)
    kept = open_problem_source(skipping(tmp_path / "data.parquet"), keeps_rows=keeps_rows)
    assert [problem.question for problem in kept.problems] == ["a", "c"]
    assert table_rows.read_first_row(str(tmp_path / "data.parquet"), table_rows.TableFormat.PARQUET)["question"] == "a"


def test_large_batches_of_a_parquet_file_are_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "BATCH_BYTES", 1000)
    questions = [f"{number} {'x' * 300}" for number in range(50)]
    source = open_problem_source(parquet(tmp_path, {"question": questions, "answer": ["1"] * 50}))
    assert [problem.question for problem in source.problems] == questions
    assert list(source.numbers) == list(range(1, 51))
    with pytest.raises(DatasetInvalid, match="got more than 1000 bytes in row 2"):
        open_problem_source(parquet(tmp_path, {"question": ["a", "x" * 2000], "answer": ["1", "2"]}))


def test_nested_types_are_bounded(tmp_path: Path) -> None:
    kind = pyarrow.string()
    for _ in range(70):
        kind = pyarrow.struct([("a", kind)])
    table = pyarrow.table({"question": pyarrow.array([None], type=kind), "answer": ["1"]})
    pyarrow.parquet.write_table(table, tmp_path / "data.parquet")
    with pytest.raises(DatasetInvalid, match="column 'question' nested more than 64 levels deep"):
        open_problem_source(PromptSource(parquet=FileSource(path=str(tmp_path / "data.parquet"))))


def test_problems_that_do_not_fit_in_memory_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file of some MB became more problems, or more faults, than the machine has memory for."""
    monkeypatch.setattr(sources, "available_memory_bytes", lambda: 20_000)
    with pytest.raises(
        DatasetInvalid, match="must fit in half of the memory that this machine has free, got more by r"
    ):
        open_problem_source(jsonl(tmp_path, *(record(str(number)) for number in range(100))))
    with pytest.raises(DatasetInvalid, match="must fit in half of the memory"):
        open_problem_source(jsonl(tmp_path, *["{"] * 100))


def test_file_without_records_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A packed file of 10 MB has 10 GB of blank lines, and a sparse one a line of a terabyte."""
    monkeypatch.setattr(sources, "LINE_BYTES", 64)
    monkeypatch.setattr(sources, "PASSED_OVER_BYTES", 1000)
    with pytest.raises(DatasetInvalid, match=r"jsonl:1001: must be followed by a record within 1000 bytes"):
        open_problem_source(jsonl(tmp_path, *[""] * 5000))
    with pytest.raises(DatasetInvalid, match=r"(?s)jsonl:1: must be at most 64.*jsonl:1: must be followed by a record"):
        open_problem_source(jsonl(tmp_path, "x" * 5000, record()))
    found = open_problem_source(jsonl(tmp_path, *[line for _ in range(40) for line in ("", record())]))
    assert len(found) == 40


def test_message_names_some_of_many_columns(tmp_path: Path) -> None:
    source = jsonl(tmp_path, json.dumps({f"column{number}": 1 for number in range(100_000)}))
    with pytest.raises(DatasetInvalid, match=r"column0, .* and 99970 more; name the column") as caught:
        open_problem_source(source)
    assert len(str(caught.value)) < 3000


@pytest.mark.parametrize(
    "text", ["", "[", "[{}", "[{} {}]", "[{},]", "[,]", "[{}]]", "[{}] x", "[]x", "{}", "[" * 5000, "[nul]"]
)
def test_damaged_json_list_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DatasetInvalid, match="must be a JSON list of objects, got"):
        list(read_json_rows(str(tmp_path / "a.json"), "answer"))


def test_json_list_is_read_item_by_item(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('\ufeff [ {"answer": 1.50} ,\n{"answer": "2"}]\n')
    rows = list(read_json_rows(str(tmp_path / "a.json"), "answer"))
    assert [(number, record.reference) for number, record in rows if not isinstance(record, str)] == [
        (1, "1.50"),
        (2, "2"),
    ]
    (tmp_path / "a.json").write_text(" [ ] ")
    assert list(read_json_rows(str(tmp_path / "a.json"), "answer")) == []
