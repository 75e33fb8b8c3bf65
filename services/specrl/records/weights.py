"""One version of policy and drafter on its way from trainer to replicas: names, shapes, checksums, group.

`WeightManifest.buckets` is the one rule by which both sides cut the stream.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specrl.errors import ChecksumMismatch

NO_DRAFTER = -1
"""In place of a drafter's version where there is no drafter."""

ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}


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
    """The process group of one membership epoch. Rank 0 is the trainer's rank 0 and keeps the rendezvous store."""

    group_id: str
    address: str
    port: int
    rank: int
    world_size: int
    timeout_s: float
    transport: str
