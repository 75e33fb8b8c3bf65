"""A head, a policy's ends and hidden states, all random and tiny."""

from __future__ import annotations

from pathlib import Path

import torch

from specrl.drafting.head import Eagle3Head, HeadConfig
from specrl.drafting.online import PolicyEnds
from specrl.drafting.packing import HeadBatch
from specrl.drafting.policy_config import PolicyConfig

VOCAB, HIDDEN = 48, 32


def a_policy(**changes: object) -> PolicyConfig:
    fields = {
        "path": Path("nowhere"),
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": 64,
        "num_layers": 4,
        "num_heads": 4,
        "num_groups": 2,
        "head_dim": 16,
        "max_length": 128,
        "norm_epsilon": 1e-6,
        "rope_theta": 1e4,
        "is_tied": False,
    }
    return PolicyConfig(**(fields | changes))  # type: ignore[arg-type]  # the fields above have the right types


def a_head(draft_vocab: int = VOCAB, seed: int = 0) -> Eagle3Head:
    """With every parameter off its initial value, so that none can be forgotten unnoticed."""
    head = Eagle3Head(HeadConfig(a_policy(), draft_vocab, (2, 3, 4)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.2 * noise)
    return head


def some_ends(seed: int = 1) -> PolicyEnds:
    generator = torch.Generator().manual_seed(seed)
    return PolicyEnds(
        torch.randn(VOCAB, HIDDEN, generator=generator),
        1 + 0.1 * torch.randn(HIDDEN, generator=generator),
        torch.randn(VOCAB, HIDDEN, generator=generator),
    )


def some_states(prompts: list[int], lengths: list[int], seed: int = 2, padding: int = 0) -> HeadBatch:
    """Random tokens and hidden states of sequences, right-padded to the longest and `padding` more."""
    generator = torch.Generator().manual_seed(seed)
    width = max(lengths) + padding
    states = torch.randn(len(lengths), max(lengths), 4 * HIDDEN, generator=generator)
    tokens = torch.randint(0, VOCAB, (len(lengths), max(lengths)), generator=generator)
    states = torch.nn.functional.pad(states, (0, 0, 0, width - max(lengths)), value=7.0)
    tokens = torch.nn.functional.pad(tokens, (0, width - max(lengths)))
    return HeadBatch(
        tokens, states[..., : 3 * HIDDEN], states[..., 3 * HIDDEN :], torch.tensor(prompts), torch.tensor(lengths)
    )
