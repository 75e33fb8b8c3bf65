"""The environment variables of a run's processes.

Models are never downloaded (`HF_HUB_OFFLINE`) and usage is never reported. The run file sets the number of threads. It
is not the number of cores, because several processes share the machine, and one that takes every core slows down all
others. Called by `programs`, by the warm-up and by commands that start engines or trainers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "PYTHONUNBUFFERED": "1",
}
# Of a trainer; the user's own settings win. Megatron's CPU path needs dynamo off.
_ON_CPUS = {"TORCHDYNAMO_DISABLE": "1"}
# Micro-batches have other sizes in every step. Without expandable segments the allocator keeps blocks of all of them,
# and runs out of memory while much of it is unused (torch.cuda, "Optimizing memory usage").
_ON_GPUS = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
# Set by a torchrun around the launcher; a run's processes must not believe that they are its ranks.
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def base_environment(threads: int, outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the user's environment without the variables of a surrounding torchrun, plus what every process needs."""
    kept = {name: value for name, value in outer.items() if name not in _TORCHRUN}
    return kept | _OFFLINE | {"OMP_NUM_THREADS": str(threads)}


def replica_environment(threads: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a generation replica."""
    # By default vLLM pins the threads of every replica to the same cores, one thread per core.
    return base_environment(threads) | {"VLLM_CPU_OMP_THREADS_BIND": "nobind"} | _gpu_variables(gpus)


def rank_environment(threads: int, rank: int, world_size: int, master_port: int, gpus: Sequence[str]) -> dict[str, str]:
    """Return the environment of a trainer rank: torchrun's variables for one machine."""
    return (
        (_ON_GPUS if gpus else _ON_CPUS)
        | base_environment(threads)
        | {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
        | {"LOCAL_WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(master_port)}
        | _gpu_variables(gpus)
    )


def _gpu_variables(gpus: Sequence[str]) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else {}
