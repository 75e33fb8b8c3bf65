"""One version as a stream of byte buckets with a checksum per tensor. `send` and `receive` cut it by the same rule.

Checksums are taken of the bytes that go out and of the bytes that came in, before any engine packs or shards them:
vLLM's CPU build leaves empty parameters behind after packing, so a checksum of the loaded model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
import xxhash

from specrl.errors import TrainerFailed
from specrl.records import TensorMeta, WeightManifest


class Broadcaster(Protocol):
    """What a stream needs of a group; `BroadcastGroup` is one."""

    @property
    def device(self) -> torch.device: ...

    def broadcast(self, buffer: torch.Tensor) -> None: ...


def checksum(bytes_N: torch.Tensor) -> int:
    """xxh3-64 of a [N] uint8 tensor."""
    return xxhash.xxh3_64_intdigest(bytes_N.cpu().numpy().data)


def send(group: Broadcaster, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Broadcast tensors in manifest order; returns their checksums.

    `tensors` yields (name, full tensor) in the manifest's order, one at a time, so that a sharded trainer gathers one
    tensor at a time. Raises TrainerFailed when it disagrees with the manifest: that is a bug of the name map.
    """
    stream = iter(tensors)
    checksums: list[int] = []
    for bucket in manifest.buckets():
        buffer = torch.empty(sum(meta.size_bytes for meta in bucket), dtype=torch.uint8, device=group.device)
        for meta, slot in _slots(bucket, buffer):
            name, tensor = next(stream)
            if name != meta.name or tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
                raise TrainerFailed(
                    f"broadcast must follow the manifest, got {name} {tuple(tensor.shape)} {tensor.dtype} for {meta}; "
                    "the weight map and its manifest disagree"
                )
            slot.copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
            checksums.append(checksum(slot))
        group.broadcast(buffer)
    return tuple(checksums)


def receive(
    group: Broadcaster, manifest: WeightManifest
) -> tuple[list[tuple[TensorMeta, torch.Tensor]], tuple[int, ...]]:
    """Take part in one broadcast. Returns the tensors, in manifest order, and the checksums of what arrived."""
    arrived: list[tuple[TensorMeta, torch.Tensor]] = []
    checksums: list[int] = []
    for bucket in manifest.buckets():
        buffer = torch.empty(sum(meta.size_bytes for meta in bucket), dtype=torch.uint8, device=group.device)
        group.broadcast(buffer)
        for meta, slot in _slots(bucket, buffer):
            checksums.append(checksum(slot))
            arrived.append((meta, slot.clone().view(getattr(torch, meta.dtype)).reshape(meta.shape)))
    return arrived, tuple(checksums)


def _slots(bucket: tuple[TensorMeta, ...], buffer: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Each tensor's bytes inside the bucket's buffer."""
    offset = 0
    for meta in bucket:
        yield meta, buffer[offset : offset + meta.size_bytes]
        offset += meta.size_bytes
