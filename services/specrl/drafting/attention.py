"""The attention of a drafter's layer over several passes, restricted to the starts that are trained.

Pass 0 attends to pass 0 at all positions <= t, as vLLM's drafter attends to verified tokens. Pass j attends to passes
1..j at t as well, as drafted tokens attend to each other.

Called by drafters of one layer. `packing.py` lays out the rows.

Shapes: R packed rows, W tokens, M starts, G key/value groups, Q query heads of one group, N = G * Q, D head size, X
anything.
"""

from __future__ import annotations

import math

import torch
from torch.utils.checkpoint import checkpoint

from specrl.drafting.layers import AttentionProjections, LayerShape, apply_rotary
from specrl.drafting.packing import PackedRows

# With more starts, attention runs in blocks that are recomputed in the backward pass, which bounds its memory.
BLOCK_STARTS = 1024


class MultiPassAttention:
    """A layer's attention over all passes. The keys and values of pass 0 are the context of every later pass."""

    def __init__(self, projections: AttentionProjections, shape: LayerShape, rows: PackedRows) -> None:
        self.projections = projections
        self.groups = shape.num_groups
        self.dim = shape.head_dim
        self.shape = shape
        self.rows = rows
        self.start_position_RM = rows.position_RW.gather(1, rows.start_RM)
        self.own_keys: list[torch.Tensor] = []
        self.own_values: list[torch.Tensor] = []

    def remember_context(self, input_RWX: torch.Tensor) -> None:
        """Compute the keys and values [R, G, W, D] of pass 0 at every position, including prompts."""
        self.key_RGWD = self._rotate_heads(self.projections.k_proj(input_RWX), self.rows.position_RW)
        self.value_RGWD = self._split_heads(self.projections.v_proj(input_RWX))

    def __call__(self, input_RMX: torch.Tensor, step: int) -> torch.Tensor:
        """Attend from the starts in pass `step`; returns [R, M, heads * D]."""
        position_RM = self.start_position_RM + step
        query_RNMD = self._rotate_heads(self.projections.q_proj(input_RMX), position_RM)
        if step > 0:
            self.own_keys.append(self._rotate_heads(self.projections.k_proj(input_RMX), position_RM))
            self.own_values.append(self._split_heads(self.projections.v_proj(input_RMX)))
        # A copy of the lists: checkpointed blocks run again in the backward pass, after later passes were appended.
        own = tuple(zip(self.own_keys, self.own_values, strict=True))
        rows, heads, starts, dim = query_RNMD.shape
        query_RGQMD = query_RNMD.view(rows, self.groups, heads // self.groups, starts, dim)
        if starts <= BLOCK_STARTS:
            out_RGQMD = self._attend_block(query_RGQMD, 0, own)
        else:
            blocks = [
                checkpoint(
                    self._attend_block,
                    query_RGQMD[..., first : first + BLOCK_STARTS, :],
                    first,
                    own,
                    use_reentrant=False,
                )
                for first in range(0, starts, BLOCK_STARTS)
            ]
            out_RGQMD = torch.cat(blocks, -2)
        return out_RGQMD.reshape(rows, heads, starts, dim).transpose(1, 2).flatten(2)

    def _attend_block(
        self, query_RGQMD: torch.Tensor, first: int, own: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    ) -> torch.Tensor:
        """Attend to each start's own sequence up to the start, and to the earlier passes of the start itself.

        first: number of the first start of the block. own: keys and values of passes 1 to the present one.
        """
        rows, groups, repeats, starts, dim = query_RGQMD.shape
        cut = slice(first, first + starts)
        score_RGXW = query_RGQMD.flatten(2, 3) @ self.key_RGWD.transpose(-1, -2)
        width = score_RGXW.shape[-1]
        score_RGQMW = score_RGXW.view(rows, groups, repeats, starts, width)
        place_W = torch.arange(width, device=score_RGXW.device)
        start_RM1 = self.rows.start_RM[:, cut, None]
        first_RM1 = self.rows.first_RM[:, cut, None]
        # Causal, and blind to other sequences in the same packed row.
        is_hidden_RMW = (place_W > start_RM1) | (place_W < first_RM1)
        parts = [score_RGQMW.masked_fill(is_hidden_RMW[:, None, None], -math.inf)]
        parts += [(query_RGQMD * key[:, :, None, cut]).sum(-1, keepdim=True) for key, _ in own]
        # One softmax over both parts: W context positions, then one key per earlier pass.
        score = torch.cat(parts, -1) / math.sqrt(dim)
        weight = score.softmax(-1, dtype=torch.float64 if score.dtype == torch.float64 else torch.float32)
        weight = weight.to(query_RGQMD.dtype)
        out_RGXD = weight[..., :width].flatten(2, 3) @ self.value_RGWD
        out_RGQMD: torch.Tensor = out_RGXD.view(rows, groups, repeats, starts, dim)
        for i, (_, value) in enumerate(own):
            out_RGQMD = out_RGQMD + weight[..., width + i, None] * value[:, :, None, cut]
        return out_RGQMD

    def _rotate_heads(self, x_RWX: torch.Tensor, position_RW: torch.Tensor) -> torch.Tensor:
        """Split heads and apply their rotary embedding: [R, W, heads * D] -> [R, heads, W, D]."""
        return apply_rotary(self._split_heads(x_RWX), position_RW, self.shape)

    def _split_heads(self, x_RWX: torch.Tensor) -> torch.Tensor:
        """[R, W, heads * D] -> [R, heads, W, D]."""
        return x_RWX.view(*x_RWX.shape[:2], -1, self.dim).transpose(1, 2)
