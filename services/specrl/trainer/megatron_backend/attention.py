"""Causal attention over packed sequences: each sees itself alone, so packing changes no output and no gradient.

Megatron's packed attention needs Transformer Engine. This is torch's scaled dot product attention, called for one
sequence after another: its kernels (flash attention on CPUs and on CUDA) never hold the matrix of scores, and cost
nothing for pairs of tokens of different sequences, nor for those above the diagonal.

Shapes: P packed tokens on this rank, N query heads, G key/value heads, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Takes the place, and the arguments, of Megatron's DotProductAttention."""

    def __init__(self, config: TransformerConfig, *_: Any, softmax_scale: float | None = None, **__: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query_PND: torch.Tensor,
        key_PGD: torch.Tensor,
        value_PGD: torch.Tensor,
        *_: Any,
        packed_seq_params: PackedSeqParams,
        **__: Any,
    ) -> torch.Tensor:
        """[P, N * D]. cu_seqlens_q is a CPU tensor, so that reading it does not wait for a device."""
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        sequences = zip(*(x.split(lengths) for x in (query_PND, key_PGD, value_PGD)), strict=True)
        return torch.cat([self._one(*sequence) for sequence in sequences]).flatten(1)

    def _one(self, query_SND: torch.Tensor, key_SGD: torch.Tensor, value_SGD: torch.Tensor) -> torch.Tensor:
        query, key, value = (x.transpose(0, 1)[None] for x in (query_SND, key_SGD, value_SGD))
        found_1NSD = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale, enable_gqa=True
        )
        return found_1NSD[0].transpose(0, 1)
