"""What trainer and drafter must know of a policy, read once from its Hugging Face folder and checked there.

Read as JSON, without transformers. Its config classes give an absent field a default, and keep a value that our
trainer does not implement (a rotary scaling, a sliding window, a bias). Either gives a model that is silently wrong, so
both are refused here. Checkpoints written by transformers 4 and 5 are read; some keys differ (`rope_theta` moved into
`rope_parameters`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.files import read_object


@dataclass(frozen=True)
class Family:
    """What models of one `model_type` have in common. Rotary positions, RMSNorm and SwiGLU they all have.

    has_qk_norm: queries and keys are normalised by head. is_mixture: every layer's MLP is a mixture of experts.
    """

    architecture: str
    has_qk_norm: bool = False
    is_mixture: bool = False


QWEN3 = Family("Qwen3ForCausalLM", has_qk_norm=True)
FAMILIES = {
    "qwen3": QWEN3,
    "llama": Family("LlamaForCausalLM"),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", has_qk_norm=True, is_mixture=True),
}
ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())

# What a type of rotary scaling is described by, in the words of transformers' `rope_parameters`, and what an absent
# field means. None: it must be there.
_ROPE_FIELDS: dict[str, dict[str, float | None]] = {
    "default": {},
    "llama3": {
        "factor": None,
        "low_freq_factor": None,
        "high_freq_factor": None,
        "original_max_position_embeddings": None,
    },
    "yarn": {
        "factor": None,
        "original_max_position_embeddings": None,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": 1.0,
        "attention_factor": 0.0,
        "mscale": 0.0,
        "mscale_all_dim": 0.0,
    },
}


_REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_MIXTURE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched for long contexts: `llama3` or `yarn`, with their numbers by name."""

    kind: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class Experts:
    """Of a mixture, in each layer: how many there are, how many a token is sent to, and their width.

    is_normalised: the weights of a token's experts are made to add up to 1.
    """

    count: int
    per_token: int
    intermediate_size: int
    is_normalised: bool


@dataclass(frozen=True)
class PolicyConfig:
    """Shape of a policy. vocab_size as in the checkpoint, without padding. experts: None for a dense one."""

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
    family: Family = QWEN3
    rope_scaling: RopeScaling | None = None
    experts: Experts | None = None

    @property
    def active_intermediate_size(self) -> int:
        """Width of what one token passes through in a layer's MLP: that of its experts, in a mixture."""
        experts = self.experts
        return self.intermediate_size if experts is None else experts.per_token * experts.intermediate_size

    @property
    def num_expert_parameters(self) -> int:
        """Weights of all experts; 0 without."""
        experts = self.experts
        if experts is None:
            return 0
        return self.num_layers * experts.count * 3 * self.hidden_size * experts.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Weights of the policy, those of all experts included."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts is not None:
            mlp = self.num_expert_parameters // self.num_layers + self.experts.count * self.hidden_size
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_groups)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.family.has_qk_norm else 0)
        layer = attention + norms + mlp
        return self.num_layers * layer + self.hidden_size * (1 + self.vocab_size * (1 if self.is_tied else 2))


def read_policy_config(path: Path) -> PolicyConfig:
    """Read `path/config.json`. Raises CheckpointInvalid unless it is a model that the trainer can train."""
    try:
        raw = read_object(path / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"model.path must be a Hugging Face folder with a config.json, got {path}: {error}; check the path"
        ) from error
    raw.setdefault("num_experts", raw.get("num_local_experts"))  # transformers 5 writes the latter
    try:
        wrong = list(_misfits(raw))
        if not wrong:
            return _described(raw, path)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointInvalid(
            f"{path / 'config.json'} must describe a model, got fields of other kinds: {error}; copy the model again"
        ) from error
    raise CheckpointInvalid(
        f"{path / 'config.json'} must describe a model that this version trains: {'; '.join(wrong)}; "
        f"use a checkpoint of {', '.join(ARCHITECTURES)}"
    )


