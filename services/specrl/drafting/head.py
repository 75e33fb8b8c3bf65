"""The EAGLE-3 head: its module, its folder in the layout that vLLM loads, and the names under which it is broadcast.

    e_t = RMSNorm(embedding(x_{t+1}))                 the policy's embedding, shared, never trained here
    g_t = fc([h_low_t, h_middle_t, h_high_t])         the policy's hidden states at t, detached
    one Llama decoder layer on [e_t, RMSNorm(g_t)], residual g_t; then RMSNorm and the head's own lm_head
    -> logits of x_{t+2}; the layer's output replaces g_t when the next token is drafted

Parameter names of `Eagle3Head` are those of the folder and of the broadcast: one name, no map. Computed exactly as in
vLLM 0.32 `model_executor/models/llama_eagle3.py`; checked against speculators 0.9 and vLLM in the tests. Speculators
is not used at run time: its import costs 15 s in each rank, and it attends densely over a whole packed row.
EAGLE-3: arXiv 2503.01840.

Shapes: B sequences, S tokens, H hidden, N heads, D head size, V policy vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from specrl.drafting.policy_config import PolicyConfig, read_policy_config
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.files import read_object
from specrl.spec.generation import Eagle3

CONFIG, WEIGHTS = "config.json", "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
INITIAL_STD = 0.02  # as in transformers' LlamaConfig.initializer_range


@dataclass(frozen=True)
class LayerShape:
    """Shape of the head's decoder layer. A fresh head has its policy's; a published one may have another."""

    intermediate_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head. aux_layers: how many layers have run, ascending; 0 is the embedding.

    The count of vLLM. transformers' `hidden_states` counts alike, except that its last entry is behind the final norm.
    layer: None is the policy's. norm_before_residual: the residual is RMSNorm(g_t), as in many published heads.
    """

    policy: PolicyConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    layer: LayerShape | None = None
    norm_before_residual: bool = False

    @property
    def shape(self) -> LayerShape:
        """Of the decoder layer."""
        return self.layer or layer_shape({}, self.policy)

    @property
    def is_reduced(self) -> bool:
        """Whether the head proposes a part of the vocabulary only."""
        return self.draft_vocab_size != self.policy.vocab_size


def head_config(policy: PolicyConfig, eagle3: Eagle3) -> HeadConfig:
    """The head that a fresh drafter of this policy has. Raises CheckpointInvalid for a vocabulary that is too large."""
    size = eagle3.draft_vocab_size or policy.vocab_size
    if size > policy.vocab_size:
        raise CheckpointInvalid(
            f"generation.speculation.eagle3.draftVocabSize must be at most the policy's vocabulary of "
            f"{policy.vocab_size}, got {size}; lower it or leave it out"
        )
    return HeadConfig(policy, size, auxiliary_layers(policy.num_layers))


def layer_shape(raw: Mapping[str, Any], policy: PolicyConfig) -> LayerShape:
    """The layer that a head's config describes; what it leaves out is as in its policy."""
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    heads = raw.get("num_attention_heads") or policy.num_heads
    return LayerShape(
        intermediate_size=raw.get("intermediate_size") or policy.intermediate_size,
        num_heads=heads,
        num_groups=raw.get("num_key_value_heads") or raw.get("num_attention_heads") or policy.num_groups,
        head_dim=raw.get("head_dim")
        or (policy.hidden_size // heads if "num_attention_heads" in raw else policy.head_dim),
        norm_epsilon=raw.get("rms_norm_eps") or policy.norm_epsilon,
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or policy.rope_theta),
    )


