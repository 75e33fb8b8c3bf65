"""Completions are read by the tokenizer that made the prompts."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.run_files import a_model_folder, a_run

from specrl.errors import CheckpointInvalid
from specrl.generation.tokenizer_check import check_tokenizers
from specrl.generation.vllm_backend import launch
from specrl.spec import parse_spec


def a_policy(tmp_path: Path, tokenizer_class: str) -> Path:
    folder = a_model_folder(tmp_path / "model")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["decoder"] = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": tokenizer_class}))
    return folder


def test_a_tokenizer_that_the_engine_reads_alike_is_accepted(tmp_path: Path) -> None:
    check_tokenizers(a_policy(tmp_path, "PreTrainedTokenizerFast"))


def test_a_replica_is_refused_before_its_engine_starts(tmp_path: Path) -> None:
    a_policy(tmp_path, "LlamaTokenizerFast")
    with ExitStack() as cleanup, pytest.raises(CheckpointInvalid, match="name PreTrainedTokenizerFast"):
        launch.read_folders(parse_spec(a_run(tmp_path)), cleanup)


def test_a_class_that_replaces_the_decoder_is_refused(tmp_path: Path) -> None:
    """Verifiers got `So\u01203...\u010a####\u012018`, so every reward was 0. Prompts and canaries were right."""
    with pytest.raises(CheckpointInvalid, match="name PreTrainedTokenizerFast as tokenizer_class"):
        check_tokenizers(a_policy(tmp_path, "LlamaTokenizerFast"))
