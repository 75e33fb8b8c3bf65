"""Builds the Megatron GPTModel of a policy, on CUDA or on CPUs. Called by `sharded_policy.py`.

The vocabulary is padded to a multiple of 128 and of the tensor parallel size. `mask_padding` keeps the padding out of
every softmax.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from torch.nn import functional

from specrl.drafting import rotary
from specrl.errors import raise_problems
from specrl.models.policy_config import PolicyConfig
from specrl.spec.trainer import Parallelism, Recompute, Routing, Trainer
from specrl.trainer.layout import find_layout_problems
from specrl.trainer.megatron_backend.kernels import fused_swiglu
from specrl.trainer.megatron_backend.kernels.choice import Kernel, choose_kernels
from specrl.trainer.megatron_backend.kernels.guard import Compute, GuardedKernel
from specrl.trainer.megatron_backend.kernels.varlen_attention import attend_in_one_call
from specrl.trainer.megatron_backend.model import router_replay
from specrl.trainer.megatron_backend.model.attention import PackedAttention, attend_one_by_one

VOCABULARY_MULTIPLE = 128  # Megatron's own default


def check_layout(config: PolicyConfig, parallelism: Parallelism) -> None:
    """Raise SpecInvalid unless ranks share heads, widths, layers and experts evenly."""
    raise_problems(find_layout_problems(parallelism, config))


def compute_padded_vocabulary(config: PolicyConfig, tensor: int) -> int:
    """Compute the number of vocabulary rows of the Megatron model. tensor: tensor parallel ranks."""
    multiple = math.lcm(VOCABULARY_MULTIPLE, tensor)
    return -(-config.vocab_size // multiple) * multiple


def build_transformer_config(
    config: PolicyConfig, trainer: Trainer, dtype: torch.dtype, kernels: frozenset[Kernel]
) -> TransformerConfig:
    """Build Megatron's configuration of the policy.

    Megatron's fused kernels are off, but for the one of `kernels`: they exist for CUDA alone, and they round
    differently.
    """
    is_cpu = not torch.cuda.is_available()
    parallelism = trainer.parallelism
    is_recomputed = trainer.recompute is Recompute.LAYERS
    mixture: dict[str, Any] = {}
    if config.experts is not None:
        mixture = {
            "num_moe_experts": config.experts.count,
            "moe_router_topk": config.experts.per_token,
            "moe_ffn_hidden_size": config.experts.intermediate_size,
            # Hugging Face normalises after the top-k: softmax over all, divided by the sum over the chosen experts.
            # That equals a softmax over the chosen logits, which is Megatron's post-softmax.
            "moe_router_pre_softmax": not config.experts.is_normalised,
            "moe_router_load_balancing_type": "none",  # an auxiliary loss would change the objective
            "moe_router_dtype": "fp32",
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": parallelism.expert,
            "expert_tensor_parallel_size": 1,  # docs/decisions/0023
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
        add_qkv_bias=config.family.has_qkv_bias,
        gated_linear_unit=True,
        activation_func=functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        bias_activation_fusion=Kernel.FUSED_SWIGLU in kernels,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=parallelism.tensor,
        sequence_parallel=parallelism.tensor > 1,
        context_parallel_size=parallelism.context,
        pipeline_model_parallel_size=parallelism.pipeline,
        virtual_pipeline_model_parallel_size=parallelism.virtual_stages if parallelism.virtual_stages > 1 else None,
        batch_p2p_comm=parallelism.virtual_stages == 1,
        overlap_p2p_comm=parallelism.virtual_stages > 1,  # else two interleaved ranks mix up their messages
        recompute_granularity="full" if is_recomputed else None,
        recompute_method="uniform" if is_recomputed else None,
        recompute_num_layers=1 if is_recomputed else None,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=is_cpu,
        deterministic_mode=False,
        cuda_graph_modules=[],  # Megatron turns its default, "full", into this, with a deprecation warning
        calculate_per_token_loss=True,  # sum gradients over ranks: the loss is already divided by the batch's size
        **mixture,
    )
    _scale_attention(found, rotary.compute_attention_factor(config.rope_scaling))
    return found


def _scale_attention(found: TransformerConfig, factor: float) -> None:
    """Make Megatron multiply cosine and sine by `factor`.

    Megatron has no field for it. It computes 0.1 * mscale * ln(scaling factor) + 1 from YaRN's fields. So these are set
    to give `factor`, with ln(e) = 1. See `_yarn_get_concentration_factor` and `_yarn_get_mscale` in
    yarn_rotary_pos_embedding.py.
    """
    if factor != 1:
        found.yarn_rotary_scaling_factor = math.e
        found.yarn_mscale = (factor - 1) / 0.1
        found.yarn_mscale_all_dim = 0.0


class SequenceParallelNorm(torch.nn.RMSNorm):
    """RMSNorm with support for sequence parallelism, which Megatron's wrapper of torch's RMSNorm rejects."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(hidden_size, eps)
        # Each rank has the gradient of its own tokens. Megatron sums over tensor parallel ranks the gradients of
        # parameters with this attribute.
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 - no attribute of its type


