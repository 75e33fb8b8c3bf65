"""The EAGLE-3 head: its torch module, and its folder in the layout that vLLM loads.

    e_t = RMSNorm(embedding(x_{t+1}))                 the policy's embedding, shared, never trained here
    g_t = fc([h_low_t, h_middle_t, h_high_t])         the policy's hidden states at t, detached
    one Llama decoder layer on [e_t, RMSNorm(g_t)], residual g_t; then RMSNorm and the head's own lm_head
    -> logits of x_{t+2}; the layer's output replaces g_t when the next token is drafted

Source: EAGLE-3, arXiv 2503.01840. The computation is exactly that of vLLM 0.32 `model_executor/models/llama_eagle3.py`.
The tests compare it with vLLM and with speculators 0.9. Speculators is not used at run time: its import takes 15 s in
each rank, and its attention is dense over a whole packed row.

The parameter names of `Eagle3Head` are also those of the folder and of the weight broadcast, so no name is ever mapped.

Called by the trainer, which trains and broadcasts the head, and by replicas, which start from an untrained one.

Shapes: B sequences, S tokens, H hidden, N heads, D head size, V policy vocabulary, K draft vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from specrl.drafting.attention import MultiPassAttention
from specrl.drafting.drafter import Drafter, DrafterInputs, list_misfits
from specrl.drafting.layers import AttentionProjections, FeedForward, LayerShape
from specrl.drafting.packing import PackedRows
from specrl.errors import CheckpointInvalid, SpecrlError
from specrl.files import read_object
from specrl.models.policy_config import (
    PolicyConfig,
    find_rope_problems,
    find_rope_settings,
    format_rope,
    read_policy_config,
    read_rope_scaling,
)
from specrl.records import WeightOwner
from specrl.spec import RunSpec
from specrl.spec.generation import Eagle3
from specrl.tensor_files import FolderReader, save_tensors

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
ARCHITECTURE = "LlamaForCausalLMEagle3"
INITIAL_STD = 0.02  # as in transformers' LlamaConfig.initializer_range


@dataclass(frozen=True)
class HeadConfig:
    """Shape of a head.

    aux_layers: which of the policy's hidden states feed the head, ascending: the state after so many layers, with 0
    for the embedding. vLLM counts alike. So does transformers' `hidden_states`, except that its last entry comes after
    the final norm.
    layer: None for the policy's own layer shape.
    norm_before_residual: the residual is RMSNorm(g_t) instead of g_t, as in many published heads.
    """

    policy: PolicyConfig
    draft_vocab_size: int
    aux_layers: tuple[int, ...]
    layer: LayerShape | None = None
    norm_before_residual: bool = False

    @property
    def decoder_shape(self) -> LayerShape:
        """Shape of the decoder layer."""
        return self.layer or read_layer_shape({}, self.policy)

    @property
    def is_reduced(self) -> bool:
        """Whether the head can draft only a part of the vocabulary."""
        return self.draft_vocab_size != self.policy.vocab_size


def fresh_head_config(policy: PolicyConfig, eagle3: Eagle3) -> HeadConfig:
    """Return the config of a fresh drafter. Raises CheckpointInvalid if its vocabulary exceeds the policy's."""
    size = eagle3.draft_vocab_size or policy.vocab_size
    if size > policy.vocab_size:
        raise CheckpointInvalid(
            f"generation.speculation.eagle3.draftVocabSize must be at most the policy's vocabulary of "
            f"{policy.vocab_size}, got {size}; lower it or leave it out"
        )
    return HeadConfig(policy, size, choose_auxiliary_layers(policy.num_layers))


