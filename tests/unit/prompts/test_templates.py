"""Texts and token ids are those that the policy's own tokenizer gives."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from specrl.errors import CheckpointInvalid
from specrl.prompts import PromptTemplate
from specrl.spec.data import GeneratedSource, PromptFormat, Prompts, PromptSource

SOURCE = PromptSource(generated=GeneratedSource(family="ledger", count=1))


def a_template(policy: Path, template: str = "{question}", kind: PromptFormat = PromptFormat.RAW) -> PromptTemplate:
    return PromptTemplate(Prompts(source=SOURCE, template=template, format=kind), str(policy))


def test_only_the_question_is_replaced(policy_path: Path) -> None:
    template = a_template(policy_path, "{x} {{question}} {question} {0}")
    assert template.format("a {question} b") == "{x} {a {question} b} a {question} b {0}"


@given(text=st.text(max_size=60))
def test_raw_ids_are_transformers_own(policy_path: Path, text: str) -> None:
    assert list(a_template(policy_path).tokenize(text)) == expected(policy_path)(text)["input_ids"]


@given(text=st.text(max_size=60))
def test_chat_ids_are_transformers_own(policy_path: Path, text: str) -> None:
    template = a_template(policy_path, "Q: {question}", PromptFormat.CHAT)
    chat = [{"role": "user", "content": f"Q: {text}"}]
    ours = template.format(text)
    assert ours == expected(policy_path).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    theirs = expected(policy_path).apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert list(template.tokenize(ours)) == theirs
    assert theirs.count(256) == 1, "the first token is not doubled"


_loaded: dict[Path, object] = {}


def expected(policy: Path):  # type: ignore[no-untyped-def] # transformers has no types here
    """The tokenizer as vLLM and the trainer load it."""
    if policy not in _loaded:
        _loaded[policy] = AutoTokenizer.from_pretrained(policy)
    return _loaded[policy]


def test_many_texts_at_once_give_the_same_ids(policy_path: Path) -> None:
    template = a_template(policy_path)
    texts = [f"text {i}" for i in range(2050)]
    assert list(template.tokenize_all(texts)) == [template.tokenize(text) for text in texts]


def test_chat_needs_a_chat_template(policy_path: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(policy_path, bare, ignore=shutil.ignore_patterns("chat_template.jinja"))
    assert a_template(bare).format("a") == "a"
    with pytest.raises(CheckpointInvalid, match="must have a chat template"):
        a_template(bare, kind=PromptFormat.CHAT)


def test_a_chat_template_that_refuses_is_reported(policy_path: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(policy_path, broken)
    (broken / "chat_template.jinja").write_text("{{ raise_exception('system message needed') }}")
    with pytest.raises(CheckpointInvalid, match="system message needed"):
        a_template(broken, kind=PromptFormat.CHAT).format("a")


def test_a_broken_tokenizer_is_reported(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointInvalid, match="must be a tokenizer"):
        a_template(tmp_path)
