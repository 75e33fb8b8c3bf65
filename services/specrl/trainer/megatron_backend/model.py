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
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn import functional

from specrl.drafting.policy_config import PolicyConfig
from specrl.errors import SpecInvalid
from specrl.spec.trainer import Parallelism, Recompute, Routing, Trainer
from specrl.trainer.layout import layout_problems
from specrl.trainer.megatron_backend import replay, rope
from specrl.trainer.megatron_backend.attention import PackedAttention

VOCABULARY_MULTIPLE = 128  # Megatron's own default


def check_layout(config: PolicyConfig, parallelism: Parallelism) -> None:
    """Raise SpecInvalid unless ranks share heads, widths, layers and experts evenly."""
    problems = layout_problems(parallelism, config)
    if problems:
        raise SpecInvalid(tuple(problems))


def padded_vocabulary(config: PolicyConfig, tensor: int) -> int:
    """Vocabulary rows of the Megatron model."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-config.vocab_size // multiple) * multiple


def transformer_config(config: PolicyConfig, trainer: Trainer, dtype: torch.dtype) -> TransformerConfig:
    """The policy in Megatron's words. Fused kernels are off: they exist for CUDA only, and change rounding."""
    is_cpu, parallelism = not torch.cuda.is_available(), trainer.parallelism
    is_recomputed = trainer.recompute is Recompute.LAYERS
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
            "expert_model_parallel_size": parallelism.expert,
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
        sequence_parallel=parallelism.tensor > 1,
        context_parallel_size=parallelism.context,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=parallelism.virtual_stages if parallelism.virtual_stages > 1 else None,
        batch_p2p_comm=parallelism.virtual_stages == 1,
        overlap_p2p_comm=parallelism.virtual_stages > 1,  # else two interleaved ranks take messages for one another
        recompute_granularity="full" if is_recomputed else None,
        recompute_method="uniform" if is_recomputed else None,
        recompute_num_layers=1 if is_recomputed else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=is_cpu,
        deterministic_mode=False,
        cuda_graph_modules=[],  # what Megatron makes of its own default, "full", with a warning that it is deprecated
        calculate_per_token_loss=True,  # gradients are summed over ranks; the loss itself carries the divisor
        **mixture,
    )
    _scale_attention(found, rope.attention_factor(config))
    return found


def _scale_attention(found: TransformerConfig, factor: float) -> None:
    """Have cosine and sine multiplied by `factor`.

    Megatron reads it as YaRN's fields alone, and computes 0.1 * m * ln(e) + 1: `_yarn_get_mscale`, called by
    `_yarn_get_concentration_factor` of yarn_rotary_pos_embedding.py.
    """
    if factor != 1:
        found.yarn_rotary_scaling_factor = math.e
        found.yarn_mscale = (factor - 1) / 0.1
        found.yarn_mscale_all_dim = 0.0


class Norm(torch.nn.RMSNorm):
    """Megatron's own refuses sequence parallelism, in which each rank sees the gradient of its own tokens."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        # An attribute that Megatron looks for: such gradients are summed over tensor parallel ranks.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no attribute of its type


def build_model(config: PolicyConfig, trainer: Trainer, dtype: torch.dtype) -> list[GPTModel]:
    """This rank's stages, unwrapped, with arbitrary weights in `dtype`, on its device. Needs initialised groups."""
    check_layout(config, trainer.parallelism)
    return [_stage(config, trainer, dtype, number) for number in range(trainer.parallelism.virtual_stages)]


def _stage(config: PolicyConfig, trainer: Trainer, dtype: torch.dtype, number: int) -> GPTModel:
    megatron, parallelism = transformer_config(config, trainer, dtype), trainer.parallelism
    virtual = number if parallelism.virtual_stages > 1 else None
    layer = get_gpt_layer_local_spec(
        num_experts=config.experts.count if config.experts is not None else None,
        qk_layernorm=config.family.has_qk_norm,
        normalization="RMSNorm",
    )
    parts, attention = layer.submodules, layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = Norm
    if config.family.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = Norm
    attention.core_attention = PackedAttention
    model = GPTModel(
        megatron,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(megatron, virtual), Norm),
        vocab_size=padded_vocabulary(config, parallelism.tensor),
        max_sequence_length=config.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        share_embeddings_and_output_weights=config.is_tied,
        parallel_output=True,
        vp_stage=virtual,
    )
    model.rotary_pos_emb.inv_freq = rope.inverse_frequencies(config).to(model.rotary_pos_emb.inv_freq.device)
    if model.post_process:
        # Under sequence parallelism it would gather its input by itself; `schedule.py` gathers, then picks rows.
        model.output_layer.sequence_parallel, model.output_layer.allreduce_dgrad = False, parallelism.tensor > 1
    if config.experts is not None and trainer.routing is Routing.REPLAY:
        rank = parallel_state.get_tensor_model_parallel_rank()
        for built in model.decoder.layers:
            replay.install(built, rank, parallelism.tensor)
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
