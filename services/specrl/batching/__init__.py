"""Stage 4 of the loop: from graded groups to the batch of one optimizer step."""

from specrl.batching.advantages import batch_advantages, has_signal
from specrl.batching.assemble import assemble
from specrl.batching.shaping import overlong_penalties

__all__ = ["assemble", "batch_advantages", "has_signal", "overlong_penalties"]
