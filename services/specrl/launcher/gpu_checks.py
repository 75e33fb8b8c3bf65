"""Checks a run against this machine's GPUs, and divides the memory of those that programs share. Starts nothing.

The launcher deals GPUs out in order, the trainer's ranks first (`machine.assign_gpus`). With fewer GPUs than ranks
of trainer and replicas together, some GPUs get several programs. Then each replica needs a fixed KV cache: vLLM would
otherwise measure what is free while the trainer is still loading. `share_gpus` chooses it from what the trainer's rank
and the replicas need. Called by preflight, before anything large is loaded, and before an active run is scaled up.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from specrl.drafting.registry import find_kind
from specrl.errors import MemoryTooSmall, SpecProblem
from specrl.generation.gpu_memory import MIB, check_kv_cache, estimate_replica_bytes
from specrl.generation.vllm_backend.preflight import find_expert_problems
from specrl.launcher.memory import format_gib
from specrl.machine import OLDEST_DRIVER, GpuMachine, assign_gpus, is_old_driver
from specrl.models import RunModels
from specrl.spec import RunSpec
from specrl.spec.run import Transport
from specrl.trainer.memory.estimate import estimate_rank_memory

TRAINER_CONTEXT_BYTES = 1 << 30
"""CUDA's context, libraries and fragmentation of a trainer's rank, which its estimate leaves out. An allowance."""

SMALLEST_KV_CACHE_MIB = 256
"""Smallest KV cache that is chosen: what a replica has on a CPU."""


def find_gpu_problems(spec: RunSpec, machine: GpuMachine) -> Iterator[SpecProblem]:
    """Yield what the GPUs of this machine cannot run, whatever the models are."""
    if not machine.visible:
        yield from find_expert_problems(spec, is_cpu=True)
        return
    yield from find_trainer_gpu_problems(spec, machine)
    yield from _find_missing_gpus("generation.tensorParallel", spec.generation.tensor_parallel, machine)
    count = len(machine.visible)
    ranks = sum(_list_wanted(spec))
    if spec.weights.transport is Transport.NCCL and ranks > count:
        yield SpecProblem(
            "weights.transport",
            f"must be Auto or Gloo unless trainer and replicas have a GPU for each rank, got Nccl for {ranks} ranks on "
            f"{count} GPUs",
            "use Auto, which takes Gloo there",
        )


def find_trainer_gpu_problems(spec: RunSpec, machine: GpuMachine) -> Iterator[SpecProblem]:
    """Yield what concerns a trainer alone, as of a supervised warm-up."""
    if machine.visible and machine.driver and is_old_driver(machine.driver):
        yield SpecProblem(
            "NVIDIA's driver",
            f"must be {OLDEST_DRIVER} or newer for CUDA 13, which torch and vLLM of specrl[gpu] are built for, got "
            f"{machine.driver}",
            'install a newer one, or set CUDA_VISIBLE_DEVICES="" to run on the CPU',
        )
    if machine.memory_bytes is not None:
        # nvidia-smi lists parts of a GPU (MIG) in another way.
        unknown = [it for it in machine.visible if it not in machine.memory_bytes and not it.startswith("MIG")]
        if unknown:
            yield SpecProblem(
                "CUDA_VISIBLE_DEVICES",
                f"must name GPUs of this machine, got {', '.join(unknown)}",
                "see `nvidia-smi --list-gpus`",
            )
    yield from _find_missing_gpus("trainer.parallelism", spec.trainer.parallelism.world_size, machine)


def _find_missing_gpus(field: str, ranks: int, machine: GpuMachine) -> Iterator[SpecProblem]:
    """Yield a problem if a program has more ranks than there are GPUs."""
    if machine.visible and ranks > len(machine.visible):
        yield SpecProblem(
            field,
            f"must have a GPU for each of its {ranks} ranks, got {len(machine.visible)} visible: "
            f"{', '.join(machine.visible)}",
            "lower it, or make more GPUs visible by CUDA_VISIBLE_DEVICES",
        )


@dataclass(frozen=True)
class GpuNeed:
    """The needs of a run's ranks on the GPUs, in bytes.

    gpus: those that the launcher deals out. card_bytes: memory of the smallest. trainer_bytes: of a trainer's rank.
    replica_bytes: of a replica's rank, without its KV cache.
    """

    gpus: tuple[str, ...]
    card_bytes: int
    trainer_bytes: int
    replica_bytes: int


def estimate_gpu_need(spec: RunSpec, models: RunModels, machine: GpuMachine) -> GpuNeed | None:
    """Estimate what the ranks need. None: a model or the GPUs' memory is unknown, or gpuMemoryUtilization is given."""
    policy = models.policy
    known = [size for size in (machine.memory_bytes or {}).values() if size is not None]
    if policy is None or models.policy_config is None or not known:
        return None
    if spec.generation.gpu_memory_utilization is not None:
        return None
    return GpuNeed(
        machine.visible,
        card_bytes=min(known),
        trainer_bytes=int(estimate_rank_memory(spec, models).most + TRAINER_CONTEXT_BYTES),
        replica_bytes=estimate_replica_bytes(spec, policy, _count_drafter(spec, models)),
    )


