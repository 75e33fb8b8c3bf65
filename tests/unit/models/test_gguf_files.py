"""GGUF files become model folders: weights, config, positions, tokenizer."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from gguf import dequantize
from safetensors.torch import load_file
from tests.gguf_writing import (
    BYTES,
    SPECIAL,
    TEMPLATE,
    bound_q4_k,
    make_model,
    quantise_q4_k,
    write_folder,
    write_gguf,
)
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer

from specrl.models import read_model_folder
from specrl.models.end_tokens import find_end_tokens
from specrl.models.gguf_files import conversion
from specrl.models.gguf_files.architecture import compute_llama3_divisors
from specrl.models.policy_config import parse_policy_config

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
TEXTS = (
    "Hello world  12345 it's I'LL be\n\n  def f(x):\n\treturn x ** 2",
    "\u00dcn\u00efc\u00f6d\u00e9 e\u0301 \u65e5\u672c\u8a9e \U0001f642 3.14159",
    " lead and trail ",
    "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
    "",
)


def convert(file: Path, folder: Path) -> Path:
    folder.mkdir()
    model = conversion.read_gguf(file, "model.path")
    conversion.write_small_files(model, folder)
    conversion.write_weights(model, folder, lambda _count: None)
    return folder


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_weights_come_back_within_the_bound_of_their_type(tmp_path: Path, model_type: str, kind: Kind) -> None:
    model = make_model(model_type, is_tied=model_type in {"llama", "qwen3"})
    folder = convert(write_gguf(model, tmp_path / "a.gguf", kind), tmp_path / "out")
    found = load_file(folder / "model.safetensors")
    assert found.keys() == model.weights.keys()
    for name, weight in model.weights.items():
        difference = np.abs(found[name].float().numpy() - weight)
        is_matrix = weight.ndim > 1 and not name.endswith("mlp.gate.weight")
        if not is_matrix or kind is Kind.F32:
            assert not difference.any(), name
        elif kind in {Kind.F16, Kind.BF16}:
            dtype = torch.float16 if kind is Kind.F16 else torch.bfloat16
            assert torch.equal(found[name], torch.from_numpy(weight).to(dtype)), name
        elif kind is Kind.Q8_0:
            largest = np.abs(weight.reshape(-1, 32)).max(-1, keepdims=True)
            assert (difference.reshape(-1, 32) <= largest / 127 * 0.51 + largest / 2048).all(), name
        else:
            assert (difference <= bound_q4_k(weight)).all(), name
    dtype = {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    if model_type == "qwen3_moe":
        dtype = "float32"  # of the router, which stays in float32
    assert json.loads((folder / "config.json").read_text())["dtype"] == dtype


@pytest.mark.parametrize("model_type", FAMILIES)
def test_logits_and_config_equal_those_of_the_model_before(tmp_path: Path, model_type: str) -> None:
    """transformers reads three forms of a model: the folder before, the GGUF file, and the folder that it becomes."""
    # transformers 5.19 does not read the width of Qwen3's heads from a GGUF file: it takes 128.
    width = 128 if model_type == "qwen3" else 64
    model = make_model(model_type, is_tied=model_type in {"qwen2", "qwen3"}, head_dim=width)
    before = write_folder(model, tmp_path / "before")
    folder = convert(write_gguf(model, tmp_path / "a.gguf"), tmp_path / "out")
    tokens = torch.arange(40)[None] * 5 % 250
    with torch.no_grad():
        expected, found, theirs = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **given)(tokens).logits
            for path, given in ((before, {}), (folder, {}), (tmp_path, {"gguf_file": "a.gguf"}))
        )
    assert torch.equal(found, expected)
    torch.testing.assert_close(found, theirs, rtol=1e-4, atol=1e-4)
    configs = [parse_policy_config(json.loads((it / "config.json").read_text()), tmp_path) for it in (before, folder)]
    assert configs[0] == configs[1]


def test_quantised_weights_have_the_values_that_the_file_stands_for(tmp_path: Path) -> None:
    model = make_model("qwen3")
    folder = convert(write_gguf(model, tmp_path / "a.gguf", Kind.Q4_K), tmp_path / "out")
    name = "model.layers.1.mlp.down_proj.weight"
    expected = dequantize(quantise_q4_k(model.weights[name]), Kind.Q4_K)
    assert np.array_equal(load_file(folder / "model.safetensors")[name].numpy(), expected)


def test_large_models_are_written_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen3_moe")
    file = write_gguf(model, tmp_path / "a.gguf", Kind.Q8_0)
    whole = load_file(convert(file, tmp_path / "whole") / "model.safetensors")
    monkeypatch.setattr(conversion, "FILE_BYTES", 2 << 20)
    folder = read_model_folder(convert(file, tmp_path / "split"), "model.path")  # compares index and files
    assert len(list(folder.path.glob("*.safetensors"))) > 1
    index = json.loads((folder.path / "model.safetensors.index.json").read_text())
    parts = {name: load_file(folder.path / name) for name in set(index["weight_map"].values())}
    assert all(torch.equal(parts[file][name], whole[name]) for name, file in index["weight_map"].items())
    assert index["weight_map"].keys() == whole.keys()


@pytest.mark.parametrize(
    "scaling",
    [(8.0, 1.0, 4.0, 8192), (32.0, 1.0, 4.0, 8192), (2.0, 1.0, 3.0, 100), (8.0, 2.0, 8.0, 64), (4.0, 1.0, 4.0, 20)],
)
@pytest.mark.parametrize("base", [10000.0, 500000.0])
def test_llama_3s_scaling_of_positions_is_found_from_its_divisors(
    tmp_path: Path, scaling: tuple[float, float, float, int], base: float
) -> None:
    """Other parameters may give the same divisors. The divisors are what positions follow from."""
    model = make_model("llama", rope_theta=base)
    divisors = compute_llama3_divisors(model.config, *scaling)
    file = write_gguf(dataclasses.replace(model, rope_factors=divisors), tmp_path / "a.gguf")
    config = conversion.read_gguf(file, "model.path").config
    found = config["rope_scaling"]
    assert found["rope_type"] == "llama3"
    again = compute_llama3_divisors(
        config,
        found["factor"],
        found["low_freq_factor"],
        found["high_freq_factor"],
        found["original_max_position_embeddings"],
    )
    np.testing.assert_allclose(again, divisors, rtol=1e-5)


def test_yarn_is_read_from_the_metadata(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 128, "yarn_beta_fast": 24.0}
    model = make_model("qwen3").with_metadata(**{f"ARCH.rope.scaling.{key}": value for key, value in yarn.items()})
    config = conversion.read_gguf(write_gguf(model, tmp_path / "a.gguf"), "model.path").config
    assert config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 24.0,
    }


_QWEN_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA_PATTERN = _QWEN_PATTERN.replace(r"|\p{N}|", r"|\p{N}{1,3}|")


def _byte_level(*steps: Any, pattern: str = "", **options: Any) -> Tokenizer:
    """A tokenizer of published models, trained on this file's own text."""
    tokenizer = Tokenizer(models.BPE(**options))
    cut = [pre_tokenizers.Split(Regex(pattern), "isolated")] if pattern else []
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not pattern)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, *cut, level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*SPECIAL], initial_alphabet=BYTES)
    tokenizer.train_from_iterator(Path(__file__).read_text(encoding="utf-8").splitlines() * 2, trainer)
    return tokenizer


