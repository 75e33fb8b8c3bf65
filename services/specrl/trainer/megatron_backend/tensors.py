"""Rollouts as the tensors of one forward pass: packed one after another, each with positions of its own.

Attention keeps sequences apart (`attention.py`) and all else works on one token at a time, so a packed pass gives what
passes of one rollout each would give, and computes nothing twice or for nothing. Only the positions that predict a
sampled token reach the output layer; what a tool wrote is read and nothing else: it has no place in loss, ratio,
entropy or mismatch that could be forgotten to be masked.

Shapes: B rollouts; A packed tokens of all of them, P of those on this context parallel rank; T sampled tokens of all
rollouts, one completion after another, L of those whose distributions are on this rank; S tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from specrl.drafting.packing import HeadBatch
from specrl.records import TrainRollout
from specrl.trainer.megatron_backend.attention import Packing
from specrl.trainer.megatron_backend.groups import Groups


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. row_L: of what this rank has of the packed tokens, the positions whose output is a distribution
    of a sampled token; sampled_L: which of the T tokens those are. sequence_T: the rollout [B] that each token is of.
    All but row_L and sampled_L is the same at all context parallel ranks.
    """

    indices: tuple[int, ...]
    token_ids_A: torch.Tensor
    packing: Packing
    starts_B: tuple[int, ...]
    prompt_lengths_B: tuple[int, ...]
    lengths_B: tuple[int, ...]
    row_L: torch.Tensor
    sampled_L: torch.Tensor
    target_T: torch.Tensor
    sampler_T: torch.Tensor
    advantage_T: torch.Tensor
    is_current_T: torch.Tensor
    sequence_T: torch.Tensor

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        """Index [rows, S] into [A] of the tokens of some rollouts; past a rollout's end its last token again."""
        first_R1, length_R1 = (torch.tensor([x[row] for row in rows])[:, None] for x in (self.starts_B, self.lengths_B))
        place_RS = torch.arange(int(length_R1.max())).minimum(length_R1 - 1)
        return (first_R1 + place_RS).to(self.token_ids_A.device)

    def head_batch(self, rows: Sequence[int], aux_BSA: torch.Tensor, last_BSH: torch.Tensor) -> HeadBatch:
        """What the drafter learns from some rollouts, given their hidden states in the order of `places`."""
        device = self.token_ids_A.device
        prompts_B, lengths_B = (
            torch.tensor([values[row] for row in rows], device=device)
            for values in (self.prompt_lengths_B, self.lengths_B)
        )
        return HeadBatch(self.token_ids_A[self.places(rows)], aux_BSA, last_BSH, prompts_B, lengths_B)


def padded(length: int, context: int) -> int:
    """Tokens that a rollout takes in a pass: with context parallel ranks all of their 2 * context chunks are equal."""
    step = 2 * context if context > 1 else 1
    return -(-length // step) * step


def micro_batch(
    rollouts: Sequence[TrainRollout], indices: Sequence[int], version: int, groups: Groups, tokens: int
) -> MicroBatch:
    """Tensors of the rollouts at `indices`, which may be none. is_current_T marks those sampled wholly under `version`.

    tokens: how many are packed at all context parallel ranks; what is missing is a last sequence of zeros, which
    nothing sees.
    """
    chosen = [rollouts[i] for i in indices]
    prompts_B = [len(item.prompt_token_ids) for item in chosen]
    lengths_B = [prompt + item.rollout.length for prompt, item in zip(prompts_B, chosen, strict=True)]
    counts_B = [item.rollout.sampled_length for item in chosen]
    starts_B = list(accumulate((padded(length, groups.context.size) for length in lengths_B), initial=0))
    ends = starts_B if starts_B[-1] == tokens else [*starts_B, tokens]
    packing = Packing(ends=torch.tensor(ends, dtype=torch.int32), context=groups.context)
    experts_ALK = _experts(chosen, starts_B, tokens)
    if experts_ALK is not None:
        packing.experts_PLK = packing.mine(experts_ALK).to(groups.device)
    sampled = [item.rollout.sampled_N for item in chosen]

    def joined(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        values = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
        return torch.from_numpy(values)

    def of_sampled(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        return joined([array[places] for array, places in zip(arrays, sampled, strict=True)], dtype)

    token_ids_A = np.zeros(tokens, dtype=np.int64)
    for start, prompt, length, item in zip(starts_B, prompts_B, lengths_B, chosen, strict=False):
        token_ids_A[start : start + prompt] = item.prompt_token_ids
        token_ids_A[start + prompt : start + length] = item.rollout.token_ids_T
    firsts = [start + prompt - 1 for start, prompt in zip(starts_B, prompts_B, strict=False)]
    row_T = joined([first + places for first, places in zip(firsts, sampled, strict=True)], np.int64)
    number_A = torch.full((tokens,), -1).index_copy(0, row_T, torch.arange(len(row_T)))
    number_P = packing.mine(number_A)
    row_L = (number_P >= 0).nonzero()[:, 0]
    tensors = {
        "token_ids_A": torch.from_numpy(token_ids_A),
        "row_L": row_L,
        "sampled_L": number_P[row_L],
        "target_T": of_sampled([item.rollout.token_ids_T for item in chosen], np.int64),
        "sampler_T": of_sampled([item.rollout.sampler_logprobs_T for item in chosen], np.float32),
        "advantage_T": joined(
            [np.repeat(item.advantage, n) for item, n in zip(chosen, counts_B, strict=True)], np.float32
        ),
        "sequence_T": joined([np.repeat(row, n) for row, n in enumerate(counts_B)], np.int64),
        "is_current_T": joined(
            [np.repeat(_is_current(item, version), n) for item, n in zip(chosen, counts_B, strict=True)], np.bool_
        ),
    }
    return MicroBatch(
        indices=tuple(indices),
        packing=packing,
        starts_B=tuple(starts_B[: len(chosen)]),
        prompt_lengths_B=tuple(prompts_B),
        lengths_B=tuple(lengths_B),
        **{name: tensor.to(groups.device) for name, tensor in tensors.items()},
    )


def _experts(chosen: Sequence[TrainRollout], starts_B: Sequence[int], tokens: int) -> torch.Tensor | None:
    """Experts [A, L, K] int32 that the sampler sent tokens to, -1 where none is known; None where all are not.

    One that is named twice is no choice that a router makes, and would break the dispatch of tokens: it is not known.
    """
    known = [(start, item.rollout.experts_SLK) for start, item in zip(starts_B, chosen, strict=False)]
    shapes = [experts_SLK.shape[1:] for _, experts_SLK in known if experts_SLK is not None]
    if not shapes:
        return None
    experts_ALK = torch.full((tokens, *shapes[0]), -1, dtype=torch.int32)
    for start, experts_SLK in known:
        if experts_SLK is not None:
            experts_ALK[start : start + len(experts_SLK)] = torch.from_numpy(experts_SLK.astype(np.int32))
    is_choice_AL = (experts_ALK.sort(-1).values.diff(dim=-1) > 0).all(-1)
    return experts_ALK.where(is_choice_AL[..., None], -1)


def _is_current(item: TrainRollout, version: int) -> bool:
    """Whether the whole rollout was sampled under `version`.

    Tokens of the present version that follow older ones do not count: with weights.kvCache Keep they attend to keys and
    values of the older policy, so the trainer, which computes all of them anew, rightly disagrees.
    """
    return all(span.policy_version == version for span in item.rollout.versions)
