"""The trainer's side of a weight update, for tests of replicas: real group, real broadcast, and corrupted tensors."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from specrl.records import TensorMeta, WeightChecksums, WeightGroup, WeightManifest, WeightOwner
from specrl.weights.group import BroadcastGroup, open_rendezvous_store
from specrl.weights.staging import checksum_bytes
from specrl.weights.stream import send_version

Tensors = Sequence[tuple[TensorMeta, torch.Tensor]]
BUCKET_BYTES = 1 << 16  # small, so that tiny models need several buckets


def folder_tensors(folder: Path, owner: WeightOwner) -> list[tuple[TensorMeta, torch.Tensor]]:
    """Load a folder's tensors as a trainer would broadcast them."""
    return [
        (TensorMeta(name, owner, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)), tensor)
        for name, tensor in load_file(folder / "model.safetensors").items()
    ]


def manifest_of(tensors: Tensors) -> WeightManifest:
    """Make the manifest of these tensors."""
    return WeightManifest(tuple(meta for meta, _ in tensors), BUCKET_BYTES)


class WeightSender:
    """Rank 0 of a weight group with one replica of `ranks` ranks.

    `send` may be called repeatedly; the group stays joined.
    """

    def __init__(self, timeout_s: float = 60.0, ranks: int = 1) -> None:
        self._members = 1 + ranks
        self._store: Any = open_rendezvous_store(self._members, timeout_s, "127.0.0.1")
        self._joined: BroadcastGroup | None = None
        self._group_id = uuid.uuid4().hex
        self._timeout_s = timeout_s

    def group(self, rank: int = 1) -> WeightGroup:
        """Make the description of the group that the member of `rank` gets."""
        return WeightGroup(self._group_id, "127.0.0.1", self._store.port, rank, self._members, self._timeout_s, "gloo")

    async def send(self, tensors: Tensors, policy_version: int, corrupt: str | None = None) -> WeightChecksums:
        """Broadcast a version. Returns the checksums of the uncorrupted tensors.

        corrupt: name of a tensor that is sent with one bit flipped.
        """
        return await asyncio.to_thread(self._send, tensors, policy_version, corrupt)

    def _send(self, tensors: Tensors, policy_version: int, corrupt: str | None) -> WeightChecksums:
        if self._joined is None:
            self._joined = BroadcastGroup(self.group(0), self._store)
        true = tuple(checksum_bytes(tensor.contiguous().reshape(-1).view(torch.uint8)) for _, tensor in tensors)
        on_the_way = [(meta.name, flip_bit(tensor) if meta.name == corrupt else tensor) for meta, tensor in tensors]
        send_version(self._joined, manifest_of(tensors), on_the_way)
        return WeightChecksums(policy_version, true)

    def close(self) -> None:
        """Leave the group."""
        if self._joined is not None:
            self._joined.close()
        self._joined = self._store = None


def flip_bit(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor and flip one bit of a byte in its middle."""
    changed = tensor.clone().contiguous()
    bytes_N = changed.reshape(-1).view(torch.uint8)
    bytes_N[len(bytes_N) // 2] ^= 1
    return changed


async def transfer_weights(
    engine: Any, sender: WeightSender, tensors: Tensors, policy_version: int, corrupt: str | None = None
) -> tuple[WeightChecksums, WeightChecksums]:
    """Broadcast a version to a replica's engine. Returns the checksums (received, sent)."""
    receiving = engine.receive_weights(sender.group(), manifest_of(tensors), policy_version)
    return await asyncio.gather(receiving, sender.send(tensors, policy_version, corrupt))


async def update_weights(engine: Any, sender: WeightSender, tensors: Tensors, policy_version: int) -> WeightChecksums:
    """Broadcast a version, check that it arrived intact, and load it. Returns its checksums."""
    received, sent = await transfer_weights(engine, sender, tensors, policy_version)
    assert received == sent
    await engine.load_weights(sent)
    return sent
