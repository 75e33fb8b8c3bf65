"""How a batch's rollouts are dealt to data parallel ranks and cut into forward passes. Pure: lengths in, indices out.

Neither changes the loss, which is a sum over tokens divided by the token count of the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence


def deal(lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Rollout indices of each rank, so that the ranks' token sums are close: longest first, to the least loaded.

    lengths: prompt plus completion of each rollout, in tokens. Deterministic; every index appears once.
    """
    shares: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rank = loads.index(min(loads))
        shares[rank].append(index)
        loads[rank] += lengths[index]
    return shares


def cut(indices: Sequence[int], lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Micro-batches of at most `max_tokens` tokens, right padding to the longest included.

    Similar lengths go together. A rollout longer than `max_tokens` is a micro-batch of its own.
    """
    batches: list[list[int]] = []
    longest = 0
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        if batches and longest * (len(batches[-1]) + 1) <= max_tokens:
            batches[-1].append(index)
        else:
            batches.append([index])
            longest = lengths[index]
    return batches