def read_head_config(fields: Mapping[str, Any], layer: Mapping[str, Any], policy: PolicyConfig) -> HeadConfig:
    """Read a head's shape. fields, layer: configs of the head and of its decoder layer; one and the same in our layout.

    Absent fields are taken from the policy.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    aux_layers = (fields.get("eagle_config") or {}).get(key) or fields.get(key)
    return HeadConfig(
        policy,
        int(fields.get("draft_vocab_size") or policy.vocab_size),
        tuple(aux_layers or choose_auxiliary_layers(policy.num_layers)),
        read_layer_shape(layer, policy),
        bool(fields.get("norm_before_residual")),
    )


def read_layer_shape(raw: Mapping[str, Any], policy: PolicyConfig) -> LayerShape:
    """Read the decoder layer's shape from a head's config; absent fields are taken from the policy.

    A config that names rotary settings has all of its own, as vLLM reads it: a head without scaling was trained so.
    """
    rope = find_rope_settings(raw)
    has_rope = bool(rope or raw.get("rope_theta"))
    heads = raw.get("num_attention_heads") or policy.num_heads
    # A config with num_attention_heads describes its own layer. Its absent fields then get Llama's defaults instead
    # of the policy's values: as many key/value heads as heads, each of size hidden size / heads.
    return LayerShape(
        intermediate_size=raw.get("intermediate_size") or policy.intermediate_size,
        num_heads=heads,
        num_groups=raw.get("num_key_value_heads") or raw.get("num_attention_heads") or policy.num_groups,
        head_dim=raw.get("head_dim")
        or (policy.hidden_size // heads if "num_attention_heads" in raw else policy.head_dim),
        norm_epsilon=raw.get("rms_norm_eps") or policy.norm_epsilon,
        rope_theta=float(rope.get("rope_theta") or raw.get("rope_theta") or policy.rope_theta),
        rope_scaling=read_rope_scaling(raw) if has_rope else policy.rope_scaling,
    )


def choose_auxiliary_layers(num_layers: int) -> tuple[int, ...]:
    """Choose the hidden states that feed a fresh head: low, middle and high, as vLLM does by default.

    Policies of fewer than 7 layers use the last three. There vLLM's choice would have duplicates, which vLLM drops
    silently and then expects a narrower `fc`.
    """
    if num_layers >= 7:
        return (2, num_layers // 2, num_layers - 3)
    return tuple(range(max(0, num_layers - 2), num_layers + 1))


class DecoderLayer(nn.Module):
    """The head's decoder layer."""

    def __init__(self, hidden_size: int, shape: LayerShape) -> None:
        super().__init__()

        def make_norm() -> nn.RMSNorm:
            return nn.RMSNorm(hidden_size, eps=shape.norm_epsilon)

        self.input_layernorm = make_norm()
        self.hidden_norm = make_norm()
        self.post_attention_layernorm = make_norm()
        self.self_attn = AttentionProjections(2 * hidden_size, hidden_size, shape)
        self.mlp = FeedForward(hidden_size, shape)


