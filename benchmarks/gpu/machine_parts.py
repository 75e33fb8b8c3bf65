"""Parts about the machine and the weight update: versions, copies, checksums, and a group that loses a member."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu.part import Figures, PartSkipped, Size, find_bad_rate
from benchmarks.weight_sync import collective, some_tensors

from specrl.errors import CollectiveFailed, DeadlineExceeded, first_line
from specrl.launcher.doctor.gpus import probe_driver
from specrl.launcher.doctor.software import probe_engines
from specrl.records import WeightGroup
from specrl.weights.group import BroadcastGroup, open_rendezvous_store
from specrl.weights.staging import StagingArea, checksum_bytes

GROUP_TIMEOUT_S = 10.0
IMPORT_S = 60.0
"""Longest wait until a new process has imported torch and specrl. It takes 15 s on two busy cores."""


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


def measure_lost_member(_size: Size) -> Figures:
    """Kill a member of a weight group with SIGKILL. The trainer's side must raise, and its process must live on."""
    cards = torch.cuda.device_count()
    if cards == 1:
        raise PartSkipped("NCCL refuses two ranks on one GPU: this part needs two GPUs, got 1")
    store = open_rendezvous_store(2, GROUP_TIMEOUT_S, "127.0.0.1")
    transport = "nccl" if cards > 1 else "gloo"
    group = WeightGroup("kit", "127.0.0.1", store.port, 0, 2, GROUP_TIMEOUT_S, transport)
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    has_received = context.Event()
    member = context.Process(target=_receive_once, args=(replace(group, rank=1), is_ready, has_received), daemon=True)
    member.start()
    if cards > 1:
        torch.cuda.set_device(0)
    try:
        # The deadline of joining is short, so it must not begin while the member still imports torch.
        if not is_ready.wait(IMPORT_S):
            return {"transport": transport, "raised": "the member did not start", "seconds": IMPORT_S}
        joined = BroadcastGroup(group, store)
        buffer = torch.ones(1 << 20, dtype=torch.uint8, device=joined.device)
        joined.start_broadcast(buffer)()
        if not has_received.wait(GROUP_TIMEOUT_S * 3):
            return {"transport": transport, "raised": "the member received nothing", "seconds": GROUP_TIMEOUT_S * 3}
        assert member.pid is not None
        os.kill(member.pid, signal.SIGKILL)
        member.join()
        started = time.perf_counter()
        raised = ""
        try:
            joined.start_broadcast(buffer)()
        except (CollectiveFailed, DeadlineExceeded) as error:
            raised = f"{type(error).__name__}: {first_line(error)}"
        seconds = time.perf_counter() - started
        if cards > 1:
            # NCCL's watchdog aborts the process some seconds after the error, if it is not told otherwise (A3).
            time.sleep(GROUP_TIMEOUT_S * 2)
    finally:
        member.kill()
    return {"transport": transport, "raised": raised, "seconds": seconds}


def _receive_once(group: WeightGroup, is_ready: Any, has_received: Any) -> None:
    is_ready.set()
    if group.transport == "nccl":
        torch.cuda.set_device(1)
    joined = BroadcastGroup(group)
    joined.start_broadcast(torch.empty(1 << 20, dtype=torch.uint8, device=joined.device))()
    has_received.set()
    time.sleep(GROUP_TIMEOUT_S * 10)  # until it is killed


def find_lost_member_fault(figures: Mapping[str, Any]) -> str | None:
    """The error must be one of ours, so that the coordinator forms a new group."""
    if figures["raised"].startswith(("CollectiveFailed", "DeadlineExceeded")):
        return find_bad_rate(figures, "seconds")
    return f"a lost member must raise CollectiveFailed or DeadlineExceeded, got {figures['raised'] or 'no error'}"
