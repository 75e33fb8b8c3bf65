"""Reward shaping: penalties that are subtracted from a verifier's reward before advantages are computed.

Called by `assemble_batch`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specrl.records.rollout import FloatArray


def compute_overlong_penalties(lengths: Sequence[int], longest: int, buffer: int, penalty: float) -> FloatArray:
    """Compute the penalties [G] float32 of completions with these lengths.

    lengths, longest, buffer: in tokens. penalty: in units of reward, the largest value that is returned.

    A penalty is penalty * clip((length - (longest - buffer)) / buffer, 0, 1). It is 0 up to longest - buffer, rises
    linearly to `penalty` at `longest`, and stays there. Source: DAPO's soft overlong punishment, arXiv:2503.14476,
    eq. 13, where `longest` is called L_max and `buffer` is called L_cache.
    """
    excess_G = np.asarray(lengths, dtype=np.float64) - (longest - buffer)
    return np.asarray(penalty * np.clip(excess_G / buffer, 0, 1), dtype=np.float32)
