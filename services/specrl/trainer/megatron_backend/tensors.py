"""Rollouts as the tensors of one forward pass, right-padded.

With causal attention nothing that counts can see the padding, and only the positions that predict a sampled token
reach the output layer; so padding changes neither loss nor gradients, and what a tool wrote is read and nothing else:
it has no place in loss, ratio, entropy or mismatch that could be forgotten to be masked.

Shapes: B rollouts, S tokens, T sampled tokens of all B rollouts, one completion after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specrl.records import TrainRollout


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. row_T indexes [B * S]: the position whose output is the token's distribution."""

    indices: tuple[int, ...]
    token_ids_BS: torch.Tensor
    position_BS: torch.Tensor
    prompt_lengths_B: torch.Tensor
    lengths_B: torch.Tensor
    row_T: torch.Tensor
    target_T: torch.Tensor
    sampler_T: torch.Tensor
    advantage_T: torch.Tensor
    is_current_T: torch.Tensor


def micro_batch(
    rollouts: Sequence[TrainRollout], indices: Sequence[int], version: int, device: torch.device
) -> MicroBatch:
    """Tensors of the rollouts at `indices`. is_current_T marks rollouts sampled wholly under `version`."""
    chosen = [rollouts[i] for i in indices]
    prompts_B = np.array([len(item.prompt_token_ids) for item in chosen])
    completions_B = np.array([item.rollout.length for item in chosen])
    counts_B = np.array([item.rollout.sampled_length for item in chosen])
    width = int((prompts_B + completions_B).max())
    token_ids_BS = np.zeros((len(chosen), width), dtype=np.int64)
    for row, item in enumerate(chosen):
        whole = np.concatenate([np.asarray(item.prompt_token_ids, dtype=np.int64), item.rollout.token_ids_T])
        token_ids_BS[row, : len(whole)] = whole
    sampled = [item.rollout.sampled_N for item in chosen]
    starts_B = np.arange(len(chosen)) * width + prompts_B - 1
    rows_T = np.concatenate([start + places for start, places in zip(starts_B, sampled, strict=True)])

    def of_sampled(arrays: Sequence[np.ndarray[tuple[int, ...], np.dtype[Any]]]) -> torch.Tensor:
        return tensor(np.concatenate([array[places] for array, places in zip(arrays, sampled, strict=True)]))

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return MicroBatch(
        indices=tuple(indices),
        token_ids_BS=tensor(token_ids_BS),
        position_BS=torch.arange(width, device=device).expand(len(chosen), width),
        prompt_lengths_B=tensor(prompts_B),
        lengths_B=tensor(prompts_B + completions_B),
        row_T=tensor(rows_T),
        target_T=of_sampled([item.rollout.token_ids_T.astype(np.int64) for item in chosen]),
        sampler_T=of_sampled([item.rollout.sampler_logprobs_T for item in chosen]),
        advantage_T=tensor(np.repeat([item.advantage for item in chosen], counts_B).astype(np.float32)),
        is_current_T=tensor(np.repeat([_is_current(item, version) for item in chosen], counts_B)),
    )


def _is_current(item: TrainRollout, version: int) -> bool:
    """Whether the whole rollout was sampled under `version`.

    Tokens of the present version that follow older ones do not count: with weights.kvCache Keep they attend to keys and
    values of the older policy, so the trainer, which computes all of them anew, rightly disagrees.
    """
    return all(span.policy_version == version for span in item.rollout.versions)