def share_gpus(spec: RunSpec, need: GpuNeed) -> RunSpec:
    """Return the run with a KV cache for GPUs that its programs share. A run that needs none is returned unchanged.

    Raises MemoryTooSmall if the programs do not fit, also for a KV cache that the run file gives.
    """
    gpu = _find_fullest_gpu(spec, need)
    if gpu is not None:
        chosen = spec.generation.kv_cache_mib or SMALLEST_KV_CACHE_MIB
        if chosen * MIB > gpu.room_bytes:
            raise MemoryTooSmall(
                f"{_describe_shortage(gpu, need, chosen)}; lower generation.kvCacheMib or replicas, set trainer.lora "
                "or trainer.recompute: Layers, use a smaller model, or more GPUs"
            )
        if spec.generation.kv_cache_mib is None:
            generation = spec.generation.model_copy(update={"kv_cache_mib": gpu.room_bytes // MIB})
            return spec.model_copy(update={"generation": generation})
    check_kv_cache(spec, need.replica_bytes, need.card_bytes)
    return spec


def check_scaling(spec: RunSpec, need: GpuNeed) -> None:
    """Raise MemoryTooSmall if the GPUs of an active run cannot hold more replicas. spec: with the wanted number.

    The replicas that run keep their KV cache. A resumed run can choose a smaller one, if that is enough.
    """
    gpu = _find_fullest_gpu(spec, need)
    replicas = spec.generation.replicas
    cache_mib = spec.generation.kv_cache_mib
    if gpu is None or (cache_mib is not None and cache_mib * MIB <= gpu.room_bytes):
        return
    if gpu.room_bytes < SMALLEST_KV_CACHE_MIB * MIB:
        reason = _describe_shortage(gpu, need, SMALLEST_KV_CACHE_MIB)
        remedy = "scale to fewer replicas, or resume the run with more GPUs"
    else:
        reason = "without generation.kvCacheMib each replica takes a whole GPU"
        if cache_mib is not None:
            reason = _describe_shortage(gpu, need, cache_mib)
        remedy = (
            f"stop the run, and resume it with `--set generation.replicas={replicas} "
            "--set generation.kvCacheMib=null`, which chooses a KV cache for so many"
        )
    raise MemoryTooSmall(
        f"generation.replicas must be a number that fits the GPUs beside what runs, got {replicas} ({reason}); {remedy}"
    )


@dataclass(frozen=True)
class _SharedGpu:
    """A GPU of several ranks: of the trainer, and of replicas. room_bytes: for the KV cache of each replica's rank."""

    trainers: int
    replicas: int
    room_bytes: int


def _find_fullest_gpu(spec: RunSpec, need: GpuNeed) -> _SharedGpu | None:
    """Find the GPU with the least room for a KV cache. None: no GPU with a replica's rank is shared."""
    counts = count_programs(spec, need.gpus)
    if not counts - {(0, 1)}:
        return None
    found: list[_SharedGpu] = []
    for trainers, replicas in counts:
        share = (need.card_bytes - trainers * need.trainer_bytes) // replicas
        found.append(_SharedGpu(trainers, replicas, share - need.replica_bytes))
    # All replicas have the same KV cache, so that it must fit this GPU.
    return min(found, key=lambda gpu: gpu.room_bytes)


def _describe_shortage(gpu: _SharedGpu, need: GpuNeed, cache_mib: int) -> str:
    """Say in numbers why a KV cache of this size does not fit the GPU."""
    programs = f"{'a trainer rank and ' if gpu.trainers else ''}{gpu.replicas} generation ranks"
    of_trainer = gpu.trainers * need.trainer_bytes
    needed = of_trainer + gpu.replicas * (need.replica_bytes + cache_mib * MIB)
    return (
        f"a GPU that {programs} share must have {format_gib(needed)} ({format_gib(of_trainer)} for the trainer; for "
        f"each generation rank {format_gib(need.replica_bytes)} and a KV cache of {cache_mib} MiB), got "
        f"{format_gib(need.card_bytes)}"
    )


def count_programs(spec: RunSpec, gpus: Sequence[str]) -> set[tuple[int, int]]:
    """Count the ranks on each GPU that has a replica's: of the trainer, and of replicas. Equal GPUs are listed once.

    gpus: those that the launcher deals out.
    """
    trainer, *replicas = assign_gpus(gpus, _list_wanted(spec))
    dealt = Counter(gpu for replica in replicas for gpu in replica)
    return {(trainer.count(gpu), count) for gpu, count in dealt.items()}


def _count_drafter(spec: RunSpec, models: RunModels) -> int:
    """Count the parameters of a drafter that a replica holds beside the policy."""
    kind = find_kind(spec)
    if kind is not None:
        return kind.count_parameters(spec, models)
    return models.draft_model.num_parameters if models.draft_model is not None else 0


def _list_wanted(spec: RunSpec) -> list[int]:
    """List how many GPUs each program wants, in the order in which they are dealt out."""
    return [spec.trainer.parallelism.world_size, *[spec.generation.tensor_parallel] * spec.generation.replicas]
