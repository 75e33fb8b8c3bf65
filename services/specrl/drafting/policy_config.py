"""What trainer and drafter must know of a policy, read once from its Hugging Face folder and checked there.

Read as JSON, without transformers: the same facts stand under different keys in transformers 4 and 5 (`rope_theta`
moved into `rope_parameters`), and a key that is silently missed gives a model that is silently wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.files import read_object


@dataclass(frozen=True)
class PolicyConfig:
    """Shape of a dense Qwen3 policy. vocab_size as in the checkpoint, without padding."""

    path: Path
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_groups: int
    head_dim: int
    max_length: int
    norm_epsilon: float
    rope_theta: float
    is_tied: bool

    @property
    def num_parameters(self) -> int:
        """Weights of the policy."""
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_groups) + 2 * self.head_dim
        layer = attention + 3 * self.hidden_size * self.intermediate_size + 2 * self.hidden_size
        return self.num_layers * layer + self.hidden_size * (1 + self.vocab_size * (1 if self.is_tied else 2))


def read_policy_config(path: Path) -> PolicyConfig:
    """Read `path/config.json`. Raises CheckpointInvalid unless it is a dense Qwen3 that we can train."""
    try:
        raw = read_object(path / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"model.path must be a Hugging Face folder with a config.json, got {path}: {error}; check the path"
        ) from error
    try:
        _refuse_unsupported(raw, path)
        return _described(raw, path)
    except (ArithmeticError, AttributeError, TypeError) as error:
        raise CheckpointInvalid(
            f"{path / 'config.json'} must describe a model, got fields of other kinds: {error}; copy the model again"
        ) from error


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _described(raw: dict[str, Any], path: Path) -> PolicyConfig:
    rope = raw.get("rope_parameters") or {}
    return PolicyConfig(
        path=path,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_groups=raw["num_key_value_heads"],
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        max_length=raw["max_position_embeddings"],
        norm_epsilon=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),
        is_tied=bool(raw.get("tie_word_embeddings", False)),
    )


def _refuse_unsupported(raw: dict[str, Any], path: Path) -> None:
    """Everything that the weight map or the forward pass would otherwise get silently wrong.

    Raises CheckpointInvalid, and TypeError or AttributeError for fields that are of another kind altogether.
    """
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    layer_types = set(raw.get("layer_types") or ["full_attention"])
    required = (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "max_position_embeddings",
        "rms_norm_eps",
    )
    checks = [
        ("model_type", raw.get("model_type"), raw.get("model_type") == "qwen3", "qwen3 (dense)"),
        ("hidden_act", raw.get("hidden_act"), raw.get("hidden_act", "silu") == "silu", "silu"),
        ("attention_bias", raw.get("attention_bias"), not raw.get("attention_bias", False), "false"),
        ("attention_dropout", raw.get("attention_dropout"), not raw.get("attention_dropout", 0), "0"),
        ("use_sliding_window", raw.get("use_sliding_window"), not raw.get("use_sliding_window", False), "false"),
        ("layer_types", sorted(layer_types), layer_types == {"full_attention"}, "full_attention in every layer"),
        ("rope type", rope.get("rope_type"), rope.get("rope_type", "default") == "default", "default"),
        ("rope_theta", None, bool(rope.get("rope_theta") or raw.get("rope_theta")), "given"),
        ("quantization_config", "one", raw.get("quantization_config") is None, "absent"),
        *((key, raw.get(key), _is_positive(raw.get(key)), "a number above 0") for key in required),
    ]
    wrong = [f"{name} must be {rule}, got {value!r}" for name, value, is_right, rule in checks if not is_right]
    if wrong:
        raise CheckpointInvalid(
            f"{path / 'config.json'} must describe a model that this version trains: {'; '.join(wrong)}; "
            "use a dense Qwen3 checkpoint"
        )
