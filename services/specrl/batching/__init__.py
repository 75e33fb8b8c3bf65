"""Stage 4 of the loop: from graded groups to the batch of one optimizer step."""

from specrl.batching.advantages import group_advantages
from specrl.batching.assemble import assemble

__all__ = ["assemble", "group_advantages"]
