"""What this machine has: memory that a process can use, GPUs and how they are dealt out, and units for bfloat16.

In a container the memory is at most the container's limit. The launcher reads it before a run, and engine and trainer
read it before they load a model. They raise MemoryTooSmall with what is too large. This module raises no errors but
RunInvalid for an old driver: a limit that cannot be read counts as none.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

import psutil

from specrl.errors import RunInvalid
from specrl.files import read_text

CGROUP = Path("/sys/fs/cgroup")
"""Folder of a container's own limits, with cgroup v2 and v1."""


INFINIBAND = Path("/sys/class/infiniband")
"""RDMA devices of this machine, also those of RoCE. NCCL registers memory with them, which locks it."""

CPU_INFO = Path("/proc/cpuinfo")
"""Linux's description of the CPUs. Other systems have no such file."""

OLDEST_DRIVER = 580
"""Major version of the oldest driver of CUDA 13, for which the packages of requirements/gpu.lock are built (CUDA 13.0
release notes, table 3)."""

DRIVER_FILE = Path("/proc/driver/nvidia/version")
SMI_TIMEOUT_S = 20
"""`nvidia-smi` takes up to ten seconds on a machine with eight GPUs whose driver is not kept loaded."""

DRIVER_VERSION = re.compile(r"\b(\d{3,4})\.\d+(?:\.\d+)?\b")

_CPU_INFO_BYTES = 16 << 20

# Names of CPU features, as Linux lists them: of x86 under `flags`, of ARM under `Features`.
_BFLOAT16_FEATURES = frozenset({"avx512_bf16", "amx_bf16", "bf16"})


@dataclass(frozen=True)
class _CgroupFiles:
    """Paths below CGROUP. cache: key in `stat` of the file cache that the kernel can drop at once."""

    limit: str
    usage: str
    stat: str
    cache: str


# From Linux's Documentation/admin-guide: cgroup-v2.rst, "Memory Interface Files", and cgroup-v1/memory.rst, section 5.
# Without a limit v2 has `max`, and v1 has the largest number of its counter.
_VERSIONS = (
    _CgroupFiles("memory.max", "memory.current", "memory.stat", "inactive_file"),
    _CgroupFiles(
        "memory/memory.limit_in_bytes",
        "memory/memory.usage_in_bytes",
        "memory/memory.stat",
        "total_inactive_file",
    ),
)


def available_memory_bytes(cgroup: Path | None = None) -> int:
    """Return the bytes that a process can allocate without swapping, on this machine and in this container.

    cgroup: folder of limits, for tests; None: CGROUP.
    """
    available = int(psutil.virtual_memory().available)
    # The files of the other cgroup version are missing, which counts as no limit.
    for files in _VERSIONS:
        limit = _read_number(cgroup or CGROUP, files.limit)
        if limit is not None:
            available = min(available, max(0, limit - _used_bytes(cgroup or CGROUP, files)))
    return available