def build_model(config: PolicyConfig, trainer: Trainer, dtype: torch.dtype) -> list[GPTModel]:
    """Build this rank's chunks of the model, one per virtual stage, on its device, with arbitrary weights in `dtype`.

    Needs initialised process groups. Raises SpecInvalid when the layout does not divide the model.
    """
    check_layout(config, trainer.parallelism)
    kernels = choose_kernels(trainer.kernels, dtype)
    calls = config.num_layers // trainer.parallelism.pipeline  # of one micro-batch at this rank
    attend: Compute = attend_one_by_one
    if Kernel.VARLEN_ATTENTION in kernels:
        attend = GuardedKernel(Kernel.VARLEN_ATTENTION, attend_in_one_call, attend_one_by_one, calls)
    if Kernel.FUSED_SWIGLU in kernels:
        fused_swiglu.install_guard(calls)
    chunks = []
    for number in range(trainer.parallelism.virtual_stages):
        megatron = build_transformer_config(config, trainer, dtype, kernels)
        chunks.append(_build_chunk(config, trainer, megatron, attend, number))
    return chunks


def _build_chunk(
    config: PolicyConfig, trainer: Trainer, megatron: TransformerConfig, attend: Compute, number: int
) -> GPTModel:
    parallelism = trainer.parallelism
    virtual = number if parallelism.virtual_stages > 1 else None
    layer = get_gpt_layer_local_spec(
        num_experts=config.experts.count if config.experts is not None else None,
        qk_layernorm=config.family.has_qk_norm,
        normalization="RMSNorm",
    )
    parts = layer.submodules
    attention = layer.submodules.self_attention.submodules
    parts.input_layernorm = parts.pre_mlp_layernorm = SequenceParallelNorm
    if config.family.has_qk_norm:
        attention.q_layernorm = attention.k_layernorm = SequenceParallelNorm
    attention.core_attention = partial(PackedAttention, attend=attend)
    model = GPTModel(
        megatron,
        TransformerBlockSubmodules([layer] * get_num_layers_to_build(megatron, virtual), SequenceParallelNorm),
        vocab_size=compute_padded_vocabulary(config, parallelism.tensor),
        max_sequence_length=config.max_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=virtual),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=virtual),
        position_embedding_type="rope",
        rotary_base=config.rope_theta,
        share_embeddings_and_output_weights=config.is_tied,
        parallel_output=True,
        vp_stage=virtual,
    )
    # Megatron knows fewer ways of scaling positions than config.json does.
    frequencies = rotary.compute_inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
    model.rotary_pos_emb.inv_freq = frequencies.to(model.rotary_pos_emb.inv_freq.device)
    if model.post_process:
        # With sequence parallelism the output layer would gather its input. `schedule.py` does that before it, because
        # it drops the rows that predict no sampled token.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = parallelism.tensor > 1
    if config.experts is not None and trainer.routing is Routing.REPLAY:
        rank = parallel_state.get_tensor_model_parallel_rank()
        for built in model.decoder.layers:
            router_replay.install_replay(built, rank, parallelism.tensor)
    if megatron.bf16:
        model = model.bfloat16()
    return model.cuda() if torch.cuda.is_available() else model


def mask_padding(logits: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Set this rank's padded vocabulary columns to -inf. logits: [..., W], W columns on this tensor parallel rank."""
    width = logits.shape[-1]
    first = parallel_state.get_tensor_model_parallel_rank() * width
    if first + width <= vocab_size:
        return logits
    is_padding = torch.arange(first, first + width, device=logits.device) >= vocab_size
    return logits.masked_fill(is_padding, -math.inf)