def _qwen2() -> Tokenizer:
    tokenizer = _byte_level(pattern=_QWEN_PATTERN)
    tokenizer.normalizer = normalizers.NFC()
    return tokenizer


def _llama3() -> Tokenizer:
    tokenizer = _byte_level(pattern=_LLAMA_PATTERN, ignore_merges=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{SPECIAL[1]} $A", special_tokens=[(SPECIAL[1], 1)]
    )
    return tokenizer


BYTE_LEVEL: dict[str, Callable[[], Tokenizer]] = {
    "gpt-2": _byte_level,
    "smollm": lambda: _byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "qwen2": _qwen2,
    "llama-bpe": _llama3,
}


def _metadata_of(tokenizer: Tokenizer) -> dict[str, Any]:
    """What llama.cpp writes of a tokenizer."""
    stored = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    return {
        "tokenizer__ggml__tokens": tokens,
        "tokenizer__ggml__merges": [" ".join(pair) for pair in stored["merges"]],
        "tokenizer__ggml__token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer__ggml__bos_token_id": 1,
    }


@pytest.mark.parametrize("name", BYTE_LEVEL)
def test_a_tokenizer_of_bytes_gives_the_same_tokens(tmp_path: Path, name: str) -> None:
    original = BYTE_LEVEL[name]()
    model = make_model("qwen3", vocab_size=512).with_metadata(**_metadata_of(original), tokenizer__ggml__pre=name)
    folder = convert(write_gguf(model, tmp_path / "a.gguf"), tmp_path / "out")
    found = AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        assert found(text).input_ids == original.encode(text).ids
        assert found.decode(found(text, add_special_tokens=False).input_ids) == original.decode(
            original.encode(text, add_special_tokens=False).ids, skip_special_tokens=False
        )
    chat = [{"role": "user", "content": "hi"}]
    assert found.apply_chat_template(chat, tokenize=False) == "<|im_start|>hi<|im_end|>"
    assert (found.bos_token, found.eos_token, found.pad_token) == (SPECIAL[1], SPECIAL[2], SPECIAL[0])
    assert found.decode(found("a<|im_end|>").input_ids, skip_special_tokens=True) == "a"


