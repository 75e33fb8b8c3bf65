"""Parts about the weight group: trainer and replica on one card, a busy card, and a member that is killed."""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from benchmarks.gpu.part import Figures, PartSkipped, Size, find_bad_rate
from benchmarks.weight_sync import some_tensors

from specrl.errors import CollectiveFailed, DeadlineExceeded, first_line
from specrl.records import WeightGroup, WeightManifest
from specrl.weights.group import BroadcastGroup, open_rendezvous_store
from specrl.weights.stream import receive_version, send_version

GROUP_TIMEOUT_S = 10.0
IMPORT_S = 60.0
"""Longest wait until a new process has imported torch and specrl. It takes 15 s on two busy cores."""


def measure_shared_card(size: Size) -> Figures:
    """Send a version between two processes on one card by the transport that they choose (A2); without a card, too."""
    manifest, tensors = some_tensors(size.choose(512, 32, 8) << 20)
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
        tensors = [(name, tensor.cuda()) for name, tensor in tensors]
    store = open_rendezvous_store(2, GROUP_TIMEOUT_S, "127.0.0.1")
    group = WeightGroup("kit", "127.0.0.1", store.port, 0, 2, GROUP_TIMEOUT_S, "auto")
    context = multiprocessing.get_context("spawn")
    is_ready = context.Event()
    received = context.Queue()
    arguments = (replace(group, rank=1), manifest, is_ready, received)
    member = context.Process(target=_receive_version, args=arguments, daemon=True)
    member.start()
    try:
        if not is_ready.wait(IMPORT_S):
            return {"transport": "the member did not start", "isEqual": False, "seconds": IMPORT_S}
        joined = BroadcastGroup(group, store)
        started = time.perf_counter()
        sent = send_version(joined, manifest, tensors)
        seconds = time.perf_counter() - started
        try:
            is_equal = received.get(timeout=GROUP_TIMEOUT_S) == sent
        except queue.Empty:
            is_equal = False
        return {"transport": joined.group.transport, "isEqual": is_equal, "seconds": seconds}
    finally:
        member.kill()


def _receive_version(group: WeightGroup, manifest: WeightManifest, is_ready: Any, received: Any) -> None:
    if torch.cuda.is_available():
        torch.cuda.set_device(0)
    is_ready.set()
    received.put(receive_version(BroadcastGroup(group), manifest).checksums)


def find_shared_card_fault(figures: Mapping[str, Any]) -> str | None:
    """Two ranks on one card must choose Gloo, since NCCL refuses them, and the weights must arrive."""
    if figures["transport"] != "gloo":
        return f"transport must be gloo for two ranks on one card, got {figures['transport']}"
    bad = find_bad_rate(figures, "seconds")
    return bad or (None if figures["isEqual"] else "received weights must be those that were sent, got others")


def measure_busy_device(_size: Size) -> Figures:
    """Receive while other work runs on the card, as decoding does (A19). One member, so one card is enough."""
    transport = "nccl" if torch.cuda.is_available() else "gloo"
    store = open_rendezvous_store(1, GROUP_TIMEOUT_S, "127.0.0.1")
    joined = BroadcastGroup(WeightGroup("kit", "127.0.0.1", store.port, 0, 1, GROUP_TIMEOUT_S, transport), store)
    buffer = torch.ones(1 << 20, dtype=torch.uint8, device=joined.device)
    joined.start_broadcast(buffer)()  # NCCL connects
    with _keep_device_busy() as is_busy:
        started = time.perf_counter()
        joined.start_broadcast(buffer)()
        seconds = time.perf_counter() - started
        figures = {"transport": joined.group.transport, "isStillBusy": is_busy(), "seconds": seconds}
    joined.close()
    return figures


@contextmanager
def _keep_device_busy() -> Iterator[Callable[[], bool]]:
    """Keep the GPU busy on another stream for some seconds; without one, a thread. Yields whether it still is."""
    if torch.cuda.is_available():
        ended = torch.cuda.Event()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda._sleep(10**10)  # cycles: five seconds at 2 GHz
            ended.record()
        yield lambda: not ended.query()
        torch.cuda.synchronize()
        return
    is_over = threading.Event()
    work = threading.Thread(target=is_over.wait)
    work.start()
    yield work.is_alive
    is_over.set()
    work.join()


def find_busy_device_fault(figures: Mapping[str, Any]) -> str | None:
    """Receiving must end before the other work on the card does."""
    bad = find_bad_rate(figures, "seconds")
    return bad or (None if figures["isStillBusy"] else f"receiving must not wait for the whole device, got {figures}")


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
