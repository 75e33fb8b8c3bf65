"""Packs sequences of different lengths into rows, so that the drafter wastes no computation on padding.

A row holds several sequences one after another. Positions count from the beginning of each sequence, and the attention
in `online.py` is limited to a start's own sequence. So packed rows give the same loss and gradients as unpacked ones.

Called by the trainer, which joins hidden states, and by `online.py`.

Shapes: B sequences, S tokens of the longest, R rows, W row width, M starts of a row at most, H hidden, A auxiliary
layers, N targets of all sequences, K draft vocabulary, X anything.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch.nn import functional


class LessonBatch(NamedTuple):
    """Sequences with states of the policy's forward pass. Right-padded and without gradients.

    States that the drafter does not read have width 0.

    token_ids_BS: [B, S] int64.
    aux_BSA: [B, S, A*H], the auxiliary hidden states side by side.
    embedding_BSH: [B, S, H], the embedded tokens. normed_BSH: [B, S, H], the final norm's output.
    target_NK: [N, K], the policy's logits at temperature 1 of the tokens that the drafter can draft, in the policy's
    dtype. N: the targets of the first sequence, then of the second, and so on. A sequence of T completion tokens has
    T - 1 of them: the distributions of its second to last completion token.
    normaliser_N1: [N, 1] float32, log of the sum of exp(logit / temperature) over the whole vocabulary; width 0 if K is
    the whole vocabulary.
    prompt_lengths_B, lengths_B: [B] int64, tokens of the prompt, and of prompt and completion.
    """

    token_ids_BS: torch.Tensor
    aux_BSA: torch.Tensor
    embedding_BSH: torch.Tensor
    normed_BSH: torch.Tensor
    target_NK: torch.Tensor
    normaliser_N1: torch.Tensor
    prompt_lengths_B: torch.Tensor
    lengths_B: torch.Tensor

    def select_sequences(self, chosen: Sequence[int]) -> LessonBatch:
        """Select sequences by index."""
        if list(chosen) == list(range(len(self.lengths_B))):
            return self
        index = torch.tensor(chosen, dtype=torch.int64, device=self.lengths_B.device)
        counts = self.count_targets()
        firsts = list(accumulate(counts, initial=0))
        targets = [torch.arange(firsts[i], firsts[i] + counts[i], device=index.device) for i in chosen]
        picked = torch.cat([index[:0], *targets])
        return LessonBatch(*(x[picked if name in TARGET_FIELDS else index] for name, x in self._asdict().items()))

    def count_targets(self) -> list[int]:
        """Count each sequence's targets."""
        return (self.lengths_B - self.prompt_lengths_B - 1).clamp(min=0).tolist()

    @staticmethod
    def join_batches(batches: Sequence[LessonBatch]) -> LessonBatch:
        """Join batches, at least one, and trim padding beyond the longest sequence."""
        longest = max(int(batch.lengths_B.max()) for batch in batches)

        def fit_width(name: str, x_BX: torch.Tensor) -> torch.Tensor:
            if x_BX.dim() == 1 or name in TARGET_FIELDS:  # lengths, and what has no padding
                return x_BX
            x_BX = x_BX[:, :longest]
            return functional.pad(x_BX, (0, 0) * (x_BX.dim() - 2) + (0, longest - x_BX.shape[1]))

        return LessonBatch(
            *(
                torch.cat([fit_width(name, x_BX) for x_BX in parts])
                for name, parts in zip(LessonBatch._fields, zip(*batches, strict=True), strict=True)
            )
        )


TARGET_FIELDS = ("target_NK", "normaliser_N1")  # fields that have a row for each target instead of each sequence


@dataclass(frozen=True)
class PassLimits:
    """Limits of one forward pass of a drafter, which bound its memory. None: no limit.

    tokens: of all sequences, padded to the longest; a longer sequence is computed alone. starts: of all sequences.
    """

    tokens: int | None = None
    starts: int | None = None