class Eagle3Head(Drafter):
    """The head's parameters, and its computation before and after the attention."""

    owner = WeightOwner.DRAFTER

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        policy = config.policy
        self.config = config
        self.inputs = DrafterInputs(aux_layers=config.aux_layers, embedding=True)
        self.fc = nn.Linear(len(config.aux_layers) * policy.hidden_size, policy.hidden_size, bias=False)
        self.midlayer = DecoderLayer(policy.hidden_size, config.decoder_shape)
        self.norm = nn.RMSNorm(policy.hidden_size, eps=config.decoder_shape.norm_epsilon)
        self.lm_head = nn.Linear(policy.hidden_size, config.draft_vocab_size, bias=False)
        # Not persistent: it is saved and broadcast as d2t, see `collect_tensors`.
        self.register_buffer("draft_ids_K", torch.arange(config.draft_vocab_size), persistent=False)

    def draw_weights(self, seed: int) -> None:
        """Draw every matrix at random and set norms to 1. The same seed gives the same head on every machine."""
        # A CPU generator, whatever the head's device: those of GPUs draw other numbers.
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for weight in self.parameters():
                if weight.ndim == 1:
                    weight.fill_(1.0)
                else:
                    weight.copy_(torch.randn(weight.shape, generator=generator) * INITIAL_STD)

    @torch.no_grad()
    def copy_policy_output(self, dtype: torch.dtype) -> None:
        """Copy final norm and output layer from the policy's folder; the other parameters stay as drawn.

        dtype: the run's precision, to which they are rounded. Raises CheckpointInvalid.

        Measured on a 4-layer policy after 96 steps: first-position acceptance is 0.88, against 0.78 with a random
        output layer. Also initialising fc to pass one hidden state through was worse than both, since that state
        predicts x_{t+1} and the head must predict x_{t+2}.
        """
        policy = self.config.policy
        reader = FolderReader(policy.path)
        output = "model.embed_tokens.weight" if policy.is_tied else "lm_head.weight"
        self.norm.weight.copy_(reader.read_tensor("model.norm.weight").to(dtype))
        first = 0
        for part in reader.read_rows(output, self.draft_ids_K.cpu()):
            self.lm_head.weight[first : first + len(part)] = part.to(dtype)
            first += len(part)

    def draft_logits(self, rows: PackedRows, passes: int) -> Iterator[torch.Tensor]:
        """Yield the logits of each pass; see `Drafter`."""
        hidden_RWH = self.fc(rows.aux_RWA.to(self.fc.weight.dtype))
        # The embedding of the next token. The last position has none, and no start needs it.
        next_RWH = functional.pad(rows.embedding_RWH[:, 1:], (0, 0, 0, 1))
        input_RWX = self.join_qkv_input(next_RWH, hidden_RWH)
        attention = MultiPassAttention(self.midlayer.self_attn, self.config.decoder_shape, rows)
        attention.remember_context(input_RWX)
        hidden_RMH = rows.gather_starts(hidden_RWH)
        input_RMX = rows.gather_starts(input_RWX)
        for j in range(passes):
            if j > 0:
                input_RMX = self.join_qkv_input(rows.gather_starts(rows.embedding_RWH, 1 + j), hidden_RMH)
            hidden_RMH = self.after_attention(attention(input_RMX, j), hidden_RMH)
            yield self.compute_logits(hidden_RMH[rows.select_starts(j)])

    def estimate_forward_flops(self, passes: int, context: int, starts: int) -> float:
        """Count the operations of `draft_logits`; see `Drafter`."""
        layer = self.config.decoder_shape
        hidden = self.config.policy.hidden_size
        queries = layer.num_heads * layer.head_dim
        keys = 2 * layer.num_groups * layer.head_dim
        # Once per token of the context: fc, and the keys and values of pass 0.
        everywhere = hidden * len(self.config.aux_layers) * hidden + 2 * hidden * keys
        # Per start and pass: projections, output, MLP, logits, and attention to the mean context of a start.
        a_pass = (
            2 * hidden * (queries + keys)
            + queries * hidden
            + 3 * hidden * layer.intermediate_size
            + hidden * self.config.draft_vocab_size
            + 2 * queries * max(0.0, context - starts / 2)
        )
        return 2.0 * (everywhere * context + passes * a_pass * starts)

    def begin_initialisation(self, counts_V: torch.Tensor, dtype: torch.dtype) -> None:
        """Set a reduced draft vocabulary to the most frequent tokens, and copy their rows of the policy's output."""
        if self.config.is_reduced:
            order_V = counts_V.argsort(descending=True, stable=True)  # ties go to the lower token id
            self.set_draft_vocabulary(order_V[: self.config.draft_vocab_size])
            self.copy_policy_output(dtype)

    def join_qkv_input(self, embedding: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Normalise and join [..., H] token embeddings and [..., H] hidden states; returns [..., 2H] for q, k and v."""
        return torch.cat([self.midlayer.input_layernorm(embedding), self.midlayer.hidden_norm(hidden)], -1)

    def after_attention(self, attended: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Compute the next pass's hidden state [..., H] from attention output [..., N*D] and hidden state [..., H]."""
        before = self.midlayer.hidden_norm(hidden) if self.config.norm_before_residual else hidden
        residual = before + self.midlayer.self_attn.o_proj(attended)
        out: torch.Tensor = residual + self.midlayer.mlp(self.midlayer.post_attention_layernorm(residual))
        return out

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., K] over the draft vocabulary from hidden states [..., H]."""
        out: torch.Tensor = self.lm_head(self.norm(hidden))
        return out

    def set_draft_vocabulary(self, draft_ids_K: torch.Tensor) -> None:
        """Set the K policy token ids that the head can draft; they are sorted here."""
        self.draft_ids_K = draft_ids_K.sort().values.to(self.lm_head.weight.device)

    @property
    def is_reduced(self) -> bool:
        """Whether the head can draft only a part of the vocabulary."""
        return self.config.is_reduced

    def collect_tensors(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Collect the tensors to broadcast or save, in a fixed order, under the names that vLLM's loader expects.

        With a reduced vocabulary this includes `d2t` (int64): draft id i is policy id i + d2t[i].
        """
        found = {name: weight.detach().to(dtype) for name, weight in self.named_parameters()}
        if self.config.is_reduced:
            found["d2t"] = self.draft_ids_K - torch.arange(self.config.draft_vocab_size, device=self.draft_ids_K.device)
        return found

    @torch.no_grad()
    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        """Load tensors as `collect_tensors` returns them. Raises CheckpointInvalid if names or shapes differ."""
        mine = self.collect_tensors(torch.float32)
        ignored = {"t2d", "embed_tokens.weight"}  # t2d follows from d2t; the embedding is the policy's
        given = {name: value for name, value in tensors.items() if name not in ignored}
        wrong = list_misfits(mine, given)
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

    def write_folder(self, directory: Path, dtype: torch.dtype) -> None:
        """Write a folder that vLLM loads as `speculative_config.model`. It has no tokenizer; vLLM uses the policy's."""
        write_folder(directory, build_folder_config(self.config, dtype), self.collect_tensors(dtype))


