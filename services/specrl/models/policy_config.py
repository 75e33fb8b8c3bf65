"""Reads a policy's architecture from its config.json, and rejects models that the trainer cannot compute exactly.

Called by the trainer, by the drafter's code, by preflight, and by the coordinator, which checks rollouts with it.

The file is read as plain JSON, without transformers. The config classes of transformers fill absent fields with
defaults. They also accept settings that our trainer does not implement: a rotary scaling, a sliding window, a bias.
Either would train a model that is silently wrong, so this module rejects both.

Checkpoints of transformers 4 and 5 are accepted. Some keys differ: version 5 moved `rope_theta` into
`rope_parameters`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.files import read_object


@dataclass(frozen=True)
class ModelFamily:
    """The features that distinguish one `model_type`. All of them have rotary positions, RMSNorm and SwiGLU.

    has_qk_norm: queries and keys are normalised per head. has_qkv_bias: the projections of queries, keys and values
    have biases. is_mixture: every layer's MLP is a mixture of experts.
    heads_field: the config's number of heads for multi-token prediction; None for a family without such heads.
    """

    architecture: str
    has_qk_norm: bool = False
    has_qkv_bias: bool = False
    is_mixture: bool = False
    heads_field: str | None = None


QWEN3 = ModelFamily("Qwen3ForCausalLM", has_qk_norm=True)
FAMILIES = {
    "qwen3": QWEN3,
    "qwen2": ModelFamily("Qwen2ForCausalLM", has_qkv_bias=True),  # Qwen2.5, too
    "mimo": ModelFamily("MiMoForCausalLM", has_qkv_bias=True, heads_field="num_nextn_predict_layers"),
    "llama": ModelFamily("LlamaForCausalLM"),
    "qwen3_moe": ModelFamily("Qwen3MoeForCausalLM", has_qk_norm=True, is_mixture=True),
}
ARCHITECTURES = tuple(family.architecture for family in FAMILIES.values())

# The fields of each rotary scaling type, named as in transformers' `rope_parameters`, with the value of an absent
# field. None: the field is required. 0.0: the trainer derives the attention factor from `factor` (drafting/rotary.py).
_ROPE_FIELDS: dict[str, dict[str, float | None]] = {
    "default": {},
    "llama3": dict.fromkeys(
        ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), None
    ),
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

_GENERAL_ROPE_FIELDS = ("rope_type", "type", "rope_theta", "partial_rotary_factor")
"""Fields of `rope_parameters` that every type may have."""

_REQUIRED_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
    "rms_norm_eps",
)
_MIXTURE_FIELDS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")


@dataclass(frozen=True)
class RopeScaling:
    """Method by which rotary frequencies are stretched for long contexts.

    kind: `llama3` or `yarn`. numbers: the type's parameters, by their name in config.json.
    """

    kind: str
    numbers: Mapping[str, float]


@dataclass(frozen=True)
class ExpertsConfig:
    """The experts of each layer of a mixture: their number, the number that a token is routed to, and their width.

    is_normalised: the routing weights of a token's experts are scaled to sum to 1.
    """

    count: int
    per_token: int
    intermediate_size: int
    is_normalised: bool


@dataclass(frozen=True)
class PolicyConfig:
    """A policy's architecture.

    vocab_size: as in the checkpoint, without padding. num_groups: key/value heads. max_length: in tokens.
    experts: None for a dense model. num_mtp_heads: heads for multi-token prediction that its folder has.
    """

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
    family: ModelFamily = QWEN3
    rope_scaling: RopeScaling | None = None
    experts: ExpertsConfig | None = None
    num_mtp_heads: int = 0

    @property
    def active_intermediate_size(self) -> int:
        """MLP width that one token passes through in a layer. In a mixture: the total width of its experts."""
        experts = self.experts
        return self.intermediate_size if experts is None else experts.per_token * experts.intermediate_size

    @property
    def experts_shape(self) -> tuple[int, int, int]:
        """Layers, experts per token, and experts in each layer; zeros for a dense model."""
        experts = self.experts
        return (0, 0, 0) if experts is None else (self.num_layers, experts.per_token, experts.count)

    @property
    def num_expert_parameters(self) -> int:
        """Number of weights in all experts of all layers; 0 for a dense model."""
        experts = self.experts
        if experts is None:
            return 0
        # SwiGLU has three matrices: gate, up and down.
        return self.num_layers * experts.count * 3 * self.hidden_size * experts.intermediate_size

    @property
    def num_parameters(self) -> int:
        """Number of weights of the policy, including all experts, without heads for multi-token prediction."""
        mlp = 3 * self.hidden_size * self.intermediate_size
        if self.experts is not None:
            router = self.experts.count * self.hidden_size
            mlp = self.num_expert_parameters // self.num_layers + router
        attention = self.hidden_size * self.head_dim * (2 * self.num_heads + 2 * self.num_groups)
        if self.family.has_qkv_bias:
            attention += self.head_dim * (self.num_heads + 2 * self.num_groups)
        norms = 2 * self.hidden_size + (2 * self.head_dim if self.family.has_qk_norm else 0)
        layer = attention + norms + mlp
        return self.num_layers * layer + self.hidden_size * (1 + self.vocab_size * (1 if self.is_tied else 2))


def read_policy_config(path: Path) -> PolicyConfig:
    """Read `path/config.json`. Raises CheckpointInvalid unless the trainer can train the model."""
    try:
        raw = read_object(path / "config.json")
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"model.path must be a Hugging Face folder with a config.json, got {path}: {error}; check the path"
        ) from error
    return parse_policy_config(raw, path)


def parse_policy_config(config: Mapping[str, Any], path: Path) -> PolicyConfig:
    """Parse the config.json of the folder `path`. Raises CheckpointInvalid unless the trainer can train the model."""
    # transformers 5 writes num_experts as num_local_experts.
    raw = {"num_experts": config.get("num_local_experts"), **config}
    try:
        wrong = _find_unsupported_fields(raw)
        if not wrong:
            return _build_config(raw, path)
    except (ArithmeticError, AttributeError, TypeError, ValueError) as error:
        raise CheckpointInvalid(
            f"{path / 'config.json'} must describe a model, got a field of another type: {error}; copy the model again"
        ) from error
    raise CheckpointInvalid(
        f"{path / 'config.json'} must describe a model that specrl can train: {'; '.join(wrong)}; "
        f"use a checkpoint of {', '.join(ARCHITECTURES)}"
    )


def read_rope_scaling(config: Mapping[str, Any]) -> RopeScaling | None:
    """Read the rotary scaling of a config.json; None for none, and for one that `find_rope_problems` reports."""
    kind = str(_rope_type(config))
    if kind == "default" or find_rope_problems(config):
        return None
    rope = find_rope_settings(config)
    numbers = {name: float(rope.get(name) or default or 0) for name, default in _ROPE_FIELDS[kind].items()}
    if rope.get("truncate") is False:  # `or default` above cannot tell false from absent
        numbers["truncate"] = 0.0
    return RopeScaling(kind, numbers)


def format_rope(scaling: RopeScaling | None) -> dict[str, Any]:
    """Format a rotary scaling as `rope_parameters` of a config.json: the inverse of `read_rope_scaling`."""
    if scaling is None:
        return {"rope_type": "default"}
    given = {name: value for name, value in scaling.numbers.items() if value != _ROPE_FIELDS[scaling.kind][name]}
    if "truncate" in given:
        given["truncate"] = bool(given["truncate"])
    if "original_max_position_embeddings" in given:
        given["original_max_position_embeddings"] = int(given["original_max_position_embeddings"])
    return {"rope_type": scaling.kind, **given}


def find_rope_problems(config: Mapping[str, Any]) -> list[str]:
    """Describe each field of a config.json's rotary scaling that the trainer cannot compute."""
    rope = find_rope_settings(config)
    if not isinstance(rope, Mapping):
        return [f"rope_parameters must be an object, got {rope!r}"]
    kind = _rope_type(config)
    fields = _ROPE_FIELDS.get(str(kind), {}).items()
    checks = [
        ("rope_type", kind, isinstance(kind, str) and kind in _ROPE_FIELDS, f"one of {', '.join(_ROPE_FIELDS)}"),
        *(
            (f"rope_parameters.{key}", rope.get(key), _is_positive(rope.get(key)), "a number above 0")
            for key, default in fields
            if default is None
        ),
        *(
            (f"rope_parameters.{key}", rope.get(key), isinstance(rope.get(key), int | float | None), "a number")
            for key, default in fields
            if default is not None
        ),
    ]
    problems = [f"{name} must be {rule}, got {value!r}" for name, value, is_right, rule in checks if not is_right]
    if isinstance(kind, str) and kind in _ROPE_FIELDS:
        # A field that nobody reads would give positions other than the authors'. The engine ignores it, too, so no
        # comparison of the two would show it.
        known = {*_ROPE_FIELDS[kind], *_GENERAL_ROPE_FIELDS}
        unknown = [key for key, value in rope.items() if key not in known and value is not None]
        problems += [
            f"rope_parameters.{key} must be absent: {kind} has no such field, got {rope[key]!r}" for key in unknown
        ]
    return problems


