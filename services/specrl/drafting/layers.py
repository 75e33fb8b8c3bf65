"""Parts of a decoder layer that drafters share: its shape, rotary positions, projections, feed-forward block.

Parameter names are those of Hugging Face folders.

Shapes: B sequences, S tokens, N heads, D head size, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from specrl.drafting.rotary import compute_attention_factor, compute_inverse_frequencies
from specrl.models.policy_config import RopeScaling


@dataclass(frozen=True)
class LayerShape:
    """Shape of a decoder layer."""

    intermediate_size: int
    num_heads: int
    num_groups: int
    head_dim: int
    norm_epsilon: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None


def apply_rotary(x_BNSD: torch.Tensor, position_BS: torch.Tensor, shape: LayerShape) -> torch.Tensor:
    """Apply rotary embedding in the half-split layout of Llama and Qwen3. position_BS broadcasts over B."""
    frequency = compute_inverse_frequencies(shape.head_dim, shape.rope_theta, shape.rope_scaling).to(x_BNSD.device)
    factor = compute_attention_factor(shape.rope_scaling)
    angle = position_BS[:, None, :, None].float() * frequency
    cos = (angle.cos() * factor).to(x_BNSD.dtype)
    sin = (angle.sin() * factor).to(x_BNSD.dtype)
    first, second = x_BNSD.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class AttentionProjections(nn.Module):
    """Projections of an attention block. The attention itself depends on the passes and is in `attention.py`.

    input_size: width of the input of queries, keys and values.
    """

    def __init__(self, input_size: int, hidden_size: int, shape: LayerShape, *, has_bias: bool = False) -> None:
        super().__init__()
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_groups * shape.head_dim
        self.q_proj = nn.Linear(input_size, queries, bias=has_bias)
        self.k_proj = nn.Linear(input_size, keys, bias=has_bias)
        self.v_proj = nn.Linear(input_size, keys, bias=has_bias)
        self.o_proj = nn.Linear(queries, hidden_size, bias=False)


class FeedForward(nn.Module):
    """SwiGLU feed-forward block."""

    def __init__(self, hidden_size: int, shape: LayerShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., H] -> [..., H]."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out
