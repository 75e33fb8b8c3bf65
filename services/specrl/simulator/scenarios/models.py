"""Shapes of transformer language models, as far as costs depend on them: by name, or from a config.json.

Supported are decoders with grouped-query attention and gated feed-forward layers, dense or with routed experts in every
layer (Qwen3, Llama). Others (latent attention, shared experts, dense first layers) are refused rather than guessed.
Called by `simulate` and `costs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specrl.errors import SpecInvalid, SpecProblem
from specrl.files import SMALL_BYTES, read_object


@dataclass(frozen=True)
class ModelShape:
    """The sizes of one model. experts 0: dense, with feed-forward layers of width `intermediate`.

    With experts, `intermediate` is the width of each expert.
    """

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
        """Parameters of one layer's query, key, value and output projections."""
        return self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert in one layer; in a dense model, of one feed-forward layer."""
        return 3 * self.hidden * self.intermediate

    @property
    def head_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> float:
        """Parameters that one token is multiplied with."""
        per_layer = self.attention_parameters + max(1, self.experts_per_token) * self.expert_parameters
        return self.layers * per_layer + self.head_parameters

    @property
    def total_parameters(self) -> float:
        """All parameters, embedding included."""
        per_layer = self.attention_parameters + max(1, self.experts) * self.expert_parameters
        return self.layers * per_layer + self.head_parameters * (1 if self.has_tied_embeddings else 2)

    def kv_bytes_per_token(self, bytes_per_value: float) -> float:
        """Return the bytes of one token's keys and values in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * bytes_per_value

    @property
    def drafter_parameters(self) -> float:
        """Parameters of an EAGLE-3 head (arXiv:2503.01840).

        It has one dense layer on twice the width, a projection of three hidden states, and an output layer over 32,000
        tokens.
        """
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

# Fields of a config.json that mark latent attention, shared experts, and dense first layers.
_UNSUPPORTED_FIELDS = ("q_lora_rank", "kv_lora_rank", "n_shared_experts", "first_k_dense_replace")


def read_shape(folder: Path) -> ModelShape:
    """Read the shape from a Hugging Face folder. Raises SpecInvalid when it cannot be read or is not supported."""
    file = folder / "config.json"
    try:
        found = read_object(file, SMALL_BYTES)
        unknown = [name for name in _UNSUPPORTED_FIELDS if found.get(name)]
        if unknown:
            rule = f"must be of a model with grouped-query attention and equal layers, got {unknown[0]}"
            raise SpecInvalid((SpecProblem(str(file), rule, "simulate a similar model instead"),))
        heads = int(found["num_attention_heads"])
        hidden = int(found["hidden_size"])
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
        # Any malformed value of the file ends here, so that a user never sees a traceback.
        rule = f"must be a model's config.json, got {type(error).__name__}: {error}"
        raise SpecInvalid(
            (
                SpecProblem(
                    str(file), rule, "--set model.path=FOLDER, or --set model.path=null --set model.name=qwen3-8b"
                ),
            )
        ) from error
