"""`specrl init` writes a run file that passes preflight, from a policy and a data set alone."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from tests.gguf_writing import make_model, write_gguf
from tests.run_files import a_model_folder
from typer.testing import CliRunner, Result

from specrl.cli import app
from specrl.launcher.preflight import check_run
from specrl.spec import load_spec
from specrl.spec.data import PromptFormat

TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}<assistant>"
ROWS = [{"id": n, "Problem": f"What is 2 + {n}? " + "really " * n, "answer": 2 + n} for n in range(20)]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with a policy in `model`."""
    monkeypatch.chdir(tmp_path)
    a_model_folder(tmp_path / "model", max_position_embeddings=2048)
    return tmp_path


def write_rows(file: Path) -> Path:
    if file.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), file)
    else:
        file.write_text("".join(json.dumps(row) + "\n" for row in ROWS) + "no record\n", encoding="utf-8")
    return file


def init(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["init", *map(str, arguments)])


@pytest.mark.parametrize("is_chat", [True, False])
@pytest.mark.parametrize("name", ["Train 1.jsonl", "7.parquet"])
def test_the_file_passes_preflight(place: Path, name: str, is_chat: bool) -> None:
    if is_chat:
        (place / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    result = init("--model", "model", "--data", write_rows(place / name))
    assert result.exit_code == 0, result.output
    assert ("1 records left out" in result.output) is name.endswith(".jsonl")
    spec = load_spec(place / "run.yaml")
    assert (spec.prompts.format is PromptFormat.CHAT) is is_chat
    assert spec.rewards.math is not None
    # The tokenizer has a token for each byte.
    longest = max(len(str(row["Problem"])) for row in ROWS)
    assert longest < spec.prompts.max_tokens < 2 * longest + 128
    assert all(notice.startswith("1 problem is left out") for notice in check_run(spec).notices)


def test_the_next_command_that_it_names_passes(place: Path) -> None:
    """It named `spec check --preflight`, which shows no prompt and no graded reference, though `run --dry-run` does."""
    result = init("--model", "model", "--data", write_rows(place / "train.jsonl"), "--out", "first.yaml")
    first, second = (line.split() for line in result.output.splitlines() if line.startswith("    "))
    assert (first, second) == (["specrl", "run", "--dry-run", "first.yaml"], ["specrl", "run", "first.yaml"])
    done = CliRunner().invoke(app, first[1:])
    assert done.exit_code == 0, done.output
    assert "What is 2 + 0?" in done.output  # the first prompt


def test_a_path_may_have_any_character(place: Path) -> None:
    """A character above U+FFFF was written as JSON escapes it, which YAML reads as two halves."""
    data = write_rows(place / "\U0001f600.jsonl")
    result = init("--model", "model", "--data", data)
    assert result.exit_code == 0, result.output
    source = load_spec(place / "run.yaml").prompts.source
    assert source is not None
    assert source.jsonl is not None
    assert source.jsonl.path == str(data.resolve())


def test_a_gguf_file_stays_the_policy_of_the_run_file(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECRL_CACHE_DIR", str(place / "cache"))
    file = write_gguf(make_model("qwen3", max_position_embeddings=2048), place / "a.gguf")
    result = init("--model", "a.gguf", "--data", write_rows(place / "train.jsonl"))
    assert result.exit_code == 0, result.output
    assert load_spec(place / "run.yaml").model.path == str(file)


def test_answers_without_numbers_are_compared_as_text(place: Path) -> None:
    (place / "data.jsonl").write_text('{"question": "Capital of France?", "label": "Paris"}\n', encoding="utf-8")
    assert init("--model", "model", "--data", "data.jsonl").exit_code == 0
    spec = load_spec(place / "run.yaml")
    assert spec.rewards.exact is not None
    assert spec.prompts.source.jsonl is not None
    assert spec.prompts.source.jsonl.fields.answer == "label"
    assert spec.schedule.prompts_per_step == 1


@pytest.mark.parametrize("name", ["chat.jsonl", "chat.parquet"])
def test_messages_and_columns_inside_objects_are_found(place: Path, name: str) -> None:
    (place / "model" / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    turns = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]
    shapes = {
        "messages": ({"messages": turns, "id": 1}, "messages.-1.content"),
        "prompt": ({"prompt": turns[:1], "reward_model": {"ground_truth": "2"}}, "reward_model.ground_truth"),
    }
    for column, (record, answer) in shapes.items():
        if name.endswith(".parquet"):
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([record]), place / name)
        else:
            (place / name).write_text(json.dumps(record), encoding="utf-8")
        result = init("--model", "model", "--data", name, "--out", f"{column}.yaml")
        assert result.exit_code == 0, result.output
        source = load_spec(place / f"{column}.yaml").prompts.all_sources[0].source
        file = source.jsonl or source.parquet
        assert file is not None
        assert (file.fields.question, file.fields.answer) == (column, answer)


def test_several_columns_are_named_in_one_text(place: Path) -> None:
    (place / "data.jsonl").write_text(
        '{"Body": "Ann has 3.", "Question": "How many?", "answer": 3}\n', encoding="utf-8"
    )
    assert init("--model", "model", "--data", "data.jsonl", "--question", "{Body} {Question}").exit_code == 0
    assert "{Body} {Question}" in (place / "run.yaml").read_text(encoding="utf-8")
    refused = init("--model", "model", "--data", "data.jsonl", "--question", "{Body} {b}", "--out", "other.yaml")
    assert "--question must be a column of the data set, got b" in refused.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--data", "none.jsonl"), "--data must be a .jsonl file"),
        (
            ("--data", "odd.jsonl"),
            "must have a column named question, problem, prompt, messages, query, instruction or input",
        ),
        (("--data", "odd.jsonl"), "got a, b; name one with --question"),
        (("--data", "odd.jsonl", "--question", "c"), "--question must be a column of the data set, got c"),
        (("--data", "broken.parquet"), "--data must be a .jsonl file"),
        (("--data", "odd.jsonl", "--model", "none"), "--model must be a Hugging Face folder, got none"),
        (("--data", "odd.jsonl", "--out", "odd.jsonl"), "--out must not exist"),
        (("--data", "odd.jsonl", "--out", "no/run.yaml"), "--out must be in an existing folder"),
    ],
)
def test_what_cannot_be_read_is_refused_and_nothing_is_written(
    place: Path, arguments: tuple[str, ...], said: str
) -> None:
    (place / "odd.jsonl").write_text('{"a": "1", "b": "2"}\n', encoding="utf-8")
    (place / "broken.parquet").write_text("no table", encoding="utf-8")
    before = sorted(place.iterdir())
    result = init("--model", "model", *arguments)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.split())
    assert sorted(place.iterdir()) == before
