"""Takes the sequences of packed rows apart again, for models that compute one sequence per row.

Called by `model.py`.

Shapes: R packed rows, W tokens of a row, M starts of a row, N sequences, S tokens of the longest, E starts that count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from specrl.drafting.packing import PackedRows


class UnpackedSequences(NamedTuple):
    """Sequences, one per row, right-padded.

    token_ids_NS: padding repeats some other token. place_E: the place in the flattened [N, S] of the token after each
    start that counts in pass 0, in the order of the packed rows.
    """

    token_ids_NS: torch.Tensor
    place_E: torch.Tensor


def unpack_sequences(rows: PackedRows) -> UnpackedSequences:
    """Unpack the sequences that have a start, without their last token: no draft follows it."""
    width = rows.token_ids_RW.shape[1]
    row_RM = torch.arange(len(rows.token_ids_RW), device=rows.token_ids_RW.device)[:, None].expand_as(rows.start_RM)
    is_start_RM = rows.room_RM > 0
    # A sequence is known by where its first token is. Its start and its room add up to the same token at every start:
    # the one before its last.
    begin_E = (row_RM * width + rows.first_RM)[is_start_RM]
    start_E = (row_RM * width + rows.start_RM)[is_start_RM]
    begin_N, number_E = begin_E.unique(return_inverse=True)
    end_N = torch.zeros_like(begin_N).index_copy(0, number_E, start_E + rows.room_RM[is_start_RM])
    longest = int((end_N - begin_N).max()) + 1
    place_NS = begin_N[:, None] + torch.arange(longest, device=begin_N.device)
    # Padding beyond a sequence's end may be any token, as long as it exists.
    token_ids_NS = rows.token_ids_RW.flatten()[place_NS.minimum(end_N[:, None])]
    return UnpackedSequences(token_ids_NS, number_E * longest + (start_E + 1 - begin_E))
