"""One version as a stream of byte buckets with a checksum per tensor. `send` and `receive` cut it by the same rule.

Double-buffered at both ends: while a bucket is on the wire, the sender gathers, copies and sums the next one, and the
receiver sums the one before. A sender needs two buckets of memory; what a receiver keeps is its staging area.

Checksums are taken of the bytes that go out and of the bytes that came in, before any engine packs or shards them:
vLLM's CPU build leaves empty parameters behind after packing, so a checksum of the loaded model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from specrl.errors import TrainerFailed
from specrl.records import TensorMeta, WeightManifest
from specrl.weights.staging import WHOLE, Share, StagingArea, checksum, size_bytes, slots


class Broadcaster(Protocol):
    """What a stream needs of a group; `BroadcastGroup` is one."""

    @property
    def device(self) -> torch.device: ...

    def start(self, buffer: torch.Tensor) -> Callable[[], None]: ...


def send(group: Broadcaster, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Broadcast tensors in manifest order; returns their checksums.

    `tensors` yields (name, full tensor) in the manifest's order, one at a time, so that a sharded trainer gathers one
    tensor at a time. Raises TrainerFailed when it disagrees with the manifest: that is a bug of the name map.
    """
    stream = iter(tensors)
    checksums: list[int] = []
    buckets = manifest.buckets()
    largest = max((size_bytes(bucket) for bucket in buckets), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=group.device) for _ in range(min(2, len(buckets)))]
    wait = _nothing
    for number, bucket in enumerate(buckets):
        buffer = buffers[number % 2][: size_bytes(bucket)]
        try:
            for meta, slot in slots(bucket, buffer):
                _fill(meta, slot, *next(stream))
                checksums.append(checksum(slot))
        finally:
            wait()  # also when this bucket is not to be had: the one on the wire is read from until then
        wait = group.start(buffer)
    wait()
    return tuple(checksums)


def receive(group: Broadcaster, manifest: WeightManifest, share: Share = WHOLE) -> StagingArea:
    """Take part in one broadcast. Returns what arrived of the share, with its checksums; the rest is dropped."""
    area = StagingArea(manifest, share)
    wait = _expect(group, area, 0)
    for number in range(len(area.buckets)):
        wait()
        wait = _expect(group, area, number + 1)
        if share.keeps(number):
            area.sum(number)
    return area


def _expect(group: Broadcaster, area: StagingArea, number: int) -> Callable[[], None]:
    """Begin to receive a bucket; returns the wait until it lies in the area. Nothing happens after the last one.

    The area is on the host: a device lends the memory of the buckets on their way, two at most.
    """
    if number >= len(area.buckets):
        return _nothing
    is_kept = area.share.keeps(number)
    if is_kept and group.device.type == "cpu":
        return group.start(area.bucket(number))
    passing = torch.empty(size_bytes(area.buckets[number]), dtype=torch.uint8, device=group.device)
    arrived = group.start(passing)

    def wait() -> None:
        arrived()
        if is_kept:
            area.bucket(number).copy_(passing)

    return wait


def _nothing() -> None:
    """Nothing is on the wire."""


def _fill(meta: TensorMeta, slot: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    """Copy a tensor's bytes into its slot."""
    check_meta(meta, name, tensor)
    slot.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def check_meta(meta: TensorMeta, name: str, tensor: torch.Tensor) -> None:
    """Raise TrainerFailed when a tensor is not the one whose turn it is in the manifest."""
    if name != meta.name or tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
        raise TrainerFailed(
            f"broadcast must follow the manifest, got {name} {tuple(tensor.shape)} {tensor.dtype} for {meta}; "
            "the weight map and its manifest disagree"
        )
