"""From a policy's shape to a Megatron GPTModel with its family's forward pass, on CUDA or on CPUs.

Vocabulary rows are padded to a multiple of 128 that all tensor parallel layouts share, so that a checkpoint of one
layout loads into another; padded rows are kept out of every softmax by `mask_padding`.
"""

from __future__ import annotations

import os

os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # Megatron decorates with torch.compile, which need not see the shim

import math
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from torch.nn import functional

from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import CheckpointInvalid
from specrl.spec.trainer import Parallelism
from specrl.trainer.megatron_backend import rope
from specrl.trainer.megatron_backend.attention import PackedAttention

moe_utils.__dict__.setdefault("te_general_gemm", None)  # without Transformer Engine 0.16.1 forgets to define it

VOCABULARY_MULTIPLE = 128  # Megatron's own default


def check_layout(config: PolicyConfig, parallelism: Parallelism) -> None:
    """Raise CheckpointInvalid unless tensor parallel ranks share heads, groups and feed-forward evenly.

    Experts are not shared out.
    """
    if config.experts is not None and parallelism.world_size != parallelism.data:
        raise CheckpointInvalid(
            f"trainer.parallelism of a mixture of experts must have data parallel ranks alone, got "
            f"{parallelism.world_size} ranks and data={parallelism.data}; leave the others at 1"
        )
    tensor = parallelism.tensor
    sizes = {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_groups,
        "intermediate_size": config.intermediate_size,
    }
    for name, size in sizes.items():
        if size % tensor:
            raise CheckpointInvalid(
                f"trainer.parallelism.tensor must divide the policy's {name}={size}, got tensor={tensor}; "
                f"use a divisor of {math.gcd(*sizes.values())}"
            )


def padded_vocabulary(config: PolicyConfig, tensor: int) -> int:
    """Vocabulary rows of the Megatron model."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-config.vocab_size // multiple) * multiple


def transformer_config(config: PolicyConfig, parallelism: Parallelism, dtype: torch.dtype) -> TransformerConfig:
    """The policy in Megatron's words. Fused kernels are off: they exist for CUDA only, and change rounding."""
    is_cpu = not torch.cuda.is_available()
    mixture: dict[str, Any] = {}
    if config.experts is not None:
        mixture = {
            "num_moe_experts": config.experts.count,
            "moe_router_topk": config.experts.per_token,
            "moe_ffn_hidden_size": config.experts.intermediate_size,
            # The softmax of the chosen logits is that of all, divided by the sum of the chosen.
            "moe_router_pre_softmax": not config.experts.is_normalised,
            "moe_router_load_balancing_type": "none",
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "expert_tensor_parallel_size": 1,
        }
    found = TransformerConfig(
        num_layers=config.num_layers,
        hidden_size=config.hidden_size,
        ffn_hidden_size=config.intermediate_size,
        num_attention_heads=config.num_heads,
        num_query_groups=config.num_groups,
        kv_channels=config.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=config.norm_epsilon,
        qk_layernorm=config.family.has_qk_norm,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallelism.tensor,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=is_cpu,
        deterministic_mode=False,
        calculate_per_token_loss=True,  # gradients are summed over ranks; the loss itself carries the divisor
        **mixture,
    )
    _scale_attention(found, rope.attention_factor(config))
    return found


def _scale_attention(found: TransformerConfig, factor: float) -> None:
    """Have cosine and sine multiplied by `factor`, in the only words that Megatron 0.16 reads: 0.1 * m * ln(e) + 1."""
    if factor != 1:
        for name, value in (("rotary_scaling_factor", math.e), ("mscale", (factor - 1) / 0.1), ("mscale_all_dim", 0.0)):
            setattr(found, f"yarn_{name}", value)


def build_model(config: PolicyConfig, parallelism: Parallelism, dtype: torch.dtype) -> GPTModel:
    """An unwrapped GPTModel with arbitrary weights, in `dtype`, on this rank's device. Needs initialised groups."""
    check_layout(config, parallelism)
    layer = get_gpt_layer_local_spec(
        num_experts=config.experts.count if config.experts is not None else None,
        qk_layernorm=config.family.has_qk_norm,
        normalization="RMSNorm",
    )
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    model = GPTModel(
        transformer_config(config, parallelism, dtype),
        layer,
        vocab_size=padded_vocabulary(config, parallelism.tensor),
        max_sequence_length=config.max_length,
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        share_embeddings_and_output_weights=config.is_tied,
        parallel_output=True,
    )
    model.rotary_pos_emb.inv_freq = rope.inverse_frequencies(config).to(model.rotary_pos_emb.inv_freq.device)
    if dtype == torch.bfloat16:
        model = model.bfloat16()
    return model.cuda() if torch.cuda.is_available() else model


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Take this rank's padded vocabulary columns out of the softmax. logits [..., V / tensor]."""
    width = logits.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    if first + width <= vocab_size:
        return logits
    is_padding = torch.arange(first, first + width, device=logits.device) >= vocab_size
    return logits.masked_fill(is_padding, -math.inf)
