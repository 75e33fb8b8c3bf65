"""Checks everything that could end a run before anything is written or started, and reports all problems at once.

    fetch_run_sources(spec)            fetches what the run names on the hub
    models = read_models(spec)         reads each model folder once
    package.check(spec, models)        every package checks what only it knows
    ports, data, memory                what a launch chooses or learns on the way

Each process repeats the checks that concern it. Preflight exists so that a user learns of a mistake within seconds.
Called by `launcher.launch` and by `specrl spec check --preflight`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from specrl import agent_tools, models, prompts, rewards
from specrl.coordinator import preflight as coordinator
from specrl.coordinator.ledger import open_store_reader
from specrl.coordinator.ledger.ledger import DurableFacts
from specrl.coordinator.ledger.run_inputs import check_run_file, compare_inputs
from specrl.coordinator.rollouts.checked_prompts import (
    CheckedPrompts,
    ProgressCallback,
    ReferenceDecision,
    load_checked_prompts,
)
from specrl.drafting import preflight as drafting
from specrl.errors import CheckpointInvalid, MemoryTooSmall, SpecProblem, collect_problems, raise_problems
from specrl.generation.vllm_backend import preflight as generation
from specrl.hub import FetchedSource, fetch_run_sources, read_sources
from specrl.hub.fetching import NO_DISPLAY, FetchDisplay
from specrl.installation import require_engines
from specrl.launcher.disk import DiskNeed, estimate_disk
from specrl.launcher.gpu_checks import GpuNeed, estimate_gpu_need, find_gpu_problems, share_gpus
from specrl.launcher.memory import MemoryNeed, check_memory, estimate_memory, format_gib
from specrl.launcher.processes.ports import choose_ports
from specrl.machine import available_memory_bytes, read_gpu_machine, visible_gpus
from specrl.models import read_models
from specrl.models.model_folder import has_chat_template
from specrl.models.native_heads import list_head_notices
from specrl.models.precision import describe_dtype, list_dtype_notices, resolve_dtype
from specrl.models.sampling_defaults import list_sampling_notices
from specrl.spec import RunSpec, read_spec
from specrl.spec.data import PromptFormat
from specrl.spec.run import Transport
from specrl.telemetry import traces
from specrl.trainer import preflight as trainer
from specrl.trainer.checkpointing import checkpoints

PACKAGES = (models, generation, drafting, trainer, traces, prompts, rewards, agent_tools, coordinator)
"""Packages with a `check(spec, models)`, in the order of the sections of a run file."""


SOCKET_NAME = "specrl-"
LONGEST_SOCKET_NAME = 36
"""vLLM 0.32 names its sockets by a UUID of 36 letters. Those of multiprocessing (`pymp-xxxxxxxx/listener-xxxxxxxx`) are
shorter."""


@dataclass
class PreflightResult:
    """The choices of preflight for this launch: precision, ports, references to leave out, and notices for the user.

    spec: the run with its precision chosen, with a KV cache for GPUs that its programs share, and with folders in place
    of names on the hub. precision: that choice in words. sources: what was fetched for the names.
    data: the run's prompts; None if a problem was found. memory_need: None with GPUs. available_bytes: 0 with GPUs.
    gpu_need: None without GPUs, with generation.gpuMemoryUtilization, and if the memory of the GPUs is not known.
    disk_need: the caller compares it with the disk of the run's folder. None if the policy could not be read.
    """

    spec: RunSpec
    precision: str
    sources: tuple[FetchedSource, ...] = ()
    grpc_port: int = 0
    http_port: int = 0
    decision: ReferenceDecision = field(default_factory=lambda: ReferenceDecision("", {}))
    notices: tuple[str, ...] = ()
    data: CheckedPrompts | None = None
    memory_need: MemoryNeed | None = None
    gpu_need: GpuNeed | None = None
    disk_need: DiskNeed | None = None
    available_bytes: int = 0


def ignore_progress(_done: int, _total: int) -> None:
    """Discard the progress of the reference check."""


def load_run(file: Path | Mapping[str, Any], overrides: Sequence[str]) -> RunSpec:
    """Read the run file of a run that `check_run` will be called for. file: its path, or its content.

    Raises SpecInvalid. With malformed fields it lists all of them. When every field parses but a rule is broken, it
    lists all broken rules and everything that `check_run` would find.
    """
    spec, broken = read_spec(file, overrides)
    if broken:
        problems = [*broken]
        with collect_problems(problems):
            check_run(spec)
        raise_problems(problems)
    return spec


def check_run(
    spec: RunSpec,
    directory: Path | None = None,
    progress: ProgressCallback = ignore_progress,
    available_bytes: Callable[[], int] = available_memory_bytes,
    display: FetchDisplay = NO_DISPLAY,
) -> PreflightResult:
    """Check the run on this machine and return what the checks chose. Raises SpecInvalid with every problem.

    What the run names on the hub is fetched first. directory: of a run that is resumed. display: shows the fetching.
    """
    problems = list[SpecProblem]()
    known = read_sources(directory) if directory is not None else ()
    precision = describe_dtype(spec)
    fetched = fetch_run_sources(
        resolve_dtype(spec), known, display, partial(check_model_before_weights, available_bytes)
    )
    problems += fetched.problems
    spec = fetched.spec
    ready = PreflightResult(spec, precision, fetched.sources)
    found = read_models(spec)
    with collect_problems(problems):
        require_engines("torch", "megatron", "vllm")
    # Each check copes with models that could not be read, so that one run of the command reports everything.
    findings = {package: package.check(spec, found) for package in PACKAGES}
    problems += [problem for package in PACKAGES for problem in findings[package]]
    problems += [*_find_transport_problems(spec), *find_socket_problems(Path(tempfile.gettempdir()))]
    with collect_problems(problems):
        ready.grpc_port, ready.http_port = choose_ports(spec)
    with collect_problems(problems):
        if fetched.problems:
            pass  # the data may be among what could not be fetched
        elif found.policy is None or found.policy.vocabulary is None or findings[prompts]:
            prompts.open_sources(spec)  # the data can be read, though not tokenized, without a tokenizer
        else:
            data = check_data(spec, directory, progress, tries_verifier=not findings[rewards])
            ready.data = data
            ready.decision = data.decision
            ready.notices = (*list_data_notices(data), *list_function_notices(spec, directory, data))
            ready.notices += tuple(list_batch_notices(spec, len(data.stream)))
    ready.notices = (*fetched.notices, *ready.notices)
    ready.notices += tuple(list_dtype_notices(spec))
    if found.policy is not None:
        ready.notices += tuple(list_head_notices(spec, found.policy))
        ready.notices += tuple(list_sampling_notices(spec, found.policy.path))
    machine = read_gpu_machine()
    problems += find_gpu_problems(spec, machine)
    with collect_problems(problems):
        ready.gpu_need = estimate_gpu_need(spec, found, machine)
        if ready.gpu_need is not None:
            ready.spec = share_gpus(spec, ready.gpu_need)
        if ready.spec is not spec:
            ready.notices += (f"generation.kvCacheMib is {ready.spec.generation.kv_cache_mib}: programs share a GPU",)
    if found.policy is not None:
        saved = len(checkpoints.list_complete(directory)) if directory is not None else 0
        ready.disk_need = estimate_disk(spec, found, saved)
    if not visible_gpus() and found.policy is not None and found.policy_config is not None:
        # Only for CPUs. With GPUs most of the need is GPU memory, see `gpu_need`.
        need = estimate_memory(spec, found)
        ready.memory_need = need
        ready.available_bytes = available_bytes()
        with collect_problems(problems):
            check_memory(need, ready.available_bytes)
    raise_problems(problems)
    return ready


def check_model_before_weights(available_bytes: Callable[[], int], spec: RunSpec, folder: Path, size: int) -> None:
    """Check what the small files of a model tell, before its weights are fetched. size: of the weights, in bytes.

    Raises CheckpointInvalid without the chat template that the prompts need, and MemoryTooSmall on CPUs.
    """
    if spec.prompts.format is PromptFormat.CHAT and not has_chat_template(folder):
        raise CheckpointInvalid(
            f"{spec.model.path}: must have a chat template for prompts.format Chat, got none; use Raw, or the model's "
            "instruct version"
        )
    # A trainer and a replica each hold the weights, so this is far less than a run needs. `check_memory` knows more.
    if not visible_gpus() and size > available_bytes():
        raise MemoryTooSmall(
            f"{spec.model.path} must fit into the memory, got {format_gib(size)} of weights for "
            f"{format_gib(available_bytes())}; use a smaller model, or a machine with more memory"
        )


def _find_transport_problems(spec: RunSpec) -> Iterator[SpecProblem]:
    """Report NCCL on a machine without GPUs. The cluster rules report it for an RLJob."""
    if spec.weights.transport is Transport.NCCL and not visible_gpus():
        allowed = ", ".join(transport for transport in Transport if transport is not Transport.NCCL)
        yield SpecProblem(
            "weights.transport", f"must be one of {allowed} on a machine without GPUs, got Nccl", "use Auto"
        )


def find_socket_problems(scratch: Path) -> Iterator[SpecProblem]:
    """Report a folder for scratch files in which the run's processes cannot open their sockets.

    vLLM and multiprocessing open Unix sockets there, whose paths may have 107 bytes on Linux.
    """
    path = scratch / f"{SOCKET_NAME}{os.getpid()}".ljust(LONGEST_SOCKET_NAME, "x")
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
    except OSError as error:
        reason = f"{error}; its path has {len(os.fsencode(scratch))} bytes"
        rule = f"must be a folder in which sockets can be opened, got {scratch}: {reason}"
        yield SpecProblem("TMPDIR", rule, "set it to a folder with a short path, such as /tmp")
    finally:
        path.unlink(missing_ok=True)


def check_data(
    spec: RunSpec, directory: Path | None, progress: ProgressCallback, *, tries_verifier: bool
) -> CheckedPrompts:
    """Check that every problem can be read and fits, and that the verifier can use every reference.

    directory: of the run, if it has one. progress: called with the numbers of references checked and in total.
    The findings are stored for the next start. Without them, a check takes one or two seconds per thousand references
    (`math`) or per hundred (`code`). Raises DatasetInvalid with file and line, and SpecInvalid or VerifierFailed for
    the verifier.
    """
    # No engine runs yet, so the check may use every core, even if the run's own pool is smaller.
    workers = max(spec.reward_pool.workers, len(os.sched_getaffinity(0)))
    return asyncio.run(load_checked_prompts(spec, directory, progress, workers=workers, tries_verifier=tries_verifier))


def list_function_notices(spec: RunSpec, directory: Path | None, data: CheckedPrompts) -> Iterator[str]:
    """Compare what a resumed run is made from with what it began with, and yield what has changed and may have.

    directory: of the run; None for a new one. Raises RunInvalid for another run file or other data. Only a store in the
    run's folder is read: of a run on Redis, the coordinator compares.
    """
    if directory is None or not _has_store_here(spec, directory):
        return
    with closing(open_store_reader(spec, directory)) as store:
        before = DurableFacts.from_stored(store.read_facts()).inputs
        next_step = store.read_last_trained_step() + 1
    _, notice = compare_inputs(before, spec, data.stream.identify_sources(), data.validation, next_step)
    if notice:
        yield notice


def check_finished_run(spec: RunSpec, directory: Path, command: str) -> None:
    """Raise RunInvalid if the run file was edited after the run began: a finished run would ignore the edit.

    command: goes on in a new run with the edited file. Only a store in the run's folder is read.
    """
    if _has_store_here(spec, directory):
        with closing(open_store_reader(spec, directory)) as store:
            check_run_file(DurableFacts.from_stored(store.read_facts()).inputs, spec, command)


def _has_store_here(spec: RunSpec, directory: Path) -> bool:
    return spec.redis is None and (directory / "store.db").exists()


def list_batch_notices(spec: RunSpec, problems: int) -> Iterator[str]:
    """Yield that a step takes problems more than once. problems: number of those that the run trains on."""
    prompts = spec.schedule.prompts_per_step
    if prompts > problems:
        yield (
            f"schedule.promptsPerStep is {prompts}, and there are {problems} problems: a step trains on some of them "
            "more than once; lower it, or add problems"
        )


def list_data_notices(data: CheckedPrompts) -> Iterator[str]:
    """Yield what a user should know about data and a verifier that are used despite it."""
    for found in data.sources:
        if len(found.skipped) == 1:
            yield f"1 problem is left out (onBadLine: Skip): {found.skipped[0]}"
        elif found.skipped:
            yield f"{len(found.skipped)} problems are left out (onBadLine: Skip); the first is {found.skipped[0]}"
        if found.repeated == 1:
            yield f"{found.name}: 1 problem repeats the question of an earlier one; each is sampled as its own prompt"
        elif found.repeated:
            yield (
                f"{found.name}: {found.repeated} problems repeat the question of an earlier one; each is sampled as "
                "its own prompt"
            )
    if data.untried:
        references = "1 reference" if data.untried == 1 else f"{data.untried} references"
        yield f"{references} could not be tried on this machine; the run assumes that all are usable"
    yield from data.failures
