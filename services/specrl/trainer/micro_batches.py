"""Assigns a batch's rollouts to data parallel ranks and to micro-batches. Pure: lengths in, indices out.

Rank 0 sends each rank its rollouts by it (`calls.py`), and every rank cuts its micro-batches by it.

A micro-batch is one forward pass. It holds whole rollouts, packed without padding, so only its token count matters.
The assignment does not change the loss. That is a sum over tokens, divided by a number that depends on the whole batch.
Called by `calls.py` and the Megatron backend's `batches.py`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from specrl.spec.trainer import Trainer


def deal_rollouts(indices: Sequence[int], lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Distribute indices over `parts` parts so that their token sums are close. Deterministic.

    lengths: of every rollout, prompt plus completion, in tokens.

    Longest first, each to the part with the fewest tokens. Source: the LPT rule, Graham, 1969. The largest sum is at
    most 4/3 of the optimum.
    """
    shares: list[list[int]] = [[] for _ in range(parts)]
    loads = [(0, part) for part in range(parts)]
    for index in sorted(indices, key=lambda i: (-lengths[i], i)):
        load, part = heapq.heappop(loads)
        shares[part].append(index)
        heapq.heappush(loads, (load + lengths[index], part))
    return shares


def compute_padded_length(length: int, context: int) -> int:
    """Compute how many tokens a rollout takes in a pass.

    With context parallelism, it is padded to a multiple of the 2 * context chunks into which it is split.
    """
    step = 2 * context if context > 1 else 1
    return -(-length // step) * step


def plan_batch(trainer: Trainer, lengths: Sequence[int]) -> list[list[list[int]]]:
    """Plan a batch as the run file says: the rollout indices of every micro-batch of every data parallel rank.

    lengths: of every rollout, prompt plus completion, in tokens.
    """
    sizes = trainer.parallelism
    padded = [compute_padded_length(length, sizes.context) for length in lengths]
    # Megatron's interleaved schedule needs a multiple of the pipeline's size.
    multiple = sizes.pipeline if sizes.virtual_stages > 1 else 1
    return plan_micro_batches(padded, sizes.data, trainer.micro_batch_tokens * sizes.context, multiple)


def plan_micro_batches(lengths: Sequence[int], ranks: int, max_tokens: int, multiple: int = 1) -> list[list[list[int]]]:
    """Return the rollout indices of every micro-batch of every rank.

    lengths: of every rollout, in tokens. max_tokens: of a micro-batch; a longer rollout gets one of its own. multiple:
    divides the number of micro-batches per rank.

    All ranks get equally many micro-batches, some of them empty if there are few rollouts. Those of one rank are about
    equally large.
    """
    # All ranks need the same count, because a pass runs collectives.
    shares = deal_rollouts(range(len(lengths)), lengths, ranks)
    count = max(_count_fewest_parts(share, lengths, max_tokens) for share in shares)
    count = -(-count // multiple) * multiple
    return [deal_rollouts(share, lengths, count) for share in shares]


def compute_padded_sizes(
    cuts: Sequence[Sequence[int]], lengths: Sequence[int], multiple: int, is_even: bool
) -> list[int]:
    """Compute the padded size of each micro-batch, in tokens: a positive multiple of `multiple`.

    is_even: all get the size of the largest, as a pipeline needs it.
    """
    found = [max(1, -(-sum(lengths[i] for i in cut) // multiple)) * multiple for cut in cuts]
    return [max(found)] * len(found) if is_even else found


def _count_fewest_parts(share: Sequence[int], lengths: Sequence[int], max_tokens: int) -> int:
    """Count the parts that `deal_rollouts` needs until each fits into `max_tokens`."""
    count = max(1, -(-sum(lengths[i] for i in share) // max_tokens))
    while not all(
        len(part) <= 1 or sum(lengths[i] for i in part) <= max_tokens for part in deal_rollouts(share, lengths, count)
    ):
        count += 1
    return count
