"""Transfer of one version of policy and drafter from the trainer to the replicas: tensors, checksums, process group.

Trainer and replicas cut the byte stream into the same buckets, because both use `WeightManifest.cut_buckets`.
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
"""Stands for a drafter's version if there is no drafter."""

# Bytes per element, by torch's name of the dtype. A manifest may have no other dtype.
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "int64": 8, "int32": 4, "bool": 1}

# Bounds that no real run reaches. They stop a corrupt or hostile message from allocating memory or from waiting for
# ranks that cannot exist.
LARGEST_TENSOR_BYTES = 1 << 40  # also of a bucket
LARGEST_WORLD = 1 << 16  # ranks in a weight group
LONGEST_PATH = 4096  # Linux's PATH_MAX

SLOWEST_BYTES_PER_S = 125e6
"""Slowest transfer or load of weights that is waited for: a link of 1 Gbit/s. It only bounds whole phases, since the
deadlines of single collectives and missed heartbeats find a member that hangs, long before."""

GROUP_TRANSPORTS = ("auto", "gloo", "nccl")
"""Transports over a process group."""

CHECKPOINT_TRANSPORT = "checkpoint"
"""Transport without a process group: replicas read files that the trainer has written."""


class WeightOwner(StrEnum):
    POLICY = "policy"
    DRAFTER = "drafter"


@dataclass(frozen=True)
class TensorMeta:
    """One tensor. name: its Hugging Face name, unique within its owner. dtype: torch's name, such as bfloat16."""

    name: str
    owner: WeightOwner
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True)
class WeightManifest:
    """All tensors that are sent, in order. bucket_bytes: size limit of a bucket, see `cut_buckets`."""

    tensors: tuple[TensorMeta, ...]
    bucket_bytes: int

    @property
    def has_drafter(self) -> bool:
        """Whether the tensors of a drafter are sent, too."""
        return any(tensor.owner is WeightOwner.DRAFTER for tensor in self.tensors)

    @property
    def size_bytes(self) -> int:
        return sum(tensor.size_bytes for tensor in self.tensors)

    def check(self) -> None:
        """Raise RecordInvalid unless a replica can receive it: unique names, known dtypes, possible sizes."""

        def raise_invalid(what: str) -> None:
            raise RecordInvalid(f"a weight manifest must be the trainer's, got {what}; send the DescribeWeights reply")

        if not self.tensors:
            raise_invalid("no tensors")
        if not 0 < self.bucket_bytes <= LARGEST_TENSOR_BYTES:
            raise_invalid(f"bucket_bytes={self.bucket_bytes}")
        if len({(tensor.owner, tensor.name) for tensor in self.tensors}) < len(self.tensors):
            raise_invalid("the same tensor name twice")
        for tensor in self.tensors:
            if tensor.dtype not in ITEM_BYTES:  # before size_bytes, which looks it up
                raise_invalid(f"dtype={tensor.dtype[:64]!r} of {tensor.name[:64]!r}")
            if any(length < 0 for length in tensor.shape) or tensor.size_bytes > LARGEST_TENSOR_BYTES:
                raise_invalid(f"a tensor {tensor.name[:64]!r} of shape {tensor.shape[:8]}")

    def cut_buckets(self) -> list[tuple[TensorMeta, ...]]:
        """Cut the tensors into buckets, in order.

        A bucket holds whole tensors of at most `bucket_bytes` together, or one tensor that is larger alone.
        """
        cut: list[list[TensorMeta]] = []
        room = 0  # bytes left in the last bucket; negative after a tensor that is larger than a bucket
        for tensor in self.tensors:
            if not cut or tensor.size_bytes > room:
                cut.append([])
                room = self.bucket_bytes
            cut[-1].append(tensor)
            room -= tensor.size_bytes
        return [tuple(bucket) for bucket in cut]


