"""Probes of `specrl doctor` for the machine around a run: memory, limits, folders, sockets, ports and the sandbox."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specrl.errors import SpecInvalid
from specrl.files import cache_folder
from specrl.formats.doctor_report import Finding, FindingState
from specrl.launcher.memory import format_gib
from specrl.launcher.preflight import find_socket_problems
from specrl.launcher.processes.ports import PORT_RANGE, find_free_port
from specrl.machine import (
    INFINIBAND,
    available_memory_bytes,
    has_bfloat16_units,
    has_rdma_devices,
    locked_memory_limit,
    visible_gpus,
)
from specrl.rewards.code.machine_check import settle_isolation
from specrl.rewards.code.sandbox_runner import SandboxOptions
from specrl.spec.data import CodeVerifier, Isolation

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - looked at, not written
SHARED_MEMORY_BYTES = 1 << 30
"""NCCL's troubleshooting page asks for 1 GiB in containers. Docker gives 64 MiB."""

ROOMY_DISK_BYTES = 8 << 30
"""Free disk of the demo (docs/install.md). Checkpoints of larger policies need more: 14 bytes a parameter."""


def probe_machine() -> Iterator[Finding]:
    """Yield the processors and the memory that a process can still allocate, within a container's limit."""
    cores = len(os.sched_getaffinity(0))
    units = "with" if has_bfloat16_units() else "without"
    yield Finding(name="processors", state=FindingState.OK, value=f"{cores}, {units} units for bfloat16")
    yield Finding(name="memory", state=FindingState.OK, value=f"{format_gib(available_memory_bytes())} available")


def probe_locked_memory(devices: Path = INFINIBAND) -> Iterator[Finding]:
    """Yield the limit of locked memory. NCCL over InfiniBand needs it unlimited. devices: for tests."""
    limit = locked_memory_limit()
    if limit is None:
        yield Finding(name="locked memory", state=FindingState.OK, value="unlimited")
    elif has_rdma_devices(devices) and visible_gpus():
        remedy = "set `ulimit -l unlimited`, in Kubernetes for the container runtime; NCCL over RDMA may fail otherwise"
        value = f"limited to {limit >> 10} KiB, with RDMA devices"
        yield Finding(name="locked memory", state=FindingState.WARNING, value=value, remedy=remedy)
    else:
        value = f"limited to {limit >> 10} KiB; only NCCL over RDMA needs more"
        yield Finding(name="locked memory", state=FindingState.OK, value=value)


def probe_shared_memory(folder: Path = SHARED_MEMORY) -> Iterator[Finding]:
    """Yield the free shared memory, which NCCL and vLLM's processes use. folder: for tests."""
    if not folder.is_dir():
        remedy = "mount a tmpfs there: NCCL and vLLM's processes share memory by it"
        yield Finding(name="shared memory", state=FindingState.WARNING, value=f"no {folder}", remedy=remedy)
        return
    free = shutil.disk_usage(folder).free
    yield judge_shared_memory(folder, free)


def judge_shared_memory(folder: Path, free: int) -> Finding:
    """Compare the free bytes of the folder with what NCCL needs."""
    value = f"{format_gib(free)} free in {folder}"
    if free >= SHARED_MEMORY_BYTES:
        return Finding(name="shared memory", state=FindingState.OK, value=value)
    remedy = "give the container 1 GiB or more: `docker run --shm-size=1g`, or an emptyDir with medium: Memory"
    return Finding(name="shared memory", state=FindingState.WARNING, value=value, remedy=remedy)


def probe_disk(runs: Path) -> Iterator[Finding]:
    """Yield the free disk of the cache and of the folder of runs."""
    for name, folder in (("cache", cache_folder()), ("runs", runs)):
        yield judge_folder(name, folder.absolute())


def judge_folder(name: str, folder: Path) -> Finding:
    """Look at a folder, or at the nearest parent that exists: can files be made there, and how large?"""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        variable = "set SPECRL_CACHE_DIR to another folder" if name == "cache" else "name another folder with --runs"
        value = f"files cannot be made in {place}"
        return Finding(name=f"{name} folder", state=FindingState.PROBLEM, value=value, remedy=variable)
    free = shutil.disk_usage(place).free
    value = f"{format_gib(free)} free for {folder}"
    if free >= ROOMY_DISK_BYTES:
        return Finding(name=f"{name} folder", state=FindingState.OK, value=value)
    remedy = f"make room: the demo alone needs {format_gib(ROOMY_DISK_BYTES)}"
    return Finding(name=f"{name} folder", state=FindingState.WARNING, value=value, remedy=remedy)


def probe_sockets() -> Iterator[Finding]:
    """Yield whether the processes of a run can open Unix sockets in the folder of scratch files."""
    scratch = Path(tempfile.gettempdir())
    problems = list(find_socket_problems(scratch))
    for problem in problems:
        yield Finding(name="sockets", state=FindingState.PROBLEM, value=problem.rule, remedy=problem.remedy)
    if not problems:
        yield Finding(name="sockets", state=FindingState.OK, value=f"can be opened in {scratch}")


def probe_ports() -> Iterator[Finding]:
    """Yield whether a port can be bound; raises PortTaken if not."""
    find_free_port()
    value = f"can be bound on 127.0.0.1, from {PORT_RANGE.start} to {PORT_RANGE.stop - 1}"
    yield Finding(name="ports", state=FindingState.OK, value=value)


def probe_sandbox() -> Iterator[Finding]:
    """Yield the isolation that programs of answers and tools would run in, after running a trial program."""
    options = SandboxOptions.from_section(CodeVerifier(), "rewards.code")
    try:
        chosen = settle_isolation(options)
    except SpecInvalid as error:
        remedy = "; ".join(problem.remedy for problem in error.problems)
        value = "; ".join(problem.rule for problem in error.problems)
        yield Finding(name="sandbox", state=FindingState.WARNING, value=value, remedy=remedy)
        return
    if chosen.limits.isolation is Isolation.NAMESPACES:
        yield Finding(name="sandbox", state=FindingState.OK, value="Namespaces")
        return
    value = f"Landlock, the weaker isolation: {chosen.weaker_because}"
    remedy = "permit user namespaces (docs/sandbox.md), if runs grade programs or use the code tool"
    yield Finding(name="sandbox", state=FindingState.WARNING, value=value, remedy=remedy)
