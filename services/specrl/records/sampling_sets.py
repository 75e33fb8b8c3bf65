"""The tokens that top-k and top-p left at each sampled token of a rollout: its sampling sets.

A sampler with top-p or top-k draws from the renormalised probabilities of a set of tokens. The trainer must normalise
over the same set, and it cannot find the set itself: its rounding differs, and so does its policy after an update. So
the sampler records the ids (docs/decisions/0040).

Shape suffixes: N sampled tokens of a rollout; M ids of all their sets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int32]

ID_BYTES = 4
"""Bytes of an id, and of a size, in memory and on the wire."""


@dataclass(frozen=True, eq=False)
class SamplingSets:
    """The set of every sampled token, one after another.

    sizes_N: [N] int32, ids in each set, >= 1. ids_M: [M] int32, the ids, ascending within a set; each set has the
    sampled token. A set may be the whole vocabulary.
    """

    sizes_N: IntArray
    ids_M: IntArray

    @classmethod
    def from_lists(cls, sets: Sequence[Sequence[int]]) -> SamplingSets:
        """Build from one list of ids per sampled token."""
        sizes_N = np.array([len(ids) for ids in sets], dtype=np.int32)
        ids = [np.asarray(ids, dtype=np.int32) for ids in sets]
        return cls(sizes_N, np.concatenate([np.zeros(0, dtype=np.int32), *ids]))

    @classmethod
    def join(cls, parts: Sequence[SamplingSets]) -> SamplingSets:
        """Join the sets of the turns of a rollout."""
        return cls(np.concatenate([part.sizes_N for part in parts]), np.concatenate([part.ids_M for part in parts]))

    @property
    def size_bytes(self) -> int:
        """Bytes of all sets in memory and on the wire."""
        return ID_BYTES * (len(self.sizes_N) + len(self.ids_M))

    @property
    def owner_M(self) -> npt.NDArray[np.int64]:
        """[M] int64: the sampled token, 0 to N - 1, to whose set each id belongs."""
        return np.repeat(np.arange(len(self.sizes_N)), self.sizes_N)

    def check(self, sampled_ids_N: IntArray, raise_invalid: Callable[[str], None]) -> None:
        """Call `raise_invalid` with a reason, which raises, unless these are the sets of these sampled tokens."""
        count = len(sampled_ids_N)
        if len(self.sizes_N) != count:
            raise_invalid(f"sampling sets must be one per sampled token, got {len(self.sizes_N)} for {count}")
        if (self.sizes_N < 1).any():
            raise_invalid("a sampling set must have at least one id, got none")
        total = int(self.sizes_N.sum(dtype=np.int64))
        if total != len(self.ids_M):
            raise_invalid(f"sampling sets must have as many ids as their sizes sum to, {total}, got {len(self.ids_M)}")
        if (self.ids_M < 0).any():
            raise_invalid("ids of sampling sets must be >= 0, got a negative one")
        owner_M = self.owner_M
        is_ascending = (np.diff(self.ids_M) > 0) | (np.diff(owner_M) > 0)
        if not is_ascending.all():
            raise_invalid("ids of a sampling set must ascend, got others")
        found = np.count_nonzero(self.ids_M == sampled_ids_N[owner_M])  # each set has a token at most once
        if found != count:
            raise_invalid(
                f"every sampled token must be in its sampling set, got {count - found} of {count} that are not"
            )
