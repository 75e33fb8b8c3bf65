"""The staging area: holds a version at a replica after it arrived and before it is loaded. One copy per node.

    each of a node's n ranks keeps every n-th bucket --address--> the other ranks map it, so all ranks see all buckets

Every rank takes part in a broadcast. A node's memory may hold the model once, but not once per rank, so the ranks of a
node share one copy.

The shared memory is anonymous (memfd_create). The kernel frees it when the last process that maps it ends, and the
size of /dev/shm does not limit it. Other ranks open it through /proc, which the kernel allows between processes of one
user in one container. Called by `stream` and `files`, and by the engines.
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

BucketTensors = tuple[TensorMeta, ...]
NamedTensors = list[tuple[TensorMeta, torch.Tensor]]
# A process id and that process's file descriptor of its shared memory.
Address = tuple[int, int]

# Of a bucket's first byte. torch's CPU allocator aligns to 64 bytes, too, so tensors here start as they do elsewhere.
ALIGNMENT = 64


@dataclass(frozen=True)
class BucketShare:
    """The buckets that one rank keeps: those whose number modulo `count` is `index`.

    index: the rank's number on its node. count: ranks on the node.
    """

    index: int = 0
    count: int = 1

    def keeps_bucket(self, number: int) -> bool:
        """Return whether bucket `number` is part of this share."""
        return number % self.count == self.index


WHOLE = BucketShare()


class StagingArea:
    """Host memory for the buckets of one share, and the checksums of the tensors that were written into it."""

    def __init__(self, manifest: WeightManifest, share: BucketShare = WHOLE) -> None:
        """Allocate the memory, uninitialised. It is shared memory if the node has other ranks."""
        self.buckets = manifest.cut_buckets()
        self.share = share
        self._firsts, self._sizes = _lay_out_buckets(self.buckets, share.count)
        self._sums: list[int] = []
        self.address: Address | None = None
        size = self._sizes[share.index]
        if share.count == 1 or size == 0:
            self._memory = torch.empty(size, dtype=torch.uint8)
            return
        # The descriptor stays open as long as this area lives, since others open the memory through it. Mappings
        # outlive the descriptor.
        descriptor = os.memfd_create("specrl-weights")
        weakref.finalize(self, os.close, descriptor)
        os.ftruncate(descriptor, size)
        self._memory = torch.frombuffer(mmap.mmap(descriptor, size), dtype=torch.uint8)
        self.address = os.getpid(), descriptor

    @property
    def checksums(self) -> tuple[int, ...]:
        """Checksums of the share's tensors, in manifest order."""
        return tuple(self._sums)

    @property
    def bucket_numbers(self) -> list[int]:
        """Numbers of the share's buckets, ascending."""
        return [number for number in range(len(self.buckets)) if self.share.keeps_bucket(number)]

    def bucket_memory(self, number: int) -> torch.Tensor:
        """Return the memory [N] uint8 of one of the share's buckets."""
        return self._slice_bucket(number, self._memory)

    def add_checksums(self, number: int) -> None:
        """Compute the checksums of a bucket that has been filled. Call it for the share's buckets in order."""
        self._sums += [
            checksum_bytes(slot) for _, slot in split_bucket(self.buckets[number], self.bucket_memory(number))
        ]

    def gather_tensors(self, addresses: Sequence[Address | None]) -> NamedTensors:
        """Map the other ranks' memory and return all tensors of the version, in manifest order, without copying.

        addresses: those of the node's ranks, in rank order; None for a rank without shared memory.

        Raises CollectiveFailed when another rank's memory cannot be mapped.
        """
        memories = [self._map_memory(index, address) for index, address in enumerate(addresses)]
        return [
            (meta, _view_as_tensor(meta, slot))
            for number, bucket in enumerate(self.buckets)
            for meta, slot in split_bucket(bucket, self._slice_bucket(number, memories[number % self.share.count]))
        ]

    def _map_memory(self, index: int, address: Address | None) -> torch.Tensor:
        # A rank without an address keeps no buckets, so its result is never read.
        if index == self.share.index or address is None:
            return self._memory
        process, descriptor = address
        try:
            with Path(f"/proc/{process}/fd/{descriptor}").open("rb") as shared:
                # Copy on write: torch needs a writable buffer, but a write must not reach the other ranks.
                view = mmap.mmap(shared.fileno(), self._sizes[index], access=mmap.ACCESS_COPY)
        except (OSError, ValueError) as error:
            raise CollectiveFailed(
                f"could not map the staging memory of process {process} on this node: {error}; run all ranks of a node "
                "as one user in one container"
            ) from error
        return torch.frombuffer(view, dtype=torch.uint8)

    def _slice_bucket(self, number: int, memory: torch.Tensor) -> torch.Tensor:
        first = self._firsts[number]
        return memory[first : first + bucket_size_bytes(self.buckets[number])]


def merge_checksums(manifest: WeightManifest, shares: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Merge the checksums of a node's ranks, in rank order, into those of the whole version, in manifest order."""
    left = [iter(checksums) for checksums in shares]
    return tuple(next(left[number % len(left)]) for number, bucket in enumerate(manifest.cut_buckets()) for _ in bucket)


def checksum_bytes(bytes_N: torch.Tensor) -> int:
    """Compute the xxh3-64 of a tensor [N] uint8."""
    return xxhash.xxh3_64_intdigest(bytes_N.cpu().numpy().data)


def bucket_size_bytes(bucket: BucketTensors) -> int:
    """Return the bytes that all tensors of a bucket take together."""
    return sum(meta.size_bytes for meta in bucket)


def split_bucket(bucket: BucketTensors, buffer: torch.Tensor) -> Iterator[tuple[TensorMeta, torch.Tensor]]:
    """Yield each tensor's description and its bytes [N] uint8 inside the bucket's buffer."""
    offset = 0
    for meta in bucket:
        yield meta, buffer[offset : offset + meta.size_bytes]
        offset += meta.size_bytes


def _lay_out_buckets(buckets: Sequence[BucketTensors], count: int) -> tuple[list[int], list[int]]:
    """Return each bucket's first byte in the memory of the rank that keeps it, and each rank's memory size in bytes."""
    firsts = list[int]()
    sizes = [0] * count
    for number, bucket in enumerate(buckets):
        firsts.append(sizes[number % count])
        sizes[number % count] += -(-bucket_size_bytes(bucket) // ALIGNMENT) * ALIGNMENT  # rounded up
    return firsts, sizes


def _view_as_tensor(meta: TensorMeta, slot: torch.Tensor) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, meta.dtype)
    # Tensors of a bucket are packed without gaps, and torch cannot view a type at an unaligned byte.
    if slot.storage_offset() % dtype.itemsize:
        slot = slot.clone()
    return slot.view(dtype).reshape(meta.shape)
