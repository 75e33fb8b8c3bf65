"""Attention of all packed sequences in one call: torch's variable-length attention.

The reference calls torch once for each sequence and layer. Each call takes about 50 us of the host's time, by estimate.
So with sequences of less than about 200 tokens, the card waits for the host.

`torch.nn.attention.varlen.varlen_attn` (torch 2.13) runs flash attention, which exists for CUDA alone, in bfloat16 and
float16. With context parallel ranks the policy stays on the reference.
"""

from __future__ import annotations

import torch

CAUSAL = (-1, 0)
"""The window of varlen_attn that means causal: any number of tokens back, none ahead."""


def attend_in_one_call(
    query_PND: torch.Tensor, key_PGD: torch.Tensor, value_PGD: torch.Tensor, ends: torch.Tensor, scale: float | None
) -> torch.Tensor:
    """Attend within each sequence, causally. Takes and returns what `attention.attend_one_by_one` does."""
    # Imported here: versions before 2.10 lack it, and CPUs do not need it.
    from torch.nn.attention.varlen import varlen_attn

    longest = int(ends.diff().max())
    ends_on_card = ends.to(query_PND.device)
    found = varlen_attn(
        query_PND,
        key_PGD,
        value_PGD,
        ends_on_card,
        ends_on_card,
        longest,
        longest,
        scale=scale,
        window_size=CAUSAL,
        enable_gqa=True,
    )
    assert isinstance(found, torch.Tensor)  # a tuple only with return_aux
    return found
