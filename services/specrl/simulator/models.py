"""Shapes of transformer language models, as far as costs follow from them: from a name, or from a config.json.

Decoders with grouped-query attention and gated feed-forward layers, dense or with routed experts in every layer
(Qwen3, Llama). Others (latent attention, shared experts, dense first layers) are refused rather than guessed at.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrl.errors import Problem, SpecInvalid
from specrl.files import SMALL_BYTES, read_object


@dataclass(frozen=True)
class ModelShape:
    """experts 0: dense, with `intermediate` wide feed-forward layers; else each expert is that wide."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    experts: int = 0
    experts_per_token: int = 0
    has_tied_embeddings: bool = False

    @property
    def attention_parameters(self) -> int:
        """Of one layer: queries, keys, values, output."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Of one expert of one layer; of a dense model, of its feed-forward layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> float:
        """That one token is multiplied with."""
        per_layer = self.attention_parameters + max(1, self.experts_per_token) * self.expert_parameters
        return self.layers * per_layer + self.head_parameters

    @property
    def parameters(self) -> float:
        """All of them, embedding included."""
        per_layer = self.attention_parameters + max(1, self.experts) * self.expert_parameters
        return self.layers * per_layer + self.head_parameters * (1 if self.has_tied_embeddings else 2)

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def drafter_parameters(self) -> float:
        """Of an EAGLE-3 head: one dense layer on twice the width, a projection of three hidden states, its own head
        over 32,000 tokens (arXiv:2503.01840)."""
        layer = self.attention_parameters * 2 + 3 * self.hidden * max(self.intermediate, 3 * self.hidden)
        return layer + 3 * self.hidden * self.hidden + min(self.vocabulary, 32_000) * self.hidden


MODELS = {
    shape.name: shape
    for shape in (  # from each model's config.json on its card
        ModelShape("qwen3-8b", 36, 4096, 32, 8, 128, 12288, 151_936),
        ModelShape("qwen3-32b", 64, 5120, 64, 8, 128, 25600, 151_936),
        ModelShape("qwen3-30b-a3b", 48, 2048, 32, 4, 128, 768, 151_936, experts=128, experts_per_token=8),
        ModelShape("qwen3-235b-a22b", 94, 4096, 64, 4, 128, 1536, 151_936, experts=128, experts_per_token=8),
        ModelShape("llama-3.1-8b", 32, 4096, 32, 8, 128, 14336, 128_256),
        ModelShape("llama-3.1-70b", 80, 8192, 64, 8, 128, 28672, 128_256),
    )
}

_UNKNOWN = ("q_lora_rank", "kv_lora_rank", "n_shared_experts", "first_k_dense_replace")


def read_shape(folder: Path) -> ModelShape:
    """The shape of a Hugging Face folder. Raises SpecInvalid when it cannot be read, or is of another kind."""
    file = folder / "config.json"
    try:
        found = read_object(file, SMALL_BYTES)
        unknown = [name for name in _UNKNOWN if found.get(name)]
        if unknown:
            rule = f"must be of a model with grouped-query attention and equal layers, got {unknown[0]}"
            raise SpecInvalid((Problem(str(file), rule, "such models are not simulated"),))
        heads, hidden = int(found["num_attention_heads"]), int(found["hidden_size"])
        experts = int(found.get("num_experts") or found.get("num_local_experts") or 0)
        width = found.get("moe_intermediate_size") if experts else None
        shape = ModelShape(
            name=folder.name,
            layers=int(found["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(found.get("num_key_value_heads") or heads),
            head_dim=int(found.get("head_dim") or hidden // heads),
            intermediate=int(width or found["intermediate_size"]),
            vocabulary=int(found["vocab_size"]),
            experts=experts,
            experts_per_token=int(found.get("num_experts_per_tok") or 0),
            has_tied_embeddings=bool(found.get("tie_word_embeddings", False)),
        )
        sizes = {name: value for name, value in vars(shape).items() if isinstance(value, int)}
        if any(not 0 <= size < 1 << 32 for size in sizes.values()) or not all(
            (shape.layers, hidden, heads, shape.kv_heads, shape.head_dim, shape.intermediate, shape.vocabulary)
        ):
            raise ValueError(f"sizes must be above 0, got {sizes}")
        return shape
    except SpecInvalid:
        raise
    except (OSError, ValueError, KeyError, TypeError, ZeroDivisionError, OverflowError) as error:
        rule = f"must be a model's config.json, got {type(error).__name__}: {error}"
        raise SpecInvalid(
            (Problem(str(file), rule, "--set model.path=FOLDER, or --set model.path=null --set model.name=qwen3-8b"),)
        ) from error
