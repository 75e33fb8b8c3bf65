"""Rollouts as the tensors of one forward pass: packed one after another, each with positions of its own.

Attention keeps sequences apart (`attention.py`) and all else works on one token at a time, so a packed pass gives what
passes of one rollout each would give, and computes nothing twice or for nothing. Only the positions that predict a
sampled token reach the output layer; what a tool wrote is read and nothing else: it has no place in loss, ratio,
entropy or mismatch that could be forgotten to be masked.

Shapes: B rollouts, P packed tokens of all of them, T sampled tokens of all of them, one completion after another, S
tokens of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams

from specrl.drafting.packing import HeadBatch
from specrl.records import TrainRollout


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. row_T indexes [P]: the position whose output is the token's distribution. sequence_T: [B]."""

    indices: tuple[int, ...]
    token_ids_P: torch.Tensor
    position_P: torch.Tensor
    packing: PackedSeqParams
    prompt_lengths_B: tuple[int, ...]
    lengths_B: tuple[int, ...]
    row_T: torch.Tensor
    target_T: torch.Tensor
    sampler_T: torch.Tensor
    advantage_T: torch.Tensor
    is_current_T: torch.Tensor
    sequence_T: torch.Tensor

    def places(self, rows: Sequence[int]) -> torch.Tensor:
        """Index [rows, S] into [P] of the tokens of some rollouts; past a rollout's end its last token again."""
        starts_B = (0, *accumulate(self.lengths_B))
        longest = max(self.lengths_B[row] for row in rows)
        firsts, lasts = (torch.tensor(x) for x in zip(*((starts_B[r], starts_B[r + 1] - 1) for r in rows), strict=True))
        return (firsts[:, None] + torch.arange(longest)).minimum(lasts[:, None]).to(self.token_ids_P.device)

    def head_batch(self, rows: Sequence[int], aux_BSA: torch.Tensor, last_BSH: torch.Tensor) -> HeadBatch:
        """What the drafter learns from some rollouts, given their hidden states in the order of `places`."""
        device = self.token_ids_P.device
        prompts_B, lengths_B = (
            torch.tensor([values[row] for row in rows], device=device)
            for values in (self.prompt_lengths_B, self.lengths_B)
        )
        return HeadBatch(self.token_ids_P[self.places(rows)], aux_BSA, last_BSH, prompts_B, lengths_B)


def micro_batch(
    rollouts: Sequence[TrainRollout], indices: Sequence[int], version: int, device: torch.device, multiple: int = 1
) -> MicroBatch:
    """Tensors of the rollouts at `indices`, which may be none. is_current_T marks those sampled wholly under `version`.

    multiple: of the number of packed tokens; it is reached by a last sequence of zeros, which nothing sees.
    """
    chosen = [rollouts[i] for i in indices]
    prompts_B = [len(item.prompt_token_ids) for item in chosen]
    lengths_B = [prompt + item.rollout.length for prompt, item in zip(prompts_B, chosen, strict=True)]
    counts_B = [item.rollout.sampled_length for item in chosen]
    padding = -sum(lengths_B) % multiple if chosen else multiple
    packed_B = [*lengths_B, padding] if padding else lengths_B
    starts_B = list(accumulate(packed_B, initial=0))
    sampled = [item.rollout.sampled_N for item in chosen]

    def joined(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        values = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
        return torch.from_numpy(values).to(device)

    def of_sampled(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        return joined([array[places] for array, places in zip(arrays, sampled, strict=True)], dtype)

    tokens = [part for item in chosen for part in (item.prompt_token_ids, item.rollout.token_ids_T)]
    firsts = [start + prompt - 1 for start, prompt in zip(starts_B, prompts_B, strict=False)]
    ends = torch.tensor(starts_B, dtype=torch.int32)  # on the CPU: read by the host alone
    return MicroBatch(
        indices=tuple(indices),
        token_ids_P=joined([*tokens, np.zeros(padding)], np.int64),
        position_P=joined([np.arange(length) for length in packed_B], np.int64),
        packing=PackedSeqParams("thd", ends, ends, max_seqlen_q=max(packed_B), max_seqlen_kv=max(packed_B)),
        prompt_lengths_B=tuple(prompts_B),
        lengths_B=tuple(lengths_B),
        row_T=joined([first + places for first, places in zip(firsts, sampled, strict=True)], np.int64),
        target_T=of_sampled([item.rollout.token_ids_T for item in chosen], np.int64),
        sampler_T=of_sampled([item.rollout.sampler_logprobs_T for item in chosen], np.float32),
        advantage_T=joined([np.repeat(i.advantage, n) for i, n in zip(chosen, counts_B, strict=True)], np.float32),
        is_current_T=joined(
            [np.repeat(_is_current(i, version), n) for i, n in zip(chosen, counts_B, strict=True)], np.bool_
        ),
        sequence_T=joined([np.repeat(row, n) for row, n in enumerate(counts_B)], np.int64),
    )


def _is_current(item: TrainRollout, version: int) -> bool:
    """Whether the whole rollout was sampled under `version`.

    Tokens of the present version that follow older ones do not count: with weights.kvCache Keep they attend to keys and
    values of the older policy, so the trainer, which computes all of them anew, rightly disagrees.
    """
    return all(span.policy_version == version for span in item.rollout.versions)