def read_reference_config(path: Path, policy: PolicyConfig) -> PolicyConfig:
    """Of the frozen policy that the divergence is measured from. Raises CheckpointInvalid unless it can be."""
    reference = read_policy_config(path)
    if reference.vocab_size != policy.vocab_size:
        raise CheckpointInvalid(
            f"trainer.loss.referenceKl.path must have the policy's vocabulary of {policy.vocab_size}, got "
            f"vocab_size={reference.vocab_size} in {path}; use the policy that it was trained from"
        )
    return reference


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def _rope(raw: dict[str, Any]) -> dict[str, Any]:
    """As transformers 5 writes it, or 4."""
    found: dict[str, Any] = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    return found


def _rope_type(raw: dict[str, Any]) -> object:
    return _rope(raw).get("rope_type") or _rope(raw).get("type") or "default"


def _described(raw: dict[str, Any], path: Path) -> PolicyConfig:
    kind, rope = str(_rope_type(raw)), _rope(raw)
    numbers = {name: float(rope.get(name) or default or 0) for name, default in _ROPE_FIELDS[kind].items()}
    if rope.get("truncate") is False:
        numbers["truncate"] = 0.0
    family, experts = FAMILIES[raw["model_type"]], None
    if family.is_mixture:
        count, per_token, width = (raw[name] for name in _MIXTURE)
        experts = Experts(count, per_token, width, bool(raw.get("norm_topk_prob", False)))
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
        family=family,
        rope_scaling=None if kind == "default" else RopeScaling(kind, numbers),
        experts=experts,
    )


def _misfits(raw: dict[str, Any]) -> Iterator[str]:
    """Everything that the weight map or the forward pass would otherwise get silently wrong, in words.

    Raises TypeError or AttributeError for fields that are of another kind altogether.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        yield f"model_type must be one of {', '.join(FAMILIES)}, got {raw.get('model_type')!r}"
        return
    named, rope = raw.get("architectures") or [family.architecture], _rope(raw)
    layer_types = {str(kind) for kind in raw.get("layer_types") or ["full_attention"]}
    required = _REQUIRED + (_MIXTURE if family.is_mixture else ())
    scaling, longest = _ROPE_FIELDS.get(str(_rope_type(raw)), {}), raw.get("max_position_embeddings")
    checks = [
        ("architectures", named, named == [family.architecture], f"[{family.architecture}]"),
        ("hidden_act", raw.get("hidden_act"), raw.get("hidden_act", "silu") == "silu", "silu"),
        ("attention_bias", raw.get("attention_bias"), not raw.get("attention_bias", False), "false"),
        ("mlp_bias", raw.get("mlp_bias"), not raw.get("mlp_bias", False), "false"),
        ("attention_dropout", raw.get("attention_dropout"), not raw.get("attention_dropout", 0), "0"),
        ("use_sliding_window", raw.get("use_sliding_window"), not raw.get("use_sliding_window", False), "false"),
        ("layer_types", sorted(layer_types), layer_types == {"full_attention"}, "full_attention in every layer"),
        ("rope_type", _rope_type(raw), _rope_type(raw) in _ROPE_FIELDS, f"one of {', '.join(_ROPE_FIELDS)}"),
        ("partial_rotary_factor", _partial(raw), _partial(raw) == 1, "1"),
        ("rope_theta", None, _is_positive(rope.get("rope_theta") or raw.get("rope_theta")), "given, and above 0"),
        ("decoder_sparse_step", raw.get("decoder_sparse_step"), raw.get("decoder_sparse_step", 1) == 1, "1"),
        ("mlp_only_layers", raw.get("mlp_only_layers"), not raw.get("mlp_only_layers"), "empty"),
        ("quantization_config", "one", raw.get("quantization_config") is None, "absent"),
        *((key, raw.get(key), _is_positive(raw.get(key)), "a number above 0") for key in required),
        *(
            (f"rope_parameters.{key}", rope.get(key), _is_positive(rope.get(key)), "a number above 0")
            for key, default in scaling.items()
            if default is None
        ),
    ]
    wrong = [f"{name} must be {rule}, got {value!r}" for name, value, is_right, rule in checks if not is_right]
    yield from wrong
    if (
        not wrong
        and _rope_type(raw) == "yarn"
        and not 1 < longest / rope["original_max_position_embeddings"] <= rope["factor"]
    ):
        yield (
            f"max_position_embeddings must be > {rope['original_max_position_embeddings']} and at most "
            f"{rope['factor']} times that with YaRN, got {longest}"
        )


def _partial(raw: dict[str, Any]) -> object:
    return _rope(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