def visible_gpus(outer: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> tuple[str, ...]:
    """Return the ids of the NVIDIA GPUs that the user lets us see.

    They are found by their device files, so that no driver library is loaded. In CUDA_VISIBLE_DEVICES a negative number
    ends the list, as for CUDA.
    """
    chosen = outer.get("CUDA_VISIBLE_DEVICES")
    if chosen is not None:
        ids = (gpu.strip() for gpu in chosen.split(","))
        return tuple(gpu for gpu in takewhile(lambda gpu: not gpu.startswith("-"), ids) if gpu)
    return tuple(str(number) for number in range(len(list(devices.glob("nvidia[0-9]*")))))


def assign_gpus(gpus: Sequence[str], wanted: Sequence[int]) -> list[tuple[str, ...]]:
    """Assign each program as many GPUs as it wants. Returns one tuple of GPU ids per program.

    No GPU is assigned twice while there are enough; otherwise they are assigned round robin. Without GPUs every program
    gets none and computes on the CPU.
    """
    dealt: list[tuple[str, ...]] = []
    next_gpu = 0
    for count in wanted:
        dealt.append(tuple(gpus[(next_gpu + offset) % len(gpus)] for offset in range(count)) if gpus else ())
        next_gpu += count
    return dealt


@dataclass(frozen=True)
class GpuMachine:
    """The GPUs that this process may use.

    visible: their ids, as in CUDA_VISIBLE_DEVICES. driver: its version, such as 580.95.05; empty if unknown.
    memory_bytes: of those that nvidia-smi lists, by id; None for one whose memory it does not know, because GPU and CPU
    share it. Without nvidia-smi the whole mapping is None.
    """

    visible: tuple[str, ...] = ()
    driver: str = ""
    memory_bytes: Mapping[str, int | None] | None = None


def read_driver_version(file: Path | None = None) -> str:
    """Return the version of NVIDIA's driver, such as 580.95.05; empty if it is not known. file: for tests."""
    try:
        found = DRIVER_VERSION.search((file or DRIVER_FILE).read_text(encoding="utf-8"))
    except OSError:
        return ""
    return found[0] if found else ""


def read_gpu_machine() -> GpuMachine:
    """Describe this machine's GPUs. Asks nothing if none is visible."""
    visible = visible_gpus()
    if not visible:
        return GpuMachine()
    listing = ask_nvidia_smi("--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits")
    memory = None if listing is None else read_memory(listing, visible)
    return GpuMachine(visible, read_driver_version(), memory)


def read_memory(listing: str, visible: Sequence[str]) -> dict[str, int | None]:
    """Read the memory of visible GPUs, in bytes, from lines of nvidia-smi: `index, uuid, MiB`. None: `[N/A]`.

    visible: indices, or UUIDs that may be cut short, as CUDA accepts them.
    """
    memory = dict[str, int | None]()
    for line in listing.splitlines():
        index, uuid, total = (part.strip() for part in line.split(","))
        for gpu in visible:
            if gpu == index or (gpu.startswith("GPU-") and uuid.startswith(gpu)):
                memory[gpu] = int(total) << 20 if total.isdigit() else None
    return memory


def is_old_driver(version: str) -> bool:
    """Whether a driver of this version, such as 580.95.05, is too old for CUDA 13."""
    return int(version.partition(".")[0]) < OLDEST_DRIVER


def require_driver() -> None:
    """Raise RunInvalid if this process has GPUs and the driver is too old. torch would say so only after minutes."""
    version = read_driver_version() if visible_gpus() else ""
    if version and is_old_driver(version):
        raise RunInvalid(
            f"NVIDIA's driver must be {OLDEST_DRIVER} or newer for CUDA 13, which torch and vLLM of specrl[gpu] are "
            f"built for, got {version}; install a newer one on this node"
        )


def ask_nvidia_smi(*arguments: str) -> str | None:
    """Run nvidia-smi and return what it prints. None if there is none, it fails, or it hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    try:
        done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True, timeout=SMI_TIMEOUT_S)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout


def has_rdma_devices(devices: Path = INFINIBAND) -> bool:
    """Whether the machine has RDMA devices."""
    return devices.is_dir() and any(devices.iterdir())


def locked_memory_limit() -> int | None:
    """Return the most bytes that this process may lock; None without a limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY else limit


def has_bfloat16_units(cpu_info: Path | None = None) -> bool:
    """Whether every CPU computes in bfloat16 itself. False if the system does not say.

    Without such units libraries emulate bfloat16, slowly and with errors of their own. cpu_info: for tests; None:
    CPU_INFO.
    """
    try:
        # Linux describes every core: 2 KB each, so hundreds exceed the usual limit of small files.
        lines = read_text(cpu_info or CPU_INFO, _CPU_INFO_BYTES).splitlines()
    except (OSError, ValueError):
        return False
    fields = [line.partition(":") for line in lines]
    features = [set(value.split()) for name, _, value in fields if name.strip() in ("flags", "Features")]
    return bool(features) and all(_BFLOAT16_FEATURES & found for found in features)


def _used_bytes(cgroup: Path, files: _CgroupFiles) -> int:
    """Return the bytes used of the limit, without droppable file cache: the kernel drops that before it refuses memory.

    psutil counts that cache as available, too. Kubelets subtract the same number.
    """
    usage = _read_number(cgroup, files.usage) or 0
    try:
        stat = dict(line.split(maxsplit=1) for line in read_text(cgroup / files.stat).splitlines())
        cache = int(stat[files.cache])
    except (OSError, ValueError, KeyError):
        cache = 0
    return max(0, usage - max(0, cache))


def _read_number(cgroup: Path, file: str) -> int | None:
    """Read a number >= 0 from a file. None for `max`, for other content, and for a file that cannot be read."""
    try:
        found = int(read_text(cgroup / file))
    except (OSError, ValueError):
        return None
    return found if found >= 0 else None
