"""Builds tiny random heads, policy layers and hidden states for the drafter's tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from specrl.drafting.eagle3.head import Eagle3Head, HeadConfig
from specrl.drafting.packing import LessonBatch
from specrl.models.policy_config import PolicyConfig

VOCAB = 48
HIDDEN = 32


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
    """A head whose parameters all differ from their initial values, so that a forgotten one is noticed."""
    head = Eagle3Head(HeadConfig(a_policy(), draft_vocab, (2, 3, 4)))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in head.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.2 * noise if weight.ndim == 1 else 0.2 * noise)
    return head


@dataclass(frozen=True)
class PolicyEnds:
    """The layers of a policy at its ends."""

    norm_H: torch.Tensor
    lm_head_VH: torch.Tensor
    embedding_VH: torch.Tensor

    def compute_logits(self, last: torch.Tensor) -> torch.Tensor:
        """Compute logits [..., V] from the input [..., H] of the final norm."""
        return torch.nn.functional.rms_norm(last, (HIDDEN,), self.norm_H, 1e-6) @ self.lm_head_VH.T


def some_ends(seed: int = 1) -> PolicyEnds:
    generator = torch.Generator().manual_seed(seed)
    embedding_VH = torch.randn(VOCAB, HIDDEN, generator=generator)
    norm_H = 1 + 0.1 * torch.randn(HIDDEN, generator=generator)
    return PolicyEnds(norm_H, torch.randn(VOCAB, HIDDEN, generator=generator), embedding_VH)


def some_states(
    prompts: list[int],
    lengths: list[int],
    seed: int = 2,
    padding: int = 0,
    *,
    draft_ids_K: torch.Tensor | None = None,
    temperature: float = 1,
) -> LessonBatch:
    """Random tokens and states of sequences, right-padded to the longest and `padding` more."""
    tokens, states = _draw_states(lengths, seed)
    width = max(lengths) + padding
    logits_BSV = some_ends().compute_logits(states[..., 3 * HIDDEN :])
    states = torch.nn.functional.pad(states, (0, 0, 0, width - max(lengths)), value=7.0)
    tokens = torch.nn.functional.pad(tokens, (0, width - max(lengths)))
    embedded = some_ends().embedding_VH[tokens]
    return LessonBatch(
        tokens,
        states[..., : 3 * HIDDEN],
        embedded,
        embedded[..., :0],
        *choose_targets(logits_BSV, prompts, lengths, draft_ids_K, temperature),
        torch.tensor(prompts),
        torch.tensor(lengths),
    )


def some_last(lengths: list[int], seed: int = 2) -> torch.Tensor:
    """The inputs [B, S, H] of the policy's final norm, of which `some_states` has the logits."""
    return _draw_states(lengths, seed)[1][..., 3 * HIDDEN :]


def _draw_states(lengths: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(len(lengths), max(lengths), 4 * HIDDEN, generator=generator)
    return torch.randint(0, VOCAB, (len(lengths), max(lengths)), generator=generator), states


def choose_targets(
    logits_BSV: torch.Tensor,
    prompts: list[int],
    lengths: list[int],
    draft_ids_K: torch.Tensor | None = None,
    temperature: float = 1,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return target_NK and normaliser_N1 of a `LessonBatch`, chosen from the logits of all positions."""
    rows_NV = torch.cat(
        [logits_V[prompt : length - 1] for logits_V, prompt, length in zip(logits_BSV, prompts, lengths, strict=True)]
    )
    if draft_ids_K is None:
        return rows_NV, rows_NV[:, :0]
    return rows_NV[:, draft_ids_K], (rows_NV / temperature).logsumexp(-1, keepdim=True)
