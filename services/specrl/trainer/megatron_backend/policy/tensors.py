"""Packs rollouts into the tensors of one forward pass, one after another, each with its own positions.

Invariant: a packed pass gives the same result as one pass per rollout. Attention keeps sequences apart
(`attention.py`), and everything else works on single tokens.

Only positions that predict a sampled token reach the output layer. Tool output is input only: it has no entry in the
tensors of loss, ratio, entropy or mismatch, so nothing has to be masked there. Called by `batches.py`.

Shapes: B rollouts; A packed tokens of all of them, P of them on this context parallel rank; T sampled tokens of all
rollouts, one completion after another, L of them whose distributions are on this rank; S tokens of the longest rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from specrl.records import TrainRollout
from specrl.trainer.megatron_backend.model.attention import SequencePacking
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.policy.truncation import SetMask, build_set_mask
from specrl.trainer.micro_batches import compute_padded_length


@dataclass(frozen=True)
class MicroBatch:
    """The tensors of one forward pass. All but row_L, sampled_L and sets are equal at all context parallel ranks.

    indices: of the rollouts in the batch. starts_B: first packed token of each rollout.
    lengths_B: prompt plus completion, in tokens, without padding.
    row_L: indices into this rank's packed tokens [P] of the positions that predict a sampled token.
    sampled_L: indices into [T] of the tokens that they predict.
    target_T: token ids. sampler_T: the sampler's log-probabilities. sequence_T: the rollout [B] of each token.
    is_current_T: whether the token's rollout was sampled wholly under the current version.
    sets: the tokens that could be sampled at each token; None if that was the whole vocabulary everywhere.
    """

    indices: tuple[int, ...]
    token_ids_A: torch.Tensor
    packing: SequencePacking
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
    sets: SetMask | None


def build_micro_batch(
    rollouts: Sequence[TrainRollout], indices: Sequence[int], version: int, groups: RankGroups, tokens: int
) -> MicroBatch:
    """Pack the rollouts at `indices`, of which there may be none.

    version: the current policy version, for is_current_T. tokens: A, the size of the pass; the rest is filled with a
    sequence of zeros, which no rollout attends to.
    """
    chosen = [rollouts[i] for i in indices]
    assert not any(item.is_outline for item in chosen), "this rank was sent the rollouts of another"
    prompts_B = [len(item.prompt_token_ids) for item in chosen]
    lengths_B = [prompt + item.rollout.total_length for prompt, item in zip(prompts_B, chosen, strict=True)]
    counts_B = [item.rollout.sampled_length for item in chosen]
    starts_B = list(accumulate((compute_padded_length(length, groups.context.size) for length in lengths_B), initial=0))
    ends = starts_B if starts_B[-1] == tokens else [*starts_B, tokens]
    packing = SequencePacking(ends=torch.tensor(ends, dtype=torch.int32), context=groups.context)
    experts_ALK = _pack_experts(chosen, starts_B, tokens)
    if experts_ALK is not None:
        packing.experts_PLK = packing.take_local(experts_ALK).to(groups.device)
    sampled = [item.rollout.sampled_N for item in chosen]

    def join_arrays(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        values = np.concatenate([np.zeros(0, dtype), *(np.asarray(array, dtype) for array in arrays)])
        return torch.from_numpy(values)

    def join_sampled(arrays: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        return join_arrays([array[places] for array, places in zip(arrays, sampled, strict=True)], dtype)

    def repeat_values(values: Sequence[Any], dtype: type[np.generic]) -> torch.Tensor:
        return torch.from_numpy(np.repeat(np.asarray(values, dtype), np.asarray(counts_B, np.int64)))

    # Prompt and completion of each rollout, one after another.
    token_ids_A = np.zeros(tokens, dtype=np.int64)
    for start, prompt, length, item in zip(starts_B, prompts_B, lengths_B, chosen, strict=False):
        token_ids_A[start : start + prompt] = item.prompt_token_ids
        token_ids_A[start + prompt : start + length] = item.rollout.token_ids_T
    # A token is predicted at the position before it, so the first of a completion by the prompt's last token. row_T are
    # these positions among [A]; number_A is the inverse, from which each context parallel rank selects its own.
    firsts = [start + prompt - 1 for start, prompt in zip(starts_B, prompts_B, strict=False)]
    row_T = join_arrays([first + places for first, places in zip(firsts, sampled, strict=True)], np.int64)
    number_A = torch.full((tokens,), -1).index_copy(0, row_T, torch.arange(len(row_T)))
    number_P = packing.take_local(number_A)
    row_L = (number_P >= 0).nonzero()[:, 0]
    tensors = {
        "token_ids_A": torch.from_numpy(token_ids_A),
        "row_L": row_L,
        "sampled_L": number_P[row_L],
        "target_T": join_sampled([item.rollout.token_ids_T for item in chosen], np.int64),
        "sampler_T": join_sampled([item.rollout.sampler_logprobs_T for item in chosen], np.float32),
        "advantage_T": repeat_values([item.advantage for item in chosen], np.float32),
        "sequence_T": repeat_values(range(len(chosen)), np.int64),
        "is_current_T": repeat_values([_is_current(item, version) for item in chosen], np.bool_),
    }
    return MicroBatch(
        indices=tuple(indices),
        packing=packing,
        starts_B=tuple(starts_B[: len(chosen)]),
        prompt_lengths_B=tuple(prompts_B),
        lengths_B=tuple(lengths_B),
        sets=build_set_mask(chosen, tensors["sampled_L"], groups.device),
        **{name: tensor.to(groups.device) for name, tensor in tensors.items()},
    )


def _pack_experts(chosen: Sequence[TrainRollout], starts_B: Sequence[int], tokens: int) -> torch.Tensor | None:
    """Pack the experts [A, L, K] int32 that the sampler chose, -1 where unknown; None if all are unknown. L: layers."""
    known = [(start, item.rollout.experts_SLK) for start, item in zip(starts_B, chosen, strict=False)]
    shapes = [experts_SLK.shape[1:] for _, experts_SLK in known if experts_SLK is not None]
    if not shapes:
        return None
    experts_ALK = torch.full((tokens, *shapes[0]), -1, dtype=torch.int32)
    for start, experts_SLK in known:
        if experts_SLK is not None:
            experts_ALK[start : start + len(experts_SLK)] = torch.from_numpy(experts_SLK.astype(np.int32))
    # A router never chooses an expert twice for a token, and Megatron's dispatch would break. Treat such as unknown.
    is_choice_AL = (experts_ALK.sort(-1).values.diff(dim=-1) > 0).all(-1)
    return experts_ALK.where(is_choice_AL[..., None], -1)


def _is_current(item: TrainRollout, version: int) -> bool:
    """Return whether the whole rollout was sampled under `version`."""
    # A token of this version that follows tokens of an older one does not count. With weights.kvCache Keep it attends
    # to keys and values of the older policy, so sampler and trainer differ without a fault.
    return all(span.policy_version == version for span in item.rollout.versions)