def auxiliary_layers(num_layers: int) -> tuple[int, ...]:
    """Which hidden states feed the head: low, middle, high, as vLLM's default; the last three where layers are few.

    vLLM drops duplicates of these indices silently, and then expects a narrower `fc`; so they are distinct here.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(max(0, num_layers - 2), num_layers + 1))


def rotate(x_BNSD: torch.Tensor, position_BS: torch.Tensor, theta: float) -> torch.Tensor:
    """Rotary embedding in the half-split layout of Llama and Qwen3. position_BS broadcasts over B."""
    dim = x_BNSD.shape[-1]
    exponent = torch.arange(0, dim, 2, dtype=torch.float32, device=x_BNSD.device) / dim
    angle = position_BS[:, None, :, None].float() * (theta**-exponent)
    cos, sin = angle.cos().to(x_BNSD.dtype), angle.sin().to(x_BNSD.dtype)
    first, second = x_BNSD.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    """Projections of the head's layer; the attention itself is in `online.py`, where the passes are known."""

    def __init__(self, hidden_size: int, shape: LayerShape) -> None:
        super().__init__()
        queries, keys = shape.num_heads * shape.head_dim, shape.num_groups * shape.head_dim
        self.q_proj = nn.Linear(2 * hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(2 * hidden_size, keys, bias=False)
        self.v_proj = nn.Linear(2 * hidden_size, keys, bias=False)
        self.o_proj = nn.Linear(queries, hidden_size, bias=False)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, hidden_size: int, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, hidden_size: int, shape: LayerShape) -> None:
        super().__init__()

        def norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden_size, eps=shape.norm_epsilon)

        self.input_layernorm, self.hidden_norm, self.post_attention_layernorm = norm(), norm(), norm()
        self.self_attn = Attention(hidden_size, shape)
        self.mlp = FeedForward(hidden_size, shape)


