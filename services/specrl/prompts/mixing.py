"""Mixes several sources into one stream by their weights. Pure.

`stream` asks which source a position belongs to, and how many prompts of that source come before it. Invariant: the
answer is a function of weights, seed and position alone, so a stream can start at any position without a state.

With weights 7 and 3 the stream consists of blocks of ten positions. Each block has seven prompts of the first source
and three of the second, in an order of its own. So shares are exact in every block, and a source with few problems does
not end early: its own epochs follow one another.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

_MASK = 2**64 - 1  # Philox takes unsigned keys

# The second word of a Philox key: an epoch of a source in its lower 48 bits, the source above. Blocks have the top bit.
_SOURCE_SHIFT = 48
_BLOCKS = 1 << 63

_BLOCKS_CACHED = 8
"""Blocks whose order is kept. Prompts that are in flight at the same time lie in few of them."""


def shuffle_order(count: int, seed: int, word: int) -> npt.NDArray[np.int64]:
    """Return the item at each place of a shuffled order, as an int64 array of shape [count].

    The order is uniform over permutations, as far as a 128-bit key can make it.
    """
    key = np.array([seed & _MASK, word & _MASK], dtype=np.uint64)
    return np.argsort(np.random.Philox(key=key).random_raw(count), kind="stable")


def epoch_order(count: int, seed: int, epoch: int, source: int = 0) -> npt.NDArray[np.int64]:
    """Return the problem index at each place of a source's epoch, as an int64 array of shape [count].

    source: index of the source in the run file, so that sources of one size have different orders.
    """
    return shuffle_order(count, seed, epoch + (source << _SOURCE_SHIFT))


class SourceMix:
    """The source of each position of a stream."""

    def __init__(self, weights: Sequence[int], seed: int) -> None:
        divisor = math.gcd(*weights)
        self._weights = [weight // divisor for weight in weights]
        self._length = sum(self._weights)
        slots = np.repeat(np.arange(len(weights)), self._weights)
        # A cache per instance, which is freed with it. A decorated method would keep every mix alive.
        self._block = lru_cache(_BLOCKS_CACHED)(lambda block: slots[shuffle_order(self._length, seed, _BLOCKS + block)])

    def locate_position(self, position: int) -> tuple[int, int]:
        """Return the index of the source at a position, and how many earlier positions are of that source."""
        if len(self._weights) == 1:
            return 0, position
        block, place = divmod(position, self._length)
        sources = self._block(block)
        source = int(sources[place])
        earlier = int(np.count_nonzero(sources[:place] == source))
        return source, block * self._weights[source] + earlier
