"""Turns the graded groups of a step into the batch that the trainer takes one optimizer step on.

The coordinator calls `assemble_batch`. Everything here is a pure function of its arguments.
"""

from specrl.batching.advantages import compute_advantages, has_signal
from specrl.batching.assemble import assemble_batch
from specrl.batching.shaping import compute_overlong_penalties

__all__ = ["assemble_batch", "compute_advantages", "compute_overlong_penalties", "has_signal"]
