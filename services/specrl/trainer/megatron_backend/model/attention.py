"""Causal attention over packed sequences.

Invariant: a sequence attends to itself alone, so packing changes no output and no gradient.

Megatron's packed attention needs Transformer Engine. This module calls torch's scaled dot product attention once per
sequence instead (docs/decisions/0022). Its flash attention kernels, on CPUs and on CUDA, never store the matrix of
scores. Pairs of tokens of different sequences, and pairs above the diagonal, cost nothing.

With C context parallel ranks, every sequence is split into 2C equal chunks. Rank c has the chunks c and 2C-1-c, which
balances the work of causal attention. Each rank gathers the keys and values of all chunks (Llama 3, arXiv:2407.21783,
section 3.3.2).

On CUDA, one call for all sequences may take their place (`kernels/varlen_attention.py`).

Called by `gpt_model.py`, and by `tensors.py` for the packing.

Shapes: P packed tokens on this rank, A on all C context parallel ranks; N query heads, G key/value heads, D head size;
Q queries and K keys of one sequence.
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

from specrl.trainer.megatron_backend.kernels.guard import Compute
from specrl.trainer.megatron_backend.parallel.groups import GroupPosition


@dataclass(kw_only=True)
class SequencePacking(PackedSeqParams):  # type: ignore[misc]  # Megatron has no types
    """Where sequences end, and which context parallel rank has which tokens.

    ends: [sequences + 1] int32, the first token of each sequence, and the end of the last. On the CPU, so that reading
        it does not wait for a GPU.
    order_A: the position of each token in the concatenation of all ranks' tokens; None if there is one rank.
    local_P: indices into [A] of this rank's tokens; None if there is one rank.
    experts_PLK: in a mixture, the K experts of each token in each of L layers, -1 where unknown; None: all unknown.
    """

    ends: torch.Tensor
    context: GroupPosition
    order_A: torch.Tensor | None = None
    local_P: torch.Tensor | None = None
    experts_PLK: torch.Tensor | None = None

    def __post_init__(self) -> None:  # replaces Megatron's, which prepares fields for Mamba layers
        self.qkv_format = "thd"
        self.cu_seqlens_q = self.cu_seqlens_kv = self.ends
        self.max_seqlen_q = self.max_seqlen_kv = int(self.ends.diff().max())
        if self.context.size > 1:
            of_ranks = [_local_tokens(self.ends, rank, self.context.size) for rank in range(self.context.size)]
            self.local_P = of_ranks[self.context.rank]
            self.order_A = torch.cat(of_ranks).argsort()

    def take_local(self, x_A: torch.Tensor) -> torch.Tensor:
        """Select this rank's tokens [P, ...] out of all tokens [A, ...]."""
        return x_A if self.local_P is None else x_A[self.local_P.to(x_A.device)]

    def gather_tokens(self, x_P: torch.Tensor) -> torch.Tensor:
        """Gather all tokens [A, ...], in order, from every rank's [P, ...]. Gradients are summed over the ranks."""
        if self.order_A is None:
            return x_P
        found: torch.Tensor = gather_from_sequence_parallel_region(x_P, group=self.context.group)
        return found[self.order_A.to(x_P.device)]


def _local_tokens(ends: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
    """Return the indices of one context parallel rank's tokens. Every sequence's length is a multiple of 2 * ranks."""
    parts = []
    for first, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        chunks = torch.arange(first, end).chunk(2 * ranks)
        parts += [chunks[rank], chunks[-1 - rank]]
    return torch.cat(parts)


class PackedAttention(MegatronModule):  # type: ignore[misc]  # Megatron has no types
    """Replaces Megatron's DotProductAttention, and takes its arguments.

    attend: `attend_one_by_one` or what computes the same. Not used with context parallel ranks.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *_: Any,
        attend: Compute,
        softmax_scale: float | None = None,
        **__: Any,
    ) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale
        self.attend = attend

    def forward(
        self,
        query_PND: torch.Tensor,
        key_PGD: torch.Tensor,
        value_PGD: torch.Tensor,
        *_: Any,
        packed_seq_params: SequencePacking,
        **__: Any,
    ) -> torch.Tensor:
        """Compute the attention output [P, N * D]."""
        if packed_seq_params.context.size == 1:
            return self.attend(query_PND, key_PGD, value_PGD, packed_seq_params.ends, self.scale).flatten(1)
        lengths = packed_seq_params.ends.diff().tolist()
        context = packed_seq_params.context
        keys, values = (packed_seq_params.gather_tokens(x).split(lengths) for x in (key_PGD, value_PGD))
        queries = query_PND.split([length // context.size for length in lengths])
        found = []
        for query_QND, key_KGD, value_KGD in zip(queries, keys, values, strict=True):
            # This rank has two chunks of the sequence. Each attends to all chunks up to itself.
            chunk = len(query_QND) // 2
            for number, part in zip(
                (context.rank, 2 * context.size - 1 - context.rank), query_QND.chunk(2), strict=True
            ):
                seen = (number + 1) * chunk
                found.append(_attend_within_sequence(part, key_KGD[:seen], value_KGD[:seen], self.scale))
        return torch.cat(found).flatten(1)


def attend_one_by_one(
    query_PND: torch.Tensor, key_PGD: torch.Tensor, value_PGD: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend within each sequence, one after another. ends: as of SequencePacking. Returns [P, N, D]."""
    lengths = ends.diff().tolist()
    sequences = zip(query_PND.split(lengths), key_PGD.split(lengths), value_PGD.split(lengths), strict=True)
    return torch.cat([_attend_within_sequence(*sequence, scale) for sequence in sequences])


def _attend_within_sequence(
    query_QND: torch.Tensor, key_KGD: torch.Tensor, value_KGD: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend within one sequence. The queries are the last Q of the K tokens. Returns [Q, N, D]."""
    query, key, value = (x.transpose(0, 1)[None] for x in (query_QND, key_KGD, value_KGD))
    is_whole = len(query_QND) == len(key_KGD)  # then is_causal means the same, without a mask
    found_1NQD = functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if is_whole else causal_lower_right(len(query_QND), len(key_KGD)),
        is_causal=is_whole,
        scale=scale,
        enable_gqa=True,
    )
    return found_1NQD[0].transpose(0, 1)
