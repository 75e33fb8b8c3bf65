"""Turns an allocation that failed into MemoryTooSmall: what was running, how much was missing, what to change.

The same batch would fail again after a restart, so the process must end with MemoryTooSmall's exit code, 2. `ranks.py`
puts `report_exhaustion` around every call, and the Megatron backend around the phases of a step.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specrl.errors import MemoryTooSmall
from specrl.machine import available_memory_bytes

# What to change, by what takes the memory.
OF_STATE = "use a smaller model, or raise trainer.parallelism.tensor, pipeline or (for a mixture of experts) expert"
OF_PASSES = "lower trainer.microBatchTokens, set trainer.recompute to Layers, or raise trainer.parallelism.tensor"
OF_DRAFTER = (
    "lower trainer.drafter.tokenBudget or generation.speculation.eagle3.draftVocabSize, or set trainer.drafter.online "
    "to false"
)

# In the messages of torch's allocators, "tried to allocate 9.10 GiB" and "tried to allocate 4096 bytes".
_TRIED = re.compile(r"tried to allocate ([\d.]+ \w+)", re.IGNORECASE)
_CPU_ALLOCATOR = "DefaultCPUAllocator: can't allocate memory"  # a plain RuntimeError (c10/core/impl/alloc_cpu.cpp)


@contextmanager
def report_exhaustion(phase: str, remedy: str) -> Iterator[None]:
    """Raise MemoryTooSmall if memory runs out inside, unless something inside has raised it already.

    phase: what runs, as in "ran out of memory in the optimizer's update".
    """
    try:
        yield
    except MemoryTooSmall:
        raise
    except (MemoryError, RuntimeError) as error:
        if not _is_exhaustion(error):
            raise
        raise MemoryTooSmall(_describe_exhaustion(error, phase, remedy)) from error


def _is_exhaustion(error: Exception) -> bool:
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _CPU_ALLOCATOR in str(error)


def _describe_exhaustion(error: Exception, phase: str, remedy: str) -> str:
    rank = os.environ.get("RANK", "0")
    tried = _TRIED.search(str(error))
    wanted = tried[1] if tried else "an unknown size"
    if isinstance(error, torch.OutOfMemoryError) and torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        left = f"{free / 2**30:.2f} GiB are free of the GPU's {total / 2**30:.2f} GiB"
    else:
        left = f"{available_memory_bytes() / 2**30:.2f} GiB are free on this machine"
    return f"trainer rank {rank} ran out of memory in {phase}: it tried to allocate {wanted}, but {left}; {remedy}"