def compute_phase_deadline_s(timeout_s: float, size_bytes: int) -> float:
    """Return the longest duration of one phase of an update, such as its transfer or its load, in seconds.

    timeout_s: weights.timeoutS. size_bytes: of the version.
    """
    return timeout_s + size_bytes / SLOWEST_BYTES_PER_S


@dataclass(frozen=True)
class WeightChecksums:
    """Checksums of one policy version: xxh3-64 of every tensor's bytes, in manifest order.

    drafter_version: policy version at which the sent drafter was last trained; NO_DRAFTER without one. Only the trainer
    knows it. A replica takes it from the trainer's checksums when it commits.
    """

    policy_version: int
    checksums: tuple[int, ...]
    drafter_version: int = NO_DRAFTER

    def check_equal(self, sent: WeightChecksums, names: Sequence[str]) -> None:
        """Raise ChecksumMismatch unless these equal the trainer's, `sent`. names: of the tensors, in manifest order.

        The message names the first three tensors that differ.
        """
        # The drafter's version is not compared: a replica does not know it before the commit.
        if self.policy_version != sent.policy_version or len(self.checksums) != len(sent.checksums):
            raise ChecksumMismatch(
                f"{len(self.checksums)} tensors of version {self.policy_version} arrived, but the trainer sent "
                f"{len(sent.checksums)} of version {sent.policy_version}; repeating the transfer"
            )
        wrong = [n for n, mine, theirs in zip(names, self.checksums, sent.checksums, strict=True) if mine != theirs]
        if wrong:
            raise ChecksumMismatch(
                f"{len(wrong)} tensors of version {sent.policy_version} arrived corrupt, among them "
                f"{', '.join(wrong[:3])}; repeating the transfer"
            )


@dataclass(frozen=True)
class SentWeights:
    """What the trainer sent to a weight group.

    weight_transport: Gloo or Nccl, and why it was chosen. nccl_transport: NCCL's transports, such as `NET/IB`; empty if
    they are not known.
    """

    checksums: WeightChecksums
    size_bytes: int
    weight_transport: str
    nccl_transport: str


@dataclass(frozen=True)
class WeightGroup:
    """The process group of one membership epoch.

    Rank 0 is the trainer's rank 0, which keeps the rendezvous store at `address` and `port`. rank: the callee's first
    rank. timeout_s: longest wait of the rendezvous and of each collective. folder: with transport checkpoint, the
    absolute path of the version's files; no group is formed, and address and port are unused.
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
        """Raise RecordInvalid unless a process can try to join the group, or to read its folder.

        longest_s: longest timeout that this process accepts, from its own run file.
        """

        def raise_invalid(what: str) -> None:
            raise RecordInvalid(f"weight group {self.group_id[:64]!r} must be possible to join, got {what}")

        if not 0 < self.timeout_s <= longest_s:
            raise_invalid(f"timeout_s={self.timeout_s}; use the run file's weights.timeoutS, {longest_s:g} or less")
        if self.transport == CHECKPOINT_TRANSPORT:  # no group, so nothing else is used
            if not PurePath(self.folder).is_absolute() or len(self.folder) > LONGEST_PATH:
                raise_invalid(f"folder={self.folder[:64]!r}; use the absolute path of the WriteWeights reply")
            return
        if not 0 < len(self.group_id) <= 256:
            raise_invalid(f"a group_id of {len(self.group_id)} characters; use 1 to 256")
        if re.fullmatch(HOST, self.address, re.ASCII) is None or not 0 <= self.port < 1 << 16:
            raise_invalid(f"address={self.address[:64]!r}, port={self.port}; call OpenWeightGroup at the trainer first")
        if not 0 <= self.rank < self.world_size or not 2 <= self.world_size <= LARGEST_WORLD:
            raise_invalid(
                f"rank={self.rank}, world_size={self.world_size}; count the trainer's rank and those of every replica"
            )
        if self.transport not in GROUP_TRANSPORTS:
            raise_invalid(f"transport={self.transport[:64]!r}; use one of {', '.join(GROUP_TRANSPORTS)}")
