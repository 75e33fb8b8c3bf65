"""Where a version lies at a replica between its arrival and its load: one copy on each node, however many ranks it has.

    a rank keeps and sums every n-th bucket --address--> the node's other ranks map it: the whole version, at each

All ranks take part in a broadcast, but a model that fits a node once may not fit it once for each of its ranks. Memory
that is shared has no name in any file system (memfd_create): it ends with the processes that map it, and no size of
/dev/shm bounds it. The others open it below /proc, which the kernel allows to processes of one user in one container.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import xxhash

from specrl.errors import CollectiveFailed
from specrl.records import TensorMeta, WeightManifest

Bucket = tuple[TensorMeta, ...]
Tensors = list[tuple[TensorMeta, torch.Tensor]]
Address = tuple[int, int]
"""A process and its descriptor of shared memory."""

ALIGNMENT = 64  # of a bucket's first byte, so that its tensors lie as they would in memory of their own


@dataclass(frozen=True)
class Share:
    """What one rank keeps: each bucket whose number is `index` modulo `count`, the ranks of its node."""

    index: int = 0
    count: int = 1

    def keeps(self, number: int) -> bool:
        """Whether bucket `number` is part of it."""
        return number % self.count == self.index


WHOLE = Share()


class StagingArea:
    """Memory on the host for the buckets of a share, and the checksums of what was put into it."""

    def __init__(self, manifest: WeightManifest, share: Share = WHOLE) -> None:
        """Memory that nothing has been put into. Others can map it where there are others."""
        self.buckets, self.share = manifest.buckets(), share
        self._firsts, self._sizes = _layout(self.buckets, share.count)
        self._sums: list[int] = []
        self.address: Address | None = None
        size = self._sizes[share.index]
        if share.count == 1 or size == 0:
            self._memory = torch.empty(size, dtype=torch.uint8)
            return
        descriptor = os.memfd_create("specrl-weights")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.address = os.getpid(), descriptor

    @property
    def checksums(self) -> tuple[int, ...]:
        """Of the share's tensors, in manifest order."""
        return tuple(self._sums)

    @property
    def kept(self) -> list[int]:
        """Numbers of the share's buckets."""
        return [number for number in range(len(self.buckets)) if self.share.keeps(number)]

    @property
    def tensors(self) -> Tensors:
        """The share's, in manifest order."""
        return [item for number in self.kept for item in self._tensors_of(number, self._memory)]

    def bucket(self, number: int) -> torch.Tensor:
        """[N] uint8: memory of a bucket of the share."""
        return self._slot(number, self._memory)

    def sum(self, number: int) -> None:
        """Take the checksums of a bucket that has been filled; in order."""
        self._sums += [checksum(slot) for _, slot in slots(self.buckets[number], self.bucket(number))]

    def gathered(self, addresses: Sequence[Address | None]) -> Tensors:
        """The whole version, in manifest order. addresses: of the node's ranks, in order; nothing of them is copied.

        Raises CollectiveFailed when another rank's memory cannot be mapped.
        """
        memories = [self._mapped(index, address) for index, address in enumerate(addresses)]
        count = self.share.count
        return [
            item for number in range(len(self.buckets)) for item in self._tensors_of(number, memories[number % count])
        ]

    def _mapped(self, index: int, address: Address | None) -> torch.Tensor:
        if index == self.share.index or address is None:  # without an address it keeps no bucket, and is not asked for
            return self._memory
        process, descriptor = address
        try:
            with Path(f"/proc/{process}/fd/{descriptor}").open("rb") as shared:
                # A write, which nobody does, would be this rank's alone.
                view = mmap.mmap(shared.fileno(), self._sizes[index], access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CollectiveFailed(
                f"ranks of one node must reach each other's staging memory, got {error} for process {process}; run "
                "them as one user in one container"
            ) from error
        return torch.frombuffer(view, dtype=torch.uint8)

    def _slot(self, number: int, memory: torch.Tensor) -> torch.Tensor:
        first = self._firsts[number]
        return memory[first : first + size_bytes(self.buckets[number])]

    def _tensors_of(self, number: int, memory: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
        for meta, slot in slots(self.buckets[number], self._slot(number, memory)):
            yield meta, _typed(meta, slot)


def merged(manifest: WeightManifest, shares: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Checksums of a whole version, in manifest order, from those of a node's ranks, in order."""
    left = [iter(checksums) for checksums in shares]
    return tuple(next(left[number % len(left)]) for number, bucket in enumerate(manifest.buckets()) for _ in bucket)


def checksum(bytes_N: torch.Tensor) -> int:
    """xxh3-64 of a [N] uint8 tensor."""
    return xxhash.xxh3_64_intdigest(bytes_N.cpu().numpy().data)


def size_bytes(bucket: Bucket) -> int:
    """Of all tensors of a bucket."""
    return sum(meta.size_bytes for meta in bucket)


def slots(bucket: Bucket, buffer: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Each tensor's bytes inside the bucket's buffer."""
    offset = 0
    for meta in bucket:
        yield meta, buffer[offset : offset + meta.size_bytes]
        offset += meta.size_bytes


def _layout(buckets: Sequence[Bucket], count: int) -> tuple[list[int], list[int]]:
    """First byte of every bucket in the memory of the rank that keeps it, and the size of each rank's memory."""
    firsts, sizes = list[int](), [0] * count
    for number, bucket in enumerate(buckets):
        firsts.append(sizes[number % count])
        sizes[number % count] += -(-size_bytes(bucket) // ALIGNMENT) * ALIGNMENT
    return firsts, sizes


def _typed(meta: TensorMeta, slot: torch.Tensor) -> torch.Tensor:
    """The tensor in its bucket's own memory; a copy where its type cannot begin at that byte."""
    dtype: torch.dtype = getattr(torch, meta.dtype)
    if slot.storage_offset() % dtype.itemsize:
        slot = slot.clone()
    return slot.view(dtype).reshape(meta.shape)
