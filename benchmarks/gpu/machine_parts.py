"""Parts about the machine and the weight update: versions, copies, checksums, locked memory."""

from __future__ import annotations

import ctypes
import mmap
import platform
import time
from collections.abc import Callable, Mapping
from typing import Any

import structlog
import torch
from benchmarks.gpu.part import Figures, Size, find_bad_rate
from benchmarks.weight_sync import collective, some_tensors

from specrl.launcher.doctor.gpus import probe_driver
from specrl.launcher.doctor.software import probe_engines
from specrl.machine import has_rdma_devices, locked_memory_limit
from specrl.weights.group import warn_about_locked_memory
from specrl.weights.staging import StagingArea, checksum_bytes


def measure_versions(_size: Size) -> Figures:
    """Read versions of the packages, the driver and the card. Another torch than the lock's is said, not refused."""
    (driver,) = probe_driver()
    found = {finding.name: finding.value for finding in probe_engines()}
    notices = [f"{it.name} {it.value}: {it.remedy}" for it in probe_engines() if it.remedy]
    is_cuda = torch.cuda.is_available()
    return {
        **found,
        "python": platform.python_version(),
        "torchBuild": torch.__version__,
        "cuda": torch.version.cuda if is_cuda else None,
        "cards": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())],
        "driver": driver.value,
        "driverState": driver.state.value,
        "notices": notices,
    }


def find_versions_fault(figures: Mapping[str, Any]) -> str | None:
    """The driver must be new enough."""
    state = figures["driverState"]
    return f"driver must be 580 or newer, got {figures['driver']}" if state == "problem" else None


def measure_copies(size: Size) -> Figures:
    """Measure GB/s of each part of a weight update on this host: staging, checksum, copies, pinned and not."""
    size_bytes = size.choose(1024, 64, 8) << 20
    manifest, tensors = some_tensors(size_bytes)
    started = time.perf_counter()
    area = StagingArea(manifest)
    for number in area.bucket_numbers:
        area.bucket_memory(number).zero_()  # touches every page for the first time
    found = {"stagingGbS": size_bytes / (time.perf_counter() - started) / 1e9}
    flat = torch.cat([tensor.reshape(-1).view(torch.uint8) for _, tensor in tensors])
    found["checksumGbS"] = _measure_rate(size_bytes, lambda: checksum_bytes(flat))
    host = torch.empty_like(flat)
    if torch.cuda.is_available():
        card = flat.cuda()
        pinned = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True)
        found["toHostPageableGbS"] = _measure_rate(size_bytes, lambda: host.copy_(card))
        found["toHostPinnedGbS"] = _measure_rate(size_bytes, lambda: pinned.copy_(card))
        found["toCardPinnedGbS"] = _measure_rate(size_bytes, lambda: card.copy_(pinned))
        arrived = card.cpu()
    else:
        found["copyGbS"] = _measure_rate(size_bytes, lambda: host.copy_(flat))
        arrived = host
    return {**found, "isEqual": checksum_bytes(arrived) == checksum_bytes(flat)}


def _measure_rate(size_bytes: int, call: Callable[[], object]) -> float:
    """Return GB/s of the second call, with the card's work finished."""
    call()
    synchronize = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    synchronize()
    started = time.perf_counter()
    call()
    synchronize()
    return size_bytes / (time.perf_counter() - started) / 1e9


def find_copies_fault(figures: Mapping[str, Any]) -> str | None:
    """What arrived must be what was sent."""
    bad = find_bad_rate(figures, *(name for name in figures if name.endswith("GbS")))
    return bad or (None if figures["isEqual"] else "copied bytes must be those of the source, got another checksum")


def measure_broadcast(size: Size) -> Figures:
    """Measure a version's broadcast to one process over Gloo, checksums included; both ends compare them."""
    row = collective("collective", size.choose(512, 64, 8) << 20, 1, size.choose(3, 2, 1))
    return {"glooGbS": row.rate(min(row.seconds))}


def find_broadcast_fault(figures: Mapping[str, Any]) -> str | None:
    """The rate must be one."""
    return find_bad_rate(figures, "glooGbS")


def measure_locked_memory(size: Size) -> Figures:
    """Read the limit of locked memory, lock as much as a bucket of weights, and pin as much on a GPU (A15).

    NCCL over RDMA registers buffers, which the limit bounds as it bounds mlock. Pinning for the GPU is not bounded.
    """
    size_bytes = size.choose(64, 8, 1) << 20
    with structlog.testing.capture_logs() as logs:
        warn_about_locked_memory()
    found: Figures = {
        "limitBytes": locked_memory_limit(),
        "hasRdma": has_rdma_devices(),
        "isWarned": [entry["event"] for entry in logs] == ["locked_memory_limited"],
        "bucketBytes": size_bytes,
        "canLockBucket": _can_lock(size_bytes),
    }
    if torch.cuda.is_available():
        found["isPinned"] = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=True).is_pinned()
    return found


def _can_lock(size_bytes: int) -> bool:
    """Lock memory as `ibv_reg_mr` would, and unlock it."""
    memory = mmap.mmap(-1, size_bytes)
    address = ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(memory)))
    library = ctypes.CDLL(None, use_errno=True)
    is_locked = library.mlock(address, ctypes.c_size_t(size_bytes)) == 0
    if is_locked:
        library.munlock(address, ctypes.c_size_t(size_bytes))
    return is_locked


def find_locked_memory_fault(figures: Mapping[str, Any]) -> str | None:
    """With RDMA a bucket must be lockable, and a limit must be warned of. A GPU must pin a bucket."""
    if not figures.get("isPinned", True):
        return f"pinned memory of {figures['bucketBytes']} bytes must be had, got none"
    if figures["hasRdma"] and not figures["canLockBucket"]:
        return (
            f"a bucket of {figures['bucketBytes']} bytes must be lockable for RDMA, got a limit of "
            f"{figures['limitBytes']} bytes; set LimitMEMLOCK=infinity for the container runtime"
        )
    is_due = figures["hasRdma"] and figures["limitBytes"] is not None
    if figures["isWarned"] != is_due:
        return f"a limit beside RDMA devices must be warned of, and no other, got {figures}"
    return None
