"""One version of policy and drafter on its way from trainer to replicas: names, shapes, checksums, group.

`WeightManifest.buckets` is the one rule by which both sides cut the stream.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import PurePath

from specrl.errors import ChecksumMismatch, RecordInvalid
from specrl.records.peer import HOST

NO_DRAFTER = -1
"""In place of a drafter's version where there is no drafter."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


LARGEST_TENSOR_BYTES = 1 << 40
"""Of a tensor, and of a bucket: a terabyte. What is larger is nonsense."""

LARGEST_WORLD = 1 << 16
"""Ranks of a weight group."""

TRANSPORTS = ("auto", "gloo", "nccl")

FILES = "checkpoint"
"""The transport without a group: files in a folder."""

LONGEST_PATH = 4096


class WeightOwner(StrEnum):
    POLICY = "policy"
    DRAFTER = "drafter"


@dataclass(frozen=True)
class TensorMeta:
    """One tensor by its Hugging Face name within its owner. dtype in torch's spelling."""

    name: str
    owner: WeightOwner
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightManifest:
    """Everything that is broadcast, in order."""

    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int

    @property
    def has_drafter(self) -> bool:
        """Whether a drafter's tensors are among them."""
        return any(tensor.owner is WeightOwner.DRAFTER for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def check(self) -> None:
        """Raise RecordInvalid unless it says what can be received: names once, known types, sizes that exist."""

        def refuse(what: str) -> None:
            raise RecordInvalid(f"a weight manifest must be the trainer's, got {what}; send what DescribeWeights says")

        if not self.tensors:
            refuse("no tensors")
        if not 0 < self.bucket_bytes <= LARGEST_TENSOR_BYTES:
            refuse(f"bucket_bytes={self.bucket_bytes}")
        if len({(tensor.owner, tensor.name) for tensor in self.tensors}) < len(self.tensors):
            refuse("a tensor's name twice")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES:
                refuse(f"dtype={tensor.dtype[:64]!r} of {tensor.name[:64]!r}")
            if any(length < 0 for length in tensor.shape) or tensor.size_bytes > LARGEST_TENSOR_BYTES:
                refuse(f"a tensor {tensor.name[:64]!r} of shape {tensor.shape[:8]}")

    def buckets(self) -> list[tuple[TensorMeta, ...]]:
        """Cut the stream: whole tensors, at most `bucket_bytes` each unless a single tensor is larger."""
        cut: list[list[TensorMeta]] = []
        room = 0
        for tensor in self.tensors:
            if not cut or tensor.size_bytes > room:
                cut.append([])
                room = self.bucket_bytes
            cut[-1].append(tensor)
            room -= tensor.size_bytes
        return [tuple(bucket) for bucket in cut]


@dataclass(frozen=True)
class WeightChecksums:
    """xxh3-64 of every tensor's bytes, in manifest order, of one policy version.

    drafter_version: policy version at which the drafter among the tensors was last trained. Only the trainer knows it;
    a replica takes it from what was sent, at the commit.
    """

    policy_version: int
    checksums: tuple[int, ...]
    drafter_version: int = NO_DRAFTER

    def check(self, sent: WeightChecksums, names: Sequence[str]) -> None:
        """Raise ChecksumMismatch naming the first tensors that differ from what the trainer sent."""
        if self.policy_version != sent.policy_version or len(self.checksums) != len(sent.checksums):
            raise ChecksumMismatch(
                f"weights must be version {sent.policy_version} with {len(sent.checksums)} tensors, got "
                f"version={self.policy_version} with {len(self.checksums)}; the transfer is repeated"
            )
        wrong = [n for n, mine, theirs in zip(names, self.checksums, sent.checksums, strict=True) if mine != theirs]
        if wrong:
            raise ChecksumMismatch(
                f"weights of version {sent.policy_version} must arrive as they were sent, got {len(wrong)} corrupt "
                f"tensors, {', '.join(wrong[:3])} among them; the transfer is repeated"
            )


@dataclass(frozen=True)
class WeightGroup:
    """The process group of one membership epoch. Rank 0 is the trainer's rank 0 and keeps the rendezvous store.

    folder: with transport checkpoint, where the version lies; there is no group then, and address and port say nothing.
    """

    group_id: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    transport: str
    folder: str = ""

    def check(self, longest_s: float) -> None:
        """Raise RecordInvalid unless a process can try to join it, or to read its folder.

        longest_s: what a member may wait at most.
        """

        def refuse(what: str) -> None:
            raise RecordInvalid(f"weight group {self.group_id[:64]!r} must be one that can be joined, got {what}")

        if not 0 < self.timeout_s <= longest_s:
            refuse(f"timeout_s={self.timeout_s}; use the run file's weights.timeoutS, {longest_s:g} or less")
        if self.transport == FILES:
            if not PurePath(self.folder).is_absolute() or len(self.folder) > LONGEST_PATH:
                refuse(f"folder={self.folder[:64]!r}; use the absolute path that WriteWeights answered with")
            return
        if not 0 < len(self.group_id) <= 256:
            refuse(f"a group_id of {len(self.group_id)} characters; give it 1 to 256")
        if re.fullmatch(HOST, self.address, re.ASCII) is None or not 0 <= self.port < 1 << 16:
            refuse(f"address={self.address[:64]!r}, port={self.port}; open the group at the trainer first")
        if not 0 <= self.rank < self.world_size or not 2 <= self.world_size <= LARGEST_WORLD:
            refuse(f"rank={self.rank}, world_size={self.world_size}; count the trainer and every replica's ranks")
        if self.transport not in TRANSPORTS:
            refuse(f"transport={self.transport[:64]!r}; use one of {', '.join(TRANSPORTS)}")
