"""Causal attention over packed sequences: each sees itself alone, so packing changes no output and no gradient.

Megatron's packed attention needs Transformer Engine. This is torch's scaled dot product attention, called for one
sequence after another: its kernels (flash attention on CPUs and on CUDA) never hold the matrix of scores, and cost
nothing for pairs of tokens of different sequences, nor for those above the diagonal.

Context parallel ranks each have two of 2C equal chunks of every sequence, rank c the chunks c and 2C-1-c, which makes
their work equal, and gather the keys and values of all chunks (Llama 3, arXiv:2407.21783, section 3.3.2).

Shapes: P packed tokens on this rank, A on all C context parallel ranks, N query heads, G key/value heads, D head size,
Q and K queries and keys of one sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.nn import functional
from torch.nn.attention.bias import causal_lower_right

from specrl.trainer.megatron_backend.groups import Place


@dataclass(kw_only=True)
class Packing(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Where sequences end, and which of the tokens are on which context parallel rank.

    ends: [sequences + 1] int32 on the CPU, so that reading it does not wait for a device. order_A: where each token is
    among those of one rank after another; None where there is one rank. local_P: the tokens of this rank. experts_PLK:
    of a mixture, the experts that these go to in each layer, -1 where none is known; None: of all (`replay.py`).
    """

    ends: torch.Tensor
    context: Place
    order_A: torch.Tensor | None = None
    local_P: torch.Tensor | None = None
    experts_PLK: torch.Tensor | None = None

    def __post_init__(self) -> None:  # Megatron's own computes what Mamba layers read; there are none
        self.qkv_format = "thd"
        self.cu_seqlens_q = self.cu_seqlens_kv = self.ends
        self.max_seqlen_q = self.max_seqlen_kv = int(self.ends.diff().max())
        if self.context.size > 1:
            of_ranks = [_local(self.ends, rank, self.context.size) for rank in range(self.context.size)]
            self.local_P, self.order_A = of_ranks[self.context.rank], torch.cat(of_ranks).argsort()

    def mine(self, x_A: torch.Tensor) -> torch.Tensor:
        """What this rank has of all tokens [A, ...]."""
        return x_A if self.local_P is None else x_A[self.local_P.to(x_A.device)]

    def gather(self, x_P: torch.Tensor) -> torch.Tensor:
        """All tokens [A, ...] in order out of every rank's [P, ...]; gradients are summed over the ranks."""
        if self.order_A is None:
            return x_P
        found: torch.Tensor = gather_from_sequence_parallel_region(x_P, group=self.context.group)
        return found[self.order_A.to(x_P.device)]


def _local(ends: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Tokens of one context parallel rank; every sequence is a multiple of 2 * ranks long."""
    parts = []
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        chunks = torch.arange(first, end).chunk(2 * ranks)
        parts += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(parts)


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
        packed_seq_params: Packing,
        **__: Any,
    ) -> torch.Tensor:
        """[P, N * D]."""
        lengths, context = packed_seq_params.ends.diff().tolist(), packed_seq_params.context
        keys, values = (packed_seq_params.gather(x).split(lengths) for x in (key_PGD, value_PGD))
        queries = query_PND.split([length // context.size for length in lengths])
        found = []
        for query_QND, key_KGD, value_KGD in zip(queries, keys, values, strict=True):
            if context.size == 1:
                found.append(self._attend(query_QND, key_KGD, value_KGD))
                continue
            chunk = len(query_QND) // 2
            for number, part in zip(
                (context.rank, 2 * context.size - 1 - context.rank), query_QND.chunk(2), strict=True
            ):
                seen = (number + 1) * chunk
                found.append(self._attend(part, key_KGD[:seen], value_KGD[:seen]))
        return torch.cat(found).flatten(1)

    def _attend(self, query_QND: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor) -> torch.Tensor:
        """[Q, N, D]: the queries are the last Q of the K tokens."""
        query, key, value = (x.transpose(0, 1)[None] for x in (query_QND, key_KGD, value_KGD))
        is_whole = len(query_QND) == len(key_KGD)
        found_1NQD = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=None if is_whole else causal_lower_right(len(query_QND), len(key_KGD)),
            is_causal=is_whole,
            scale=self.scale,
            enable_gqa=True,
        )
        return found_1NQD[0].transpose(0, 1)
