"""One version as a stream of byte buckets with a checksum per tensor. `send` and `receive` cut it by the same rule.

Double-buffered at both ends: while a bucket is on the wire, the sender gathers, copies and sums the next one, and the
receiver sums the one before. A sender needs two buckets of memory; a receiver keeps every bucket, as the staging area.

Checksums are taken of the bytes that go out and of the bytes that came in, before any engine packs or shards them:
vLLM's CPU build leaves empty parameters behind after packing, so a checksum of the loaded model would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
import xxhash

from specrl.errors import TrainerFailed
from specrl.records import TensorMeta, WeightManifest


class Broadcaster(Protocol):
    """What a stream needs of a group; `BroadcastGroup` is one."""

    @property
    def device(self) -> torch.device: ...

    def start(self, buffer: torch.Tensor) -> Callable[[], None]: ...


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
    buckets = manifest.buckets()
    largest = max((_size_bytes(bucket) for bucket in buckets), default=0)
    buffers = [torch.empty(largest, dtype=torch.uint8, device=group.device) for _ in range(min(2, len(buckets)))]
    wait = _nothing
    for number, bucket in enumerate(buckets):
        buffer = buffers[number % 2][: _size_bytes(bucket)]
        try:
            for meta, slot in _slots(bucket, buffer):
                _fill(meta, slot, *next(stream))
                checksums.append(checksum(slot))
        finally:
            wait()  # also when this bucket is not to be had: the one on the wire is read from until then
        wait = group.start(buffer)
    wait()
    return tuple(checksums)


def receive(
    group: Broadcaster, manifest: WeightManifest
) -> tuple[list[tuple[TensorMeta, torch.Tensor]], tuple[int, ...]]:
    """Take part in one broadcast. Returns the tensors, in manifest order, and the checksums of what arrived."""
    arrived: list[tuple[TensorMeta, torch.Tensor]] = []
    checksums: list[int] = []
    buckets = manifest.buckets()
    buffer, wait = _expect(group, buckets, 0)
    for number, bucket in enumerate(buckets):
        wait()
        filled = buffer
        buffer, wait = _expect(group, buckets, number + 1)
        for meta, slot in _slots(bucket, filled):
            checksums.append(checksum(slot))
            arrived.append((meta, _typed(meta, slot)))
    return arrived, tuple(checksums)


def _expect(
    group: Broadcaster, buckets: Sequence[tuple[TensorMeta, ...]], number: int
) -> tuple[torch.Tensor, Callable[[], None]]:
    """Begin to receive a bucket into memory of its own; nothing happens after the last one."""
    if number >= len(buckets):
        return torch.empty(0, dtype=torch.uint8), _nothing
    buffer = torch.empty(_size_bytes(buckets[number]), dtype=torch.uint8, device=group.device)
    return buffer, group.start(buffer)


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


def _typed(meta: TensorMeta, slot: torch.Tensor) -> torch.Tensor:
    """The tensor in its bucket's own memory; a copy where its type cannot begin at that byte."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    if slot.storage_offset() % dtype.itemsize:
        slot = slot.clone()
    return slot.view(dtype).reshape(meta.shape)


def _size_bytes(bucket: tuple[TensorMeta, ...]) -> int:
    return sum(meta.size_bytes for meta in bucket)


def _slots(bucket: tuple[TensorMeta, ...], buffer: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Each tensor's bytes inside the bucket's buffer."""
    offset = 0
    for meta in bucket:
        yield meta, buffer[offset : offset + meta.size_bytes]
        offset += meta.size_bytes
