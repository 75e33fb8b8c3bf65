"""How a batch's rollouts are dealt to data parallel ranks and cut into forward passes. Pure: lengths in, indices out.

A forward pass holds whole rollouts, one after another without padding, so only its token count matters. Neither dealing
nor cutting changes the loss, which is a sum over tokens divided by the token count of the whole batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def deal(indices: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """The indices in so many parts whose token sums are close: longest first, to the least loaded part.

    lengths: prompt plus completion of every rollout, in tokens. Deterministic; every index appears once. Source: the
    LPT rule, Graham, 1969: the largest sum is at most 4/3 of the best possible one.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + lengths[index], part))
    return shares


def cut(lengths: Sequence[int], ranks: int, max_tokens: int, multiple: int = 1) -> list[list[list[int]]]:
    """Rollout indices of every micro-batch of every rank: the same number of micro-batches at each, a multiple.

    A micro-batch has at most `max_tokens` tokens, or is one rollout that is longer. Those of one rank are about equally
    large. With fewer rollouts than micro-batches some are empty.
    """
    shares = deal(range(len(lengths)), lengths, ranks)
    count = max(_fewest(share, lengths, max_tokens) for share in shares)
    count = -(-count // multiple) * multiple
    return [deal(share, lengths, count) for share in shares]


def sizes(cuts: Sequence[Sequence[int]], lengths: Sequence[int], multiple: int, is_even: bool) -> list[int]:
    """Tokens of each micro-batch with padding: a positive multiple; the same for all, if even."""
    found = [max(1, -(-sum(lengths[i] for i in cut) // multiple)) * multiple for cut in cuts]
    return [max(found)] * len(found) if is_even else found


def _fewest(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> int:
    """How many parts it takes until `deal` finds ones that fit."""
    count = max(1, -(-sum(lengths[i] for i in share) // max_tokens))
    while not all(
        len(part) <= 1 or sum(lengths[i] for i in part) <= max_tokens for part in deal(share, lengths, count)
    ):
        count += 1
    return count
