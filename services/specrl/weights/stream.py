"""Transfers a version as a stream of byte buckets over a process group, with one checksum per tensor.

The trainer calls `send_version`, every rank of a replica calls `receive_version`. Both split the version by the
manifest's buckets.

Both ends are double-buffered. While a bucket is on the wire, the sender gathers the next one and computes its
checksums. Meanwhile the receiver computes those of the previous one. The sender needs two buckets of memory. The
receiver needs its staging area, and on a GPU two buckets more.

Checksums cover the bytes that were sent and received, before an engine packs or shards them. A checksum of the loaded
model would prove nothing: vLLM's CPU build leaves empty parameters behind after packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from specrl.errors import TrainerFailed
from specrl.records import TensorMeta, WeightManifest
from specrl.weights.staging import WHOLE, BucketShare, StagingArea, bucket_size_bytes, checksum_bytes, split_bucket


class Broadcaster(Protocol):
    """The process group that a stream needs. `BroadcastGroup` implements it."""

    @property
    def device(self) -> torch.device: ...

    def start_broadcast(self, buffer: torch.Tensor) -> Callable[[], None]: ...


def send_version(
    group: Broadcaster, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[int, ...]:
    """Broadcast tensors in manifest order. Returns one checksum per tensor.

    tensors: (name, full tensor) in the manifest's order. They are consumed one at a time, so a sharded trainer never
    gathers more than one.

    Raises TrainerFailed when `tensors` disagree with the manifest (a bug in the trainer's name map), CollectiveFailed
    or DeadlineExceeded when a member fails.
    """
    stream = iter(tensors)
    checksums: list[int] = []
    buckets = manifest.cut_buckets()
    largest = max((bucket_size_bytes(bucket) for bucket in buckets), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=group.device) for _ in range(min(2, len(buckets)))]
    wait = _wait_for_nothing
    for number, bucket in enumerate(buckets):
        buffer = buffers[number % 2][: bucket_size_bytes(bucket)]
        try:
            for meta, slot in split_bucket(bucket, buffer):
                _fill_slot(meta, slot, *next(stream))
                checksums.append(checksum_bytes(slot))
        finally:
            wait()  # even if this bucket failed: until then the other buffer is being sent and must not be freed
        wait = group.start_broadcast(buffer)
    wait()
    return tuple(checksums)


def receive_version(group: Broadcaster, manifest: WeightManifest, share: BucketShare = WHOLE) -> StagingArea:
    """Take part in one broadcast. Keeps the buckets of `share`, with their checksums, and drops the others.

    Raises CollectiveFailed or DeadlineExceeded when a member fails.
    """
    area = StagingArea(manifest, share)
    wait = _start_receiving(group, area, 0)
    for number in range(len(area.buckets)):
        wait()
        # Start the next bucket first, so that it arrives while this one's checksums are computed.
        wait = _start_receiving(group, area, number + 1)
        if share.keeps_bucket(number):
            area.add_checksums(number)
    return area


def _start_receiving(group: Broadcaster, area: StagingArea, number: int) -> Callable[[], None]:
    """Start receiving a bucket. Returns a function that waits until it is in the area. No-op after the last bucket."""
    if number >= len(area.buckets):
        return _wait_for_nothing
    is_kept = area.share.keeps_bucket(number)
    if is_kept and group.device.type == "cpu":
        return group.start_broadcast(area.bucket_memory(number))
    # The area is on the host, so a GPU receives into a temporary buffer. At most two of them exist at a time. Buckets
    # that this rank does not keep are received, too: a broadcast is a collective of all ranks.
    passing = torch.empty(bucket_size_bytes(area.buckets[number]), dtype=torch.uint8, device=group.device)
    arrived = group.start_broadcast(passing)

    def wait_and_copy() -> None:
        arrived()
        if is_kept:
            area.bucket_memory(number).copy_(passing)

    return wait_and_copy


def _wait_for_nothing() -> None:
    """Return at once: nothing is on the wire."""


def _fill_slot(meta: TensorMeta, slot: torch.Tensor, name: str, tensor: torch.Tensor) -> None:
    check_tensor(meta, name, tensor)
    slot.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))


def check_tensor(meta: TensorMeta, name: str, tensor: torch.Tensor) -> None:
    """Raise TrainerFailed unless a tensor has the name, shape and dtype that are next in the manifest."""
    if name != meta.name or tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
        raise TrainerFailed(
            f"tensors must follow the manifest, got {name} {tuple(tensor.shape)} {tensor.dtype} for {meta}; "
            "report this as a bug: the trainer's weight map and its manifest disagree"
        )