class Eagle3Head(nn.Module):
    """Parameters of the head, and the maps before and after its attention."""

    draft_ids_K: torch.Tensor

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        policy = config.policy
        self.config = config
        self.fc = nn.Linear(len(config.aux_layers) * policy.hidden_size, policy.hidden_size, bias=False)
        self.midlayer = Layer(policy.hidden_size, config.shape)
        self.norm = nn.RMSNorm(policy.hidden_size, eps=config.shape.norm_epsilon)
        self.lm_head = nn.Linear(policy.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("draft_ids_K", torch.arange(config.draft_vocab_size), persistent=False)

    def initialise(self, seed: int) -> None:
        """Draw every matrix anew, the same ones for the same seed on every machine; norms become 1."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 1:
                    weight.fill_(1.0)
                else:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * INITIAL_STD)

    @torch.no_grad()
    def start_from_policy(self, norm_H: torch.Tensor, lm_head_VH: torch.Tensor) -> None:
        """Begin with the policy's own final norm and output layer; the rest stays as drawn.

        Measured on a 4-layer policy, 96 steps: first-position acceptance 0.88 against 0.78 from a random output layer.
        Passing a hidden state through fc unchanged as well was worse than either: it says x_{t+1}, not x_{t+2}.
        """
        self.norm.weight.copy_(norm_H)
        self.lm_head.weight.copy_(lm_head_VH[self.draft_ids_K])

    def qkv_input(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] token embeddings and [..., H] hidden states -> [..., 2H], normed, for q, k and v."""
        return torch.cat([self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(hidden)], -1)

    def after_attention(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[..., N*D] attention output and [..., H] hidden state -> [..., H] hidden state of the next pass."""
        before = self.midlayer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        residual = before + self.midlayer.self_attn.o_proj(attended)
        out: torch.Tensor = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        return out

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., K]."""
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out

    def set_draft_vocabulary(self, draft_ids_K: torch.Tensor) -> None:
        """Choose which K tokens can be proposed, ascending."""
        self.draft_ids_K = draft_ids_K.sort().values.to(self.lm_head.weight.device)

    def draft_index(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Each token's index in the draft vocabulary; -1 where the head cannot propose it."""
        if not self.config.is_reduced:
            return token_ids
        index = torch.searchsorted(self.draft_ids_K, token_ids).clamp(max=len(self.draft_ids_K) - 1)
        return index.where(self.draft_ids_K[index] == token_ids, -1)

    def tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """What is broadcast and saved, in a fixed order, by the names that vLLM's loader takes.

        With a reduced vocabulary `d2t` is among them: draft id i is policy id i + d2t[i] (int64).
        """
        found = {name: weight.detach().to(dtype) for name, weight in self.named_parameters()}
        if self.config.is_reduced:
            found["d2t"] = self.draft_ids_K - torch.arange(self.config.draft_vocab_size, device=self.draft_ids_K.device)
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Take the tensors of `tensors()`. Raises CheckpointInvalid when names or shapes differ."""
        mine = self.tensors(torch.float32)
        ignored = {"t2d", "embed_tokens.weight"}  # derived from d2t; the policy's own
        given = {name: value for name, value in tensors.items() if name not in ignored}
        wrong = sorted(mine.keys() ^ given.keys())
        wrong += [
            f"{name} {tuple(given[name].shape)}"
            for name in mine
            if name in given and mine[name].shape != given[name].shape
        ]
        if wrong:
            raise CheckpointInvalid(
                f"the drafter must fit its policy, got other tensors: {', '.join(wrong[:4])}; "
                "use a head of this policy or initialise a fresh one"
            )
        for name, weight in self.named_parameters():
            weight.copy_(given[name])
        if self.config.is_reduced:
            offset = given["d2t"].to(self.draft_ids_K.device)
            self.draft_ids_K = offset + torch.arange(self.config.draft_vocab_size, device=offset.device)


def write_untrained(directory: Path, policy_path: Path, eagle3: Eagle3, seed: int) -> None:
    """Write a fresh head's folder, for an engine that needs the shapes before the trainer sends the weights.

    Deterministic by `seed`. Its lm_head must not equal the policy's: vLLM then shares one tensor between the two, and
    the first drafter update would overwrite the policy's output layer.
    """
    head = Eagle3Head(head_config(read_policy_config(policy_path), eagle3))
    head.initialise(seed)
    save_head(directory, head, policy_dtype(policy_path))


def policy_dtype(folder: Path) -> torch.dtype:
    """Precision that a policy's or a drafter's folder is stored in."""
    raw = read_object(folder / CONFIG)
    found = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype") or "float32"))
    assert isinstance(found, torch.dtype)
    return found


def save_head(directory: Path, head: Eagle3Head, dtype: torch.dtype) -> None:
    """Write the folder that vLLM loads as `speculative_config.model`. It needs no tokenizer: the policy's is used."""
    directory.mkdir(parents=True, exist_ok=True)
    config = folder_config(head.config, dtype)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in head.tensors(dtype).items()}
    save_file(tensors, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def folder_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What `config.json` of our folder says."""
    policy, layer = config.policy, config.shape
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "hidden_size": policy.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_groups,
        "head_dim": layer.head_dim,
        "num_hidden_layers": 1,
        "vocab_size": policy.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "rms_norm_eps": layer.norm_epsilon,
        "max_position_embeddings": policy.max_length,
        "rope_parameters": {"rope_type": "default", "rope_theta": layer.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "norm_before_residual": config.norm_before_residual,
        "dtype": str(dtype).removeprefix("torch."),
        "bos_token_id": None,
        "eos_token_id": None,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(config.aux_layers),
            "use_aux_hidden_state": True,
        },
    }


def load_head(directory: Path, policy: PolicyConfig) -> Eagle3Head:
    """Read our folder of a head. Raises CheckpointInvalid when it does not fit. `formats.py` reads those of others."""
    try:
        raw = read_object(directory / CONFIG)
        tensors = load_file(directory / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a Hugging Face folder with {CONFIG} and {WEIGHTS}, got {directory}: {error}; "
            "check generation.speculation.eagle3.path"
        ) from error
    if raw.get("architectures") != [ARCHITECTURE]:
        raise CheckpointInvalid(
            f"the drafter must be a {ARCHITECTURE}, got {raw.get('architectures')} in {directory}; "
            "bring it here with `specrl drafter import`, or initialise a fresh one"
        )
    try:
        aux_layers = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
        config = HeadConfig(
            policy,
            raw.get("draft_vocab_size") or policy.vocab_size,
            tuple(aux_layers or auxiliary_layers(policy.num_layers)),
            layer_shape(raw, policy),
            bool(raw.get("norm_before_residual")),
        )
        head = Eagle3Head(config)
        head.load_tensors({name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()})
    except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SpecrlError):
            raise
        reason = str(error).partition("\n")[0]
        raise CheckpointInvalid(
            f"the drafter must have the sizes of a head, got others in {directory / CONFIG}: {reason}; copy it again"
        ) from error
    return head
