"""Packs sequences of different lengths into rows, so that the drafter computes on tokens and not on padding.

A row holds several sequences, one after another; positions count from each one's start, and the attention in
`online.py` sees a start's own sequence alone. So packed rows give the loss and the gradients of unpacked ones.

Shapes: B sequences, S tokens of the longest; R rows, W their width, M most starts in a row; A, H as in `online.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch.nn import functional


@dataclass(frozen=True)
class HeadBatch:
    """Sequences with what the policy's forward pass left behind. Right-padded; nothing here carries gradients.

    token_ids_BS [B, S] int64; aux_BSA [B, S, A*H] the auxiliary hidden states side by side; last_BSH [B, S, H]
    the input of the policy's final norm; prompt_lengths_B and lengths_B [B] int64: P, and P + T.
    """

    token_ids_BS: torch.Tensor
    aux_BSA: torch.Tensor
    last_BSH: torch.Tensor
    prompt_lengths_B: torch.Tensor
    lengths_B: torch.Tensor

    def rows(self, chosen: Sequence[int]) -> HeadBatch:
        """Some of the sequences."""
        if list(chosen) == list(range(len(self.lengths_B))):
            return self
        index = torch.tensor(chosen, dtype=torch.int64, device=self.lengths_B.device)
        return HeadBatch(
            self.token_ids_BS[index],
            self.aux_BSA[index],
            self.last_BSH[index],
            self.prompt_lengths_B[index],
            self.lengths_B[index],
        )

    @staticmethod
    def joined(batches: Sequence[HeadBatch]) -> HeadBatch:
        """The sequences of all of them, one or more; what is longer than the longest one is left out."""
        longest = max(int(batch.lengths_B.max()) for batch in batches)

        def fit(x_BSX: torch.Tensor) -> torch.Tensor:
            x_BSX = x_BSX[:, :longest]
            return functional.pad(x_BSX, (0, 0) * (x_BSX.dim() - 2) + (0, longest - x_BSX.shape[1]))

        return HeadBatch(
            torch.cat([fit(batch.token_ids_BS) for batch in batches]),
            torch.cat([fit(batch.aux_BSA) for batch in batches]),
            torch.cat([fit(batch.last_BSH) for batch in batches]),
            torch.cat([batch.prompt_lengths_B for batch in batches]),
            torch.cat([batch.lengths_B for batch in batches]),
        )

    def cut(self, contexts: Sequence[int], lengths: Sequence[int]) -> HeadBatch:
        """A stretch of each sequence: its first tokens up to `lengths`, of which `contexts` count as the prompt."""
        contexts_B, lengths_B = (torch.tensor(x, device=self.lengths_B.device) for x in (contexts, lengths))
        return replace(self, prompt_lengths_B=contexts_B, lengths_B=lengths_B)


@dataclass(frozen=True)
class PackedRows:
    """Rows of sequences. For each start: start_RM its index in the row, first_RM that of its sequence's first token.

    room_RM: in how many passes the start counts, T - 1 - m of `online.py`; 0 where there is no start.
    position_RW: of each token in its own sequence.
    """

    token_ids_RW: torch.Tensor
    aux_RWA: torch.Tensor
    last_RWH: torch.Tensor
    position_RW: torch.Tensor
    start_RM: torch.Tensor
    first_RM: torch.Tensor
    room_RM: torch.Tensor


def pack(batch: HeadBatch) -> PackedRows:
    """Rows as wide as the longest sequence, filled first-fit, longest first."""
    lengths = batch.lengths_B.tolist()
    return lay_out(batch, first_fit(lengths, max(lengths)))


def first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Indices in bins of at most `width`: each goes, longest first, into the first bin that has room for it."""
    bins: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((b for b, left in enumerate(room) if left >= lengths[index]), len(bins))
        if place == len(bins):
            bins.append([])
            room.append(width)
        bins[place].append(index)
        room[place] -= lengths[index]
    return bins


def lay_out(batch: HeadBatch, bins: Sequence[Sequence[int]]) -> PackedRows:
    """Put the sequences of each bin into one row, in that order."""
    prompts, lengths = batch.prompt_lengths_B.tolist(), batch.lengths_B.tolist()
    stride = batch.token_ids_BS.shape[1]
    width = max(sum(lengths[i] for i in row) for row in bins)
    starts = max(1, *(sum(max(0, lengths[i] - prompts[i] - 1) for i in row) for row in bins))
    source_RW, position_RW = (np.zeros((len(bins), width), dtype=np.int64) for _ in range(2))
    start_RM, first_RM, room_RM = (np.zeros((len(bins), starts), dtype=np.int64) for _ in range(3))
    for row, members in enumerate(bins):
        end, filled = 0, 0
        for i in members:
            tokens, count = np.arange(lengths[i]), max(0, lengths[i] - prompts[i] - 1)
            source_RW[row, end : end + lengths[i]] = i * stride + tokens
            position_RW[row, end : end + lengths[i]] = tokens
            start_RM[row, filled : filled + count] = end + prompts[i] - 1 + np.arange(count)
            first_RM[row, filled : filled + count] = end
            room_RM[row, filled : filled + count] = count - np.arange(count)
            end, filled = end + lengths[i], filled + count
    device = batch.token_ids_BS.device

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    source = tensor(source_RW).flatten()

    def gathered(x_BSX: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x_BSX.flatten(0, 1).index_select(0, source).unflatten(0, (len(bins), width))
        return found

    return PackedRows(
        gathered(batch.token_ids_BS),
        gathered(batch.aux_BSA),
        gathered(batch.last_BSH),
        tensor(position_RW),
        tensor(start_RM),
        tensor(first_RM),
        tensor(room_RM),
    )
