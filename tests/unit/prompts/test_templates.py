"""Texts and token ids equal those of the policy's own tokenizer."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specrl.errors import CheckpointInvalid
from specrl.prompts import DatasetProblem, PromptTemplate
from specrl.spec.data import GeneratedSource, PromptFormat, Prompts, PromptSource

SOURCE = PromptSource(generated=GeneratedSource(family="ledger", count=1))


def a_template(policy: Path, template: str = "{question}", kind: PromptFormat = PromptFormat.RAW) -> PromptTemplate:
    return PromptTemplate(Prompts(source=SOURCE, template=template, format=kind), str(policy))


def test_only_the_question_is_replaced(policy_path: Path) -> None:
    template = a_template(policy_path, "{x} {{question}} {question} {0}")
    assert template.format_problem(DatasetProblem("a {question} b", "1")) == "{x} {a {question} b} a {question} b {0}"


@given(text=st.text(max_size=60))
def test_raw_token_ids_equal_those_of_transformers(policy_path: Path, text: str) -> None:
    assert list(a_template(policy_path).tokenize_text(text)) == expected(policy_path)(text)["input_ids"]


@given(text=st.text(max_size=60))
def test_chat_token_ids_equal_those_of_transformers(policy_path: Path, text: str) -> None:
    template = a_template(policy_path, "Q: {question}", PromptFormat.CHAT)
    chat = [{"role": "user", "content": f"Q: {text}"}]
    ours = template.format_problem(DatasetProblem(text, "1"))
    assert ours == expected(policy_path).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    theirs = expected(policy_path).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert list(template.tokenize_text(ours)) == theirs
    assert theirs.count(256) == 1, "the first token is not doubled"


_loaded: dict[Path, object] = {}


def expected(policy: Path):  # type: ignore[no-untyped-def] # transformers has no types here
    """Load the tokenizer as vLLM and the trainer do."""
    if policy not in _loaded:
        _loaded[policy] = AutoTokenizer.from_pretrained(policy)
    return _loaded[policy]


def test_many_texts_at_once_give_the_same_ids(policy_path: Path) -> None:
    template = a_template(policy_path)
    texts = [f"text {i}" for i in range(2050)]
    assert list(template.tokenize_all(texts)) == [template.tokenize_text(text) for text in texts]


def test_chat_needs_a_chat_template(policy_path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(policy_path, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert a_template(bare).format_problem(DatasetProblem("a", "1")) == "a"
    with pytest.raises(CheckpointInvalid, match="must have a chat template"):
        a_template(bare, kind=PromptFormat.CHAT)


def test_a_chat_template_that_raises_is_reported(policy_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy_path, broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('system message needed') }}")
    with pytest.raises(CheckpointInvalid, match="system message needed"):
        a_template(broken, kind=PromptFormat.CHAT).format_problem(DatasetProblem("a", "1"))


def test_a_prompt_does_not_depend_on_the_day(policy_path: Path, tmp_path: Path) -> None:
    """Llama's templates write today's date into the system message, so that a run resumed later had other prompts."""
    dated = tmp_path / "dated"
    shutil.copytree(policy_path, dated)
    (dated / "chat_template.jinja").write_text("Today: {{ strftime_now('%d %b %Y') }} {{ messages[0].content }}")
    found = a_template(dated, kind=PromptFormat.CHAT).format_problem(DatasetProblem("a", "1"))
    assert found == "Today: 26 Jul 2024 a"


def test_a_broken_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointInvalid, match="must be a tokenizer"):
        a_template(tmp_path)
