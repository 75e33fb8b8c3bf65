"""GGUF files that are hostile, cut short or of models that specrl would compute otherwise are refused in words."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.gguf_writing import TinyModel, make_model, write_gguf

from specrl.errors import CheckpointInvalid
from specrl.models.gguf_files.conversion import read_gguf


def refuse(file: Path) -> str:
    with pytest.raises(CheckpointInvalid) as raised:
        read_gguf(file, "model.path")
    return str(raised.value)


REFUSED: dict[str, tuple[TinyModel, str]] = {
    "family": (make_model("llama").with_metadata(general__architecture="gemma3"), "general.architecture must be one"),
    "part": (make_model("llama").with_metadata(split__count=2), "it is a part of a model"),
    "adapter": (make_model("llama").with_metadata(general__type="adapter"), "general.type is 'adapter'"),
    "window": (
        make_model("llama").with_metadata(**{"ARCH.attention.sliding_window": 128}),
        "llama.attention.sliding_window is 128, which specrl does not compute",
    ),
    "unknown key": (make_model("llama").with_metadata(**{"ARCH.logit_scale": 2.0}), "llama.logit_scale is 2.0"),
    "linear": (
        make_model("llama").with_metadata(**{"ARCH.rope.scaling.type": "linear"}),
        "rope.scaling.type must be none or yarn",
    ),
    "partial rotation": (
        make_model("llama").with_metadata(**{"ARCH.rope.dimension_count": 32}),
        "llama.rope.dimension_count must be 64",
    ),
    "heads by layer": (
        make_model("llama").with_metadata(**{"ARCH.attention.head_count": [4, 2]}),
        "llama.attention.head_count must be one whole number",
    ),
    "no epsilon": (
        make_model("llama").with_metadata(**{"ARCH.attention.layer_norm_rms_epsilon": None}),
        "llama.attention.layer_norm_rms_epsilon must be a number above 0, got None",
    ),
    "layers": (make_model("llama").with_metadata(**{"ARCH.block_count": 2**31 - 1}), "it has fewer tensors"),
    "one more layer": (
        make_model("llama").with_metadata(**{"ARCH.block_count": 3}),
        "blk.2.attn_norm.weight must have",
    ),
    "one layer less": (make_model("llama").with_metadata(**{"ARCH.block_count": 1}), "it has 9 tensors that models of"),
    "width": (
        make_model("llama").with_metadata(**{"ARCH.feed_forward_length": 256}),
        "blk.0.ffn_gate.weight must have the shape [256, 256], got of the shape [512, 256]",
    ),
    "vocabulary": (make_model("llama").with_metadata(**{"ARCH.vocab_size": 99}), "llama.vocab_size must be 272"),
    "mixture": (make_model("llama").with_metadata(**{"ARCH.expert_count": 8}), "it is a mixture of 8 experts"),
    "experts": (make_model("qwen3_moe").with_metadata(**{"ARCH.expert_count": 2**30}), "it has fewer tensors"),
    "pre-tokenizer": (
        make_model("llama").with_metadata(tokenizer__ggml__pre="tekken"),
        "tokenizer.ggml.pre must be one of gpt-2, smollm, llama-bpe",
    ),
    "tokenizer": (make_model("llama").with_metadata(tokenizer__ggml__model="t5"), "tokenizer.ggml.model must be gpt2"),
    "merges": (
        make_model("llama").with_metadata(tokenizer__ggml__merges=["zz zz"]),
        "its tokenizer is malformed",
    ),
    "end token": (
        make_model("llama").with_metadata(tokenizer__ggml__eos_token_id=9999),
        "tokenizer.ggml.eos_token_id must be the number of a token, got 9999",
    ),
    "scaling": (
        dataclasses.replace(make_model("llama"), rope_factors=np.linspace(1, 8, 32)),
        "rope_freqs.weight is none of Llama 3's scalings",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(tmp_path: Path, name: str) -> None:
    model, reason = REFUSED[name]
    message = refuse(write_gguf(model, tmp_path / "a.gguf"))
    assert message.startswith(f"model.path must be a GGUF file that specrl can convert, got {tmp_path}/a.gguf: ")
    assert reason in message
    assert "; " in message.partition(reason)[2]  # what to do


def test_every_file_that_is_cut_short_is_refused(tmp_path: Path) -> None:
    content = write_gguf(make_model("llama"), tmp_path / "a.gguf").read_bytes()
    file = tmp_path / "short.gguf"
    for size in [*range(0, 2000, 7), *range(2000, len(content), len(content) // 50), len(content) - 1]:
        file.write_bytes(content[:size])
        assert "cut short" in refuse(file)


def _header(*parts: Any, num_keys: int = 1, num_tensors: int = 0, version: int = 3) -> bytes:
    """A header with these parts after its counts: text, numbers as (format, number), or bytes."""
    whole = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys)
    for part in parts:
        if isinstance(part, str):
            whole += struct.pack("<Q", len(part)) + part.encode()
        elif isinstance(part, tuple):
            whole += struct.pack(*part)
        else:
            whole += part
    return whole + bytes(64)


HUGE = 1 << 60
HOSTILE = {
    "Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "does not begin with GGUF"),
    "version": (_header(version=1), "it has version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is big-endian"),
    "keys": (_header(num_keys=HUGE), "the number of metadata keys is 1152921504606846976"),
    "tensors": (_header(num_tensors=HUGE), "the number of tensors is 1152921504606846976"),
    "text": (_header(("<Q", HUGE)), "the length of a metadata key is"),
    "list of bytes": (_header("a", ("<I", 9), ("<I", 0), ("<Q", HUGE)), "the length of a is 1152921504606846976"),
    "list of text": (_header("a", ("<I", 9), ("<I", 8), ("<Q", HUGE)), "the length of a is 1152921504606846976"),
    "list of lists": (_header("a", ("<I", 9), ("<I", 9), ("<Q", 1)), "a is a list of the type 9"),
    "type": (_header("a", ("<I", 77)), "a is of the unknown type 77"),
    "no UTF-8": (_header(("<Q", 1), b"\xff"), "a metadata key is not UTF-8"),
    "twice": (_header("a", ("<IB", 0, 1), "a", ("<IB", 0, 1), num_keys=2), "it has a twice"),
    "alignment": (
        _header("general.alignment", ("<II", 4, 3)),
        "general.alignment must be a power of two, got 3",
    ),
    "dimensions": (_header("w", ("<I", 99), num_keys=0, num_tensors=1), "w has 99 dimensions"),
    "size": (
        _header("w", ("<IQQIQ", 2, HUGE, HUGE, 0, 0), num_keys=0, num_tensors=1),
        "it is cut short: it has",
    ),
    "nothing": (_header("w", ("<IQIQ", 1, 0, 0, 0), num_keys=0, num_tensors=1), "w of type F32 has the shape [0]"),
    "block": (_header("w", ("<IQIQ", 1, 33, 8, 0), num_keys=0, num_tensors=1), "w of type Q8_0 has the shape [33]"),
    "quantisation": (_header("w", ("<IQIQ", 1, 1, 999, 0), num_keys=0, num_tensors=1), "w is of the unknown type 999"),
    "offset": (_header("w", ("<IQIQ", 1, 1, 0, HUGE), num_keys=0, num_tensors=1), "and w ends later"),
    "overlap": (
        _header("w", ("<IQIQ", 1, 4, 0, 0), "v", ("<IQIQ", 1, 4, 0, 8), num_keys=0, num_tensors=2),
        "it has v twice, or within another tensor",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_header_is_refused_before_anything_is_allocated(tmp_path: Path, name: str) -> None:
    """The package gguf's reader goes on for as long as a list's length says, at the end of the file, too."""
    content, reason = HOSTILE[name]
    file = tmp_path / "a.gguf"
    file.write_bytes(content)
    assert reason in refuse(file)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    assert "model.path must be a readable GGUF file" in refuse(tmp_path / "none.gguf")
    assert "model.path must be a readable GGUF file" in refuse(tmp_path)