@dataclass(frozen=True)
class PackedRows:
    """Sequences packed into rows.

    position_RW: each token's position in its own sequence.
    start_RM: each start's index in its row. first_RM: the index of its sequence's first token.
    room_RM: number of passes in which the start counts, T - 1 - m in `online.py`; 0 for unused entries.
    target_RM: row of each start's target in pass 0 in target_NK; in pass j it is the j-th after it.
    """

    token_ids_RW: torch.Tensor
    aux_RWA: torch.Tensor
    embedding_RWH: torch.Tensor
    normed_RWH: torch.Tensor
    position_RW: torch.Tensor
    start_RM: torch.Tensor
    first_RM: torch.Tensor
    room_RM: torch.Tensor
    target_RM: torch.Tensor
    target_NK: torch.Tensor
    normaliser_N1: torch.Tensor

    def select_starts(self, step: int) -> torch.Tensor:
        """Return [R, M] whether each start counts in pass `step`."""
        return self.room_RM > step

    def gather_starts(self, x_RWX: torch.Tensor, ahead: int = 0) -> torch.Tensor:
        """Gather [R, M, X] or [R, M] from what is `ahead` positions after each start.

        Beyond the row's end the value is arbitrary: such a start does not count in the pass.
        """
        index_RM = (self.start_RM + ahead).clamp(max=x_RWX.shape[1] - 1)
        if x_RWX.dim() == 2:
            return x_RWX.gather(1, index_RM)
        return x_RWX.gather(1, index_RM[:, :, None].expand(-1, -1, x_RWX.shape[2]))


def split_passes(batch: LessonBatch, limits: PassLimits) -> list[list[int]]:
    """Split sequences over forward passes within the limits, those of similar length together.

    Returns the indices in each pass. A sequence beyond a limit is in a pass of its own.
    """
    if limits.tokens is None and limits.starts is None:
        return [list(range(len(batch.lengths_B)))]
    lengths = batch.lengths_B.tolist()
    starts = (batch.lengths_B - batch.prompt_lengths_B - 1).tolist()
    passes: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if passes:
            wider = [*passes[-1], index]
            tokens = lengths[wider[0]] * len(wider)
            if tokens <= (limits.tokens or tokens) and sum(starts[i] for i in wider) <= (limits.starts or sum(starts)):
                passes[-1] = wider
                continue
        passes.append([index])
    return passes


def pack_rows(batch: LessonBatch) -> PackedRows:
    """Pack sequences into rows as wide as the longest one, by first fit in order of decreasing length."""
    lengths = batch.lengths_B.tolist()
    return lay_out_rows(batch, assign_first_fit(lengths, max(lengths)))


def assign_first_fit(lengths: Sequence[int], width: int) -> list[list[int]]:
    """Assign sequences to bins of at most `width` tokens: each, longest first, goes into the first bin with room.

    Returns the indices in each bin.
    """
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


def lay_out_rows(batch: LessonBatch, bins: Sequence[Sequence[int]]) -> PackedRows:
    """Lay out the sequences of each bin in one row, in the bin's order."""
    prompts = batch.prompt_lengths_B.tolist()
    lengths = batch.lengths_B.tolist()
    stride = batch.token_ids_BS.shape[1]
    width = max(sum(lengths[i] for i in row) for row in bins)
    starts = max(1, *(sum(max(0, lengths[i] - prompts[i] - 1) for i in row) for row in bins))
    # Indices are computed in NumPy and gathered on the device once: a loop of small copies would be slow on a GPU.
    # Padding keeps index 0, which no start can see.
    source_RW, position_RW = (np.zeros((len(bins), width), dtype=np.int64) for _ in range(2))
    start_RM, first_RM, room_RM, target_RM = (np.zeros((len(bins), starts), dtype=np.int64) for _ in range(4))
    targets = list(accumulate(batch.count_targets(), initial=0))
    for row, members in enumerate(bins):
        end = 0
        filled = 0
        for i in members:
            tokens = np.arange(lengths[i])
            count = max(0, lengths[i] - prompts[i] - 1)
            source_RW[row, end : end + lengths[i]] = i * stride + tokens
            position_RW[row, end : end + lengths[i]] = tokens
            start_RM[row, filled : filled + count] = end + prompts[i] - 1 + np.arange(count)
            first_RM[row, filled : filled + count] = end
            room_RM[row, filled : filled + count] = count - np.arange(count)
            target_RM[row, filled : filled + count] = targets[i] + np.arange(count)
            end = end + lengths[i]
            filled = filled + count
    device = batch.token_ids_BS.device

    def to_device(values: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    source = to_device(source_RW).flatten()

    def gather_tokens(x_BSX: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x_BSX.flatten(0, 1).index_select(0, source).unflatten(0, (len(bins), width))
        return found

    return PackedRows(
        gather_tokens(batch.token_ids_BS),
        gather_tokens(batch.aux_BSA),
        gather_tokens(batch.embedding_BSH),
        gather_tokens(batch.normed_BSH),
        to_device(position_RW),
        to_device(start_RM),
        to_device(first_RM),
        to_device(room_RM),
        to_device(target_RM),
        batch.target_NK,
        batch.normaliser_N1,
    )
