"""What a run's processes find in their environment, and which GPUs each may see. Pure, but for what it is given.

Nothing reaches the network for a model (`HF_HUB_OFFLINE`) or to report usage. Threads are the run file's, not the
number of cores: several processes share the machine, and one that takes every core slows all of them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def base_environment(threads: int, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The user's environment without a surrounding torchrun's, plus what every process of a run needs."""
    kept = {name: value for name, value in outer.items() if name not in _TORCHRUN}
    return kept | _OFFLINE | {"OMP_NUM_THREADS": str(threads)}


def replica_environment(threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """A generation replica's. `nobind`: vLLM would pin every replica's threads to the same cores, one a core."""
    return base_environment(threads) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | _visible(gpus)


def rank_environment(threads: int, rank: int, world_size: int, master_port: int, gpus: Sequence[str]) -> dict[str, str]:
    """A trainer rank's: torchrun's contract on one machine. Megatron's CPU path needs dynamo off."""
    return (
        base_environment(threads)
        | {"TORCHDYNAMO_DISABLE": "1"}
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        | {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}
        | _visible(gpus)
    )


def visible_gpus(outer: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """NVIDIA GPUs that the user lets us see, by their device files: no driver library is loaded for it."""
    chosen = outer.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        return tuple(gpu for gpu in chosen.split(",") if gpu)
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))


def deal_gpus(gpus: Sequence[str], wanted: Sequence[int]) -> list[tuple[str, ...]]:
    """Give each program as many GPUs as it wants, none twice while there are enough, round robin when not.

    No GPUs: everybody gets none, and computes on the CPU.
    """
    dealt: list[tuple[str, ...]] = []
    next_gpu = 0
    for count in wanted:
        dealt.append(tuple(gpus[(next_gpu + offset) % len(gpus)] for offset in range(count)) if gpus else ())
        next_gpu += count
    return dealt


def _visible(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
