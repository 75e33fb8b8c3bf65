"""What every node of a replica does before vLLM starts: check folders and memory, make a head, build the configuration.

All nodes of a replica do the same from the same run file, and so come to the same configuration; an untrained head is
drawn from the run's seed.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specrl.errors import CheckpointInvalid
from specrl.generation.nodes import Nodes
from specrl.generation.vllm_backend import arguments, checkpoint, mechanisms, memory
from specrl.generation.vllm_backend.checkpoint import EngineModel
from specrl.machine import available_memory_bytes
from specrl.seams.versions import check_versions
from specrl.spec import RunSpec


@dataclass(frozen=True)
class Folders:
    """The models that a replica computes with.

    head: of EAGLE-3, what an update holds beside the policy. scratch: removed by `clear`.
    """

    policy: EngineModel
    head: EngineModel | None = None
    draft_model: EngineModel | None = None
    scratch: Path | None = None

    @property
    def drafter(self) -> EngineModel | None:
        """The folder that drafts are made from, where it is not the policy's."""
        return self.head or self.draft_model

    def clear(self) -> None:
        """Remove what was made here."""
        if self.scratch is not None:
            shutil.rmtree(self.scratch, ignore_errors=True)


def read_folders(spec: RunSpec) -> Folders:
    """Check the run's mechanism and models; write an untrained head where the run has none.

    The first thing that an engine does, so it refuses versions of vLLM and torch that were not read. Raises RunInvalid,
    SpecInvalid or CheckpointInvalid.
    """
    check_versions("vllm", "torch")
    mechanisms.check_mechanism(spec, mechanisms.surroundings())
    policy = checkpoint.read_policy(Path(spec.model.path), spec.model.max_length)
    draft_model = mechanisms.drafting_model(spec, policy)
    eagle3 = spec.generation.speculation.eagle3
    if eagle3 is None:
        return Folders(policy, draft_model=draft_model)
    if eagle3.path is not None:
        return Folders(policy, checkpoint.read_head(Path(eagle3.path), policy), draft_model)
    from specrl.drafting.head import write_untrained

    scratch = Path(tempfile.mkdtemp(prefix="specrl-head-"))
    try:
        write_untrained(scratch, policy.path, eagle3, spec.schedule.seed)
        return Folders(policy, checkpoint.read_head(scratch, policy), draft_model, scratch)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise


def configure(spec: RunSpec, folders: Folders, nodes: Nodes) -> Any:
    """vLLM's configuration for one of the replica's nodes. Sets the process's environment first.

    Raises CheckpointInvalid when vLLM refuses it, MemoryTooSmall.
    """
    os.environ.update(arguments.environment(spec, nodes))
    from vllm import AsyncEngineArgs
    from vllm.platforms import current_platform

    is_cpu = bool(current_platform.is_cpu())
    os.environ.update(arguments.eager_environment(spec, is_cpu))
    if is_cpu:
        _check_memory(spec, folders)
    drafter = folders.drafter.path if folders.drafter else None
    keywords = arguments.engine_arguments(spec, drafter, is_cpu, nodes)
    try:
        config = AsyncEngineArgs(**keywords).create_engine_config(headless=not nodes.is_leader)
    except Exception as error:  # vLLM checks in many places and raises many types
        raise CheckpointInvalid(
            f"vLLM must accept {folders.policy.path} as the run file asks, got {type(error).__name__}: {error}; "
            "change the run file or the model"
        ) from error
    if is_cpu and spec.generation.tensor_parallel == 1:
        # vLLM 0.32 starts a worker process on CPUs only to set its OpenMP threads; `environment` has set them
        # already, and the process would cost 1 GB and ten seconds of imports.
        config.parallel_config.distributed_executor_backend = "uni"
    arguments.check_graph_coverage(spec, config.compilation_config.max_cudagraph_capture_size, is_cpu)
    return config


def _check_memory(spec: RunSpec, folders: Folders) -> None:
    dtype = spec.model.dtype.value
    weights = folders.policy.weight_bytes(dtype) + (folders.drafter.weight_bytes(dtype) if folders.drafter else 0)
    kv_cache = arguments.kv_cache_bytes(spec, is_cpu=True) or 0
    memory.check(memory.needed_bytes(weights, kv_cache), available_memory_bytes())
