"""What is taken off a verifier's reward before it becomes an advantage."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrl.records.rollout import FloatArray


def overlong_penalties(lengths: Sequence[int], longest: int, buffer: int, penalty: float) -> FloatArray:
    """Penalties [G] float32 of completions of these lengths, in tokens: 0 up to longest - buffer, then rising linearly.

    At `longest` it is `penalty`; beyond it stays so. DAPO's soft overlong punishment, arXiv:2503.14476, eq. 13, with
    the limit `longest` for its L_max and `buffer` for its L_cache.
    """
    excess_G = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return np.asarray(penalty * np.clip(excess_G / buffer, 0, 1), dtype=np.float32)