def check_reference(reference: PolicyConfig, policy: PolicyConfig) -> None:
    """Raise CheckpointInvalid unless the reference policy and the policy have vocabularies of the same size."""
    if reference.vocab_size != policy.vocab_size:
        raise CheckpointInvalid(
            f"trainer.loss.referenceKl.path must have the policy's vocabulary of {policy.vocab_size}, got "
            f"vocab_size={reference.vocab_size} in {reference.path}; use the policy that it was trained from"
        )


def _is_positive(value: object) -> bool:
    # bool is a subclass of int: without the check, a JSON `true` would pass for 1.
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < float("inf")


def find_rope_settings(raw: Mapping[str, Any]) -> Any:
    """Return the rotary settings, under the key of transformers 5 or of transformers 4, of any type.

    In a config with both, transformers 5 takes the older key, and so does vLLM, which reads configs through it.
    """
    return raw.get("rope_scaling") or raw.get("rope_parameters") or {}


def _rope_type(raw: Mapping[str, Any]) -> object:
    return find_rope_settings(raw).get("rope_type") or find_rope_settings(raw).get("type") or "default"


def _build_config(raw: dict[str, Any], path: Path) -> PolicyConfig:
    rope = find_rope_settings(raw)
    family = FAMILIES[raw["model_type"]]
    experts = None
    if family.is_mixture:
        count, per_token, width = (raw[name] for name in _MIXTURE_FIELDS)
        experts = ExpertsConfig(count, per_token, width, bool(raw.get("norm_topk_prob", False)))
    return PolicyConfig(
        path=path,
        vocab_size=raw["vocab_size"],
        hidden_size=raw["hidden_size"],
        intermediate_size=raw["intermediate_size"],
        num_layers=raw["num_hidden_layers"],
        num_heads=raw["num_attention_heads"],
        num_groups=raw["num_key_value_heads"],
        # Many Llama checkpoints leave head_dim out. Qwen3's differs from hidden_size / num_attention_heads.
        head_dim=raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        max_length=raw["max_position_embeddings"],
        norm_epsilon=raw["rms_norm_eps"],
        rope_theta=float(rope.get("rope_theta") or raw["rope_theta"]),  # transformers 5, then 4
        is_tied=bool(raw.get("tie_word_embeddings", False)),
        family=family,
        rope_scaling=read_rope_scaling(raw),
        experts=experts,
        num_mtp_heads=raw.get(family.heads_field, 0) if family.heads_field is not None else 0,
    )