def test_a_sentencepiece_tokenizer_gives_the_same_tokens(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    spaces = normalizers.Replace(" ", "\u2581")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), spaces])
    bytes_ = [f"<0x{number:02X}>" for number in range(256)]
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=[*special, *bytes_])
    words = [word for line in Path(__file__).read_text(encoding="utf-8").splitlines() for word in line.split()]
    tokenizer.train_from_iterator([f" {word}" for word in words if word.isascii()], trainer)
    # The trainer makes every byte a special token. As in published files, they are ordinary ones.
    stored = json.loads(tokenizer.to_str())
    stored["added_tokens"] = [token for token in stored["added_tokens"] if token["content"] in special]
    original = Tokenizer.from_str(json.dumps(stored))
    original.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    original.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    vocab = stored["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    ranks = {left + right: -float(rank) for rank, (left, right) in enumerate(stored["model"]["merges"])}
    kinds = {"<unk>": 2, "<s>": 3, "</s>": 3, **dict.fromkeys(bytes_, 6)}
    model = make_model("llama", vocab_size=600).with_metadata(
        tokenizer__ggml__model="llama",
        tokenizer__ggml__pre="default",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[kinds.get(token, 1) for token in tokens],
        tokenizer__ggml__scores=[ranks.get(token, -1e6) for token in tokens],
        tokenizer__ggml__merges=None,
        tokenizer__ggml__bos_token_id=1,
        tokenizer__ggml__unknown_token_id=0,
        tokenizer__ggml__padding_token_id=None,
    )
    folder = convert(write_gguf(model, tmp_path / "a.gguf"), tmp_path / "out")
    found = AutoTokenizer.from_pretrained(folder)
    for text in ("Hello world it's 12", "\u65e5\u672c \U0001f642", " two  spaces ", "def test(tmp_path: Path)"):
        assert found(text).input_ids == original.encode(text).ids
        assert found.decode(found(text).input_ids, skip_special_tokens=True) == text


def test_all_end_tokens_of_the_metadata_end_a_completion(tmp_path: Path) -> None:
    from tests.run_files import a_run

    from specrl.spec.load import parse_spec

    model = make_model("qwen3").with_metadata(tokenizer__ggml__eot_token_id=1, tokenizer__ggml__eom_token_id=2)
    folder = convert(write_gguf(model, tmp_path / "a.gguf"), tmp_path / "out")
    spec = parse_spec(a_run(tmp_path))
    assert find_end_tokens(spec, read_model_folder(folder, "model.path")) == (1, 2)


def test_tokens_that_fill_the_embedding_up_are_no_tokens(tmp_path: Path) -> None:
    folder = convert(write_gguf(make_model("qwen3"), tmp_path / "a.gguf"), tmp_path / "out")
    found = read_model_folder(folder, "model.path")
    assert found.vocabulary is not None
    assert found.vocabulary.size == len(SPECIAL) + len(BYTES) + 1
    assert found.config_number("vocab_size") == 272


def test_the_template_is_kept(tmp_path: Path) -> None:
    folder = convert(write_gguf(make_model("qwen3"), tmp_path / "a.gguf"), tmp_path / "out")
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == TEMPLATE
