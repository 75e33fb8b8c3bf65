"""Makes run files and complete model folders with zeros as weights, for tests that load no model. Needs no torch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from tokenizers import Tokenizer, models, pre_tokenizers

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 264,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
}


def a_model_folder(path: Path, **config: Any) -> Path:
    """Write a model folder like transformers' own; keywords replace fields of the config."""
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(CONFIG | config))
    write_safetensors(path / "model.safetensors", {"model.embed_tokens.weight": (264, 64)})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


def write_safetensors(path: Path, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Write float32 zeros of these shapes."""
    header = {}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, end]}
        offset = end
    encoded = json.dumps(header).encode()
    path.write_bytes(len(encoded).to_bytes(8, "little") + encoded + bytes(offset))


def a_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """Make a small valid run file for the model in `folder`/model; keywords replace sections."""
    run: dict[str, Any] = {
        "name": "tiny",
        "model": {"path": str(folder / "model"), "dtype": "float32", "maxLength": 128},
        "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}, "maxTokens": 80},
        "rewards": {"exact": {}},
        "generation": {"sampling": {"maxTokens": 16}},
        "trainer": {"optimizer": {"learningRate": "1e-3"}, "microBatchTokens": 1024},
        "schedule": {"steps": 2, "promptsPerStep": 2, "groupSize": 2},
    }
    return run | changes


def a_run_file(folder: Path, **changes: Any) -> Path:
    """Write `folder`/run.yaml with the content of `a_run`."""
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump(a_run(folder, **changes)))
    return file