def _find_unsupported_fields(raw: dict[str, Any]) -> list[str]:
    """Describe each field that the weight mapping or the forward pass would otherwise get silently wrong.

    Raises TypeError or AttributeError for a field of the wrong type.
    """
    family = FAMILIES.get(str(raw.get("model_type")))
    if family is None:
        return [f"model_type must be one of {', '.join(FAMILIES)}, got {raw.get('model_type')!r}"]
    named = raw.get("architectures") or [family.architecture]
    rope = find_rope_settings(raw)
    # transformers 5 lists the attention type of each layer. Without the list every layer has full attention.
    layer_types = {str(kind) for kind in raw.get("layer_types") or ["full_attention"]}
    required = _REQUIRED_FIELDS + (_MIXTURE_FIELDS if family.is_mixture else ())
    # Most configs of families with biases leave the field out: the architecture implies them.
    attention_bias = family.has_qkv_bias if raw.get("attention_bias") is None else raw["attention_bias"]
    heads = raw.get(family.heads_field, 0) if family.heads_field is not None else 0
    longest = raw.get("max_position_embeddings")
    checks = [
        ("architectures", named, named == [family.architecture], f"[{family.architecture}]"),
        ("hidden_act", raw.get("hidden_act"), raw.get("hidden_act", "silu") == "silu", "silu"),
        ("attention_bias", attention_bias, attention_bias == family.has_qkv_bias, str(family.has_qkv_bias).lower()),
        ("mlp_bias", raw.get("mlp_bias"), not raw.get("mlp_bias", False), "false"),
        ("attention_dropout", raw.get("attention_dropout"), not raw.get("attention_dropout", 0), "0"),
        ("use_sliding_window", raw.get("use_sliding_window"), not raw.get("use_sliding_window", False), "false"),
        ("layer_types", sorted(layer_types), layer_types == {"full_attention"}, "full_attention in every layer"),
        ("partial_rotary_factor", _partial_rotary_factor(raw), _partial_rotary_factor(raw) == 1, "1"),
        ("rope_theta", None, _is_positive(rope.get("rope_theta") or raw.get("rope_theta")), "given, and above 0"),
        ("decoder_sparse_step", raw.get("decoder_sparse_step"), raw.get("decoder_sparse_step", 1) == 1, "1"),
        ("mlp_only_layers", raw.get("mlp_only_layers"), not raw.get("mlp_only_layers"), "empty"),
        (str(family.heads_field), heads, type(heads) is int and heads >= 0, "a whole number of heads"),
        ("quantization_config", "one", raw.get("quantization_config") is None, "absent"),
        *((key, raw.get(key), _is_positive(raw.get(key)), "a number above 0") for key in required),
    ]
    wrong = [f"{name} must be {rule}, got {value!r}" for name, value, is_right, rule in checks if not is_right]
    wrong += find_rope_problems(raw)
    # Compared last, since only a config without other faults is known to have these numbers.
    if not wrong and _rope_type(raw) == "yarn":
        original = rope["original_max_position_embeddings"]
        if not 1 < longest / original <= rope["factor"]:
            rule = f"> {original} and at most {rope['factor']} times that with YaRN"
            wrong = [f"max_position_embeddings must be {rule}, got {longest}"]
    # vLLM 0.32 does not read the field for these families (models/qwen2.py, Qwen2Attention).
    derived = 0 if wrong else raw["hidden_size"] // raw["num_attention_heads"]
    if not wrong and family.has_qkv_bias and raw.get("head_dim") not in (None, derived):
        wrong = [f"head_dim must be hidden_size / num_attention_heads = {derived}, got {raw['head_dim']!r}"]
    return wrong


def _partial_rotary_factor(raw: dict[str, Any]) -> object:
    return find_rope_settings(raw).get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1
