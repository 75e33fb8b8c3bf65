"""Questions of published shapes: messages, nested and joined columns, and answers that are numbers inside objects."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from specrl.errors import DatasetInvalid
from specrl.prompts import DatasetProblem, load_prompts, open_problem_source
from specrl.prompts.questions import look_up_column
from specrl.spec import RunSpec
from specrl.spec.data import FieldMapping, FileSource, PromptSource

Build = Callable[..., RunSpec]

USER = {"role": "user", "content": "1+1?"}
ANSWER = {"role": "assistant", "content": "2"}
SYSTEM = {"role": "system", "content": "Add."}
MORE = {"role": "user", "content": "2+2?"}


def read_both(tmp_path: Path, record: dict[str, Any], **fields: str) -> list[DatasetProblem]:
    """Read one record from JSONL and from Parquet."""
    mapping = FieldMapping.model_validate(fields)
    (tmp_path / "data.jsonl").write_text(json.dumps(record))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), tmp_path / "data.parquet")
    lines, table = (FileSource(path=str(tmp_path / f"data.{kind}"), fields=mapping) for kind in ("jsonl", "parquet"))
    found = [open_problem_source(it).problems[0] for it in (PromptSource(jsonl=lines), PromptSource(parquet=table))]
    assert found[0] == found[1]
    return found


@pytest.mark.parametrize(
    ("messages", "question", "kept"),
    [
        ([USER], "1+1?", []),
        ([USER, ANSWER], "1+1?", []),
        ([SYSTEM, USER, ANSWER], "1+1?", [SYSTEM, USER]),
        ([USER, ANSWER, MORE], "user: 1+1?\n\nassistant: 2\n\nuser: 2+2?", [USER, ANSWER, MORE]),
    ],
)
def test_messages_are_a_question_without_a_last_answer(
    tmp_path: Path, messages: list[dict[str, str]], question: str, kept: list[dict[str, str]]
) -> None:
    record = {"prompt": messages, "label": 4}
    for problem in read_both(tmp_path, record, question="prompt", answer="label"):
        assert problem == DatasetProblem(question, "4", messages=tuple(kept))


def test_paths_reach_into_objects_and_lists(tmp_path: Path) -> None:
    record = {"task": {"text": "1+1?"}, "messages": [USER, {"role": "assistant", "content": "#### 2"}], "id": [[7, 8]]}
    for problem in read_both(tmp_path, record, question="task.text", answer="messages.-1.content"):
        assert problem == DatasetProblem("1+1?", "#### 2")
    assert read_both(tmp_path, record, question="task.text", answer="id.0.1")[0].answer == "8"


def test_an_answer_inside_an_object_keeps_its_digits(tmp_path: Path) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text('{"question": "a", "meta": {"x": [1], "answer": 3.50, "tests": {"b": 1,"a":[2.0]}}}')
    for column, answer in (("meta.answer", "3.50"), ("meta.tests", '{"b": 1,"a":[2.0]}'), ("meta.tests.a.-1", "2.0")):
        source = PromptSource(jsonl=FileSource(path=str(file), fields=FieldMapping(answer=column)))
        assert open_problem_source(source).problems[0].answer == answer


def test_a_column_with_a_dot_in_its_name_wins_over_a_path(tmp_path: Path) -> None:
    assert look_up_column({"a.b": 1, "a": {"b": 2}}, "a.b") == 1
    record = {"a.b": "own", "a": {"b": "inner"}, "answer": "1"}
    assert read_both(tmp_path, record, question="a.b")[0].question == "own"


def test_columns_are_joined_by_a_text_with_their_names(tmp_path: Path) -> None:
    """SVAMP has the story in Body and the question in Question."""
    record = {"Body": "Ann has 3 {red} apples.", "Question": "How many?", "n": 3, "answer": 3}
    for problem in read_both(tmp_path, record, question="{Body} {Question} ({n})"):
        assert problem.question == "Ann has 3 {red} apples. How many? (3)"


@pytest.mark.parametrize(
    ("record", "question", "said"),
    [
        ({"q": []}, "q", "field 'q' must be text or messages, got a list"),
        ({"q": [ANSWER]}, "q", "field 'q' must have a user message before the answer"),
        ({"q": [{"role": "tool", "content": ""}]}, "q", "field 'q.0' must have a role of system (first only), user or"),
        ({"q": [USER, SYSTEM]}, "q", "field 'q.1' must have a role of system (first only)"),
        ({"q": [{"role": "user", "content": [{"type": "image"}]}]}, "q", "field 'q.0' must have text as its content"),
        ({"q": [USER | {"tool_calls": [1]}]}, "q", "field 'q.0' must have text alone, got tool_calls"),
        ({"q": "a"}, "{q} {r}", "field 'r' must exist, got fields answer, q; name the column of the question"),
        ({"q": "a", "r": None}, "{q} {r}", "field 'r' must be text, a number or other JSON, got null"),
        ({"q": {"r": 1}}, "q.s", "field 'q.s' must exist"),
        ({"q": [{"role": "user", "content": " "}]}, "q", "field 'q' must not be empty"),
    ],
)
def test_a_malformed_question_is_named(tmp_path: Path, record: dict[str, Any], question: str, said: str) -> None:
    (tmp_path / "data.jsonl").write_text(json.dumps(record | {"answer": "1"}))
    source = FileSource(path=str(tmp_path / "data.jsonl"), fields=FieldMapping(question=question))
    with pytest.raises(DatasetInvalid) as caught:
        open_problem_source(PromptSource(jsonl=source))
    assert f"data.jsonl:1: {said}" in str(caught.value)


def a_source(tmp_path: Path, question: object) -> dict[str, Any]:
    (tmp_path / "data.jsonl").write_text(json.dumps({"question": question, "answer": "1"}))
    return {"jsonl": {"path": str(tmp_path / "data.jsonl")}}


def test_system_message_examples_and_earlier_turns_stand_before_the_question(a_spec: Build, tmp_path: Path) -> None:
    chat = {"format": "Chat", "template": "Q: {question}", "system": "Be brief."}
    examples = {"fewShot": [{"user": "0+1?", "assistant": "1"}]}

    def ask(question: object, **more: object) -> str:
        return load_prompts(a_spec(chat | more | {"source": a_source(tmp_path, question)})).prompt(0).text

    assert ask("1+1?") == "<s>[system]Be brief.[user]Q: 1+1?[assistant]"
    assert ask("1+1?", **examples) == "<s>[system]Be brief.[user]0+1?[assistant]1[user]Q: 1+1?[assistant]"
    assert ask([SYSTEM, USER, ANSWER, MORE], **examples) == (
        "<s>[system]Add.[user]0+1?[assistant]1[user]1+1?[assistant]2[user]Q: 2+2?[assistant]"
    )


def test_several_messages_need_the_chat_format(a_spec: Build, tmp_path: Path) -> None:
    with pytest.raises(DatasetInvalid, match=r"must be one user message for prompts[.]format Raw, got more messages"):
        load_prompts(a_spec({"source": a_source(tmp_path, [SYSTEM, USER])}))