def write_untrained_head(directory: Path, policy_path: Path, eagle3: Eagle3, seed: int) -> None:
    """Write the folder of a fresh head, so that an engine can start before the trainer sends the trained one.

    The same seed gives the same weights. The lm_head is random on purpose. If it equalled the policy's, vLLM would
    share one tensor between them, and the first drafter update would overwrite the policy's output layer.
    """
    head = Eagle3Head(fresh_head_config(read_policy_config(policy_path), eagle3))
    head.draw_weights(seed)
    head.write_folder(directory, read_dtype(policy_path))


def read_dtype(folder: Path) -> torch.dtype:
    """Read the precision of a policy's or a drafter's folder from its config.json."""
    raw = read_object(folder / CONFIG)
    # transformers 5 writes dtype, transformers 4 torch_dtype.
    found = getattr(torch, str(raw.get("dtype") or raw.get("torch_dtype") or "float32"))
    assert isinstance(found, torch.dtype)
    return found


def write_folder(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
    """Write a head's config and tensors, in any layout."""
    directory.mkdir(parents=True, exist_ok=True)
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_tensors(contiguous, directory / WEIGHTS, metadata={"format": "pt"})
    (directory / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def build_folder_config(config: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """Build the config.json of a head in our layout."""
    policy = config.policy
    layer = config.decoder_shape
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
        "rope_parameters": {"rope_theta": layer.rope_theta, **format_rope(layer.rope_scaling)},
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
    """Read a head in our layout; `head_formats` reads published ones. Raises CheckpointInvalid if it does not fit.

    Its weights may be in any safetensors files that the engine loads.
    """
    try:
        raw = read_object(directory / CONFIG)
    except (OSError, ValueError) as error:
        raise CheckpointInvalid(
            f"the drafter must be a Hugging Face folder with {CONFIG} and safetensors, got {directory}: {error}; "
            "check generation.speculation.eagle3.path"
        ) from error
    if raw.get("architectures") != [ARCHITECTURE]:
        raise CheckpointInvalid(
            f"the drafter must be a {ARCHITECTURE}, got {raw.get('architectures')} in {directory}; "
            "convert it with `specrl drafter import`, or initialise a fresh one"
        )
    if wrong := find_rope_problems(raw):
        raise CheckpointInvalid(
            f"the drafter must have rotary positions that the trainer can compute, got {directory}: "
            f"{'; '.join(wrong)}; initialise a fresh one"
        )
    try:
        head = Eagle3Head(read_head_config(raw, raw, policy))
        tensors = FolderReader(directory, "the drafter").read_all()
        head.load_tensors({name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()})
    except (ArithmeticError, AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, SpecrlError):
            raise
        reason = str(error).partition("\n")[0]  # torch's messages have many lines
        raise CheckpointInvalid(
            f"the drafter must have the sizes of an EAGLE-3 head, got others in {directory / CONFIG}: {reason}; copy "
            "it again"
        ) from error
    return head


def load_drafter(spec: RunSpec, policy: PolicyConfig) -> Eagle3Head:
    """Load the run's head, or make a fresh one; see `DrafterKind.load_drafter`."""
    eagle3 = spec.generation.speculation.eagle3
    assert eagle3 is not None
    if eagle3.path is not None:
        return load_head(Path(eagle3.path), policy)
    head = Eagle3Head(fresh_head_config(policy, eagle3))
    head.draw_weights(spec.schedule.seed)
    head.copy_policy_output(getattr(torch, spec.model.dtype.value))
    return head
