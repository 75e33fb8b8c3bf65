"""Sends the current version: broadcasts it to replicas, writes it as files for them, exports Hugging Face folders.

Rank 0 sends or writes. The ranks that share tensors with it take part in gathering them, one tensor at a time. Called
by `backend.py` alone.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch._C._distributed_c10d import TCPStore

from specrl.errors import SpecrlError, StoreFailed, VersionConflict
from specrl.records import NO_DRAFTER, TensorMeta, WeightChecksums, WeightGroup, WeightManifest, WeightOwner
from specrl.trainer.checkpointing import hf_folder
from specrl.trainer.megatron_backend.parallel.groups import RankGroups
from specrl.trainer.megatron_backend.training.models import RankModels
from specrl.weights import files, stream
from specrl.weights import group as weight_group

Tensors = Iterator[tuple[str, torch.Tensor]]


class WeightSender:
    """This rank's membership in the current weight group. Methods are collectives, as those of `TrainerBackend`."""

    def __init__(self, groups: RankGroups) -> None:
        self._groups = groups
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._joined: weight_group.BroadcastGroup | None = None

    def open_group(self, group: WeightGroup) -> int:
        """Close the previous group and listen for a new one, at rank 0. Returns the port; 0 at other ranks."""
        self.close()
        self._group = group
        if self._groups.rank != 0:
            return 0
        self._store = weight_group.open_rendezvous_store(group.world_size, group.timeout_s, group.address)
        return self._store.port

    def broadcast_version(self, models: RankModels, group_id: str) -> WeightChecksums:
        """Join the group, unless already joined, and send the current version. See `TrainerBackend`."""
        if self._group is None or self._group.group_id != group_id:
            known = self._group.group_id if self._group else None
            raise VersionConflict(
                f"group_id must be the open weight group's, {known}, got {group_id}; call OpenWeightGroup first"
            )
        checksums: tuple[int, ...] = ()
        with _gather_to_end(models.groups, _all_tensors(models)) as tensors:
            if self._groups.rank == 0:
                try:
                    if self._joined is None:
                        self._joined = weight_group.BroadcastGroup(self._group, self._store)
                    checksums = stream.send_version(self._joined, describe_weights(models), tensors)
                except SpecrlError:
                    self.close()  # a broken group cannot be reused; the coordinator opens another one
                    raise
        return WeightChecksums(models.state.step, checksums, _drafter_version(models))

    @property
    def weight_transport(self) -> str:
        """See `TrainerBackend.weight_transport`."""
        return "" if self._joined is None else self._joined.weight_transport

    @property
    def nccl_transport(self) -> str:
        """See `TrainerBackend.nccl_transport`."""
        return "" if self._joined is None else self._joined.nccl_transport

    def close(self) -> None:
        """Leave the group, if there is one."""
        if self._joined is not None:
            self._joined.close()
        self._joined = self._store = self._group = None


def write_weights(models: RankModels, folder: Path) -> WeightChecksums:
    """Write the current version into a new folder. A collective; see `TrainerBackend`."""
    checksums: tuple[int, ...] = ()
    with _gather_to_end(models.groups, _all_tensors(models)) as tensors:
        if models.groups.rank == 0:
            checksums = files.write_version(folder, describe_weights(models), tensors)
    return WeightChecksums(models.state.step, checksums, _drafter_version(models))


def write_model_folders(
    models: RankModels, directory: Path, *, drafter_only: bool = False
) -> tuple[Path | None, Path | None]:
    """Write policy and drafter as Hugging Face folders. A collective; see `TrainerBackend`."""
    drafter = None if models.drafter is None or _has_native_heads(models) else directory / "drafter"
    policy = None if drafter_only and drafter is not None else directory / "policy"
    of_policy: Tensors = iter(())
    if policy is not None:
        of_policy = _all_tensors(models) if _has_native_heads(models) else models.policy.gather_tensors()
    with _gather_to_end(models.groups, of_policy) as tensors:
        if models.groups.rank == 0:
            try:
                if policy is not None:
                    hf_folder.write_policy_folder(policy, models.config.path, tensors)
                if drafter is not None and models.drafter is not None:
                    shutil.rmtree(drafter, ignore_errors=True)
                    models.drafter.model.write_folder(drafter, models.policy.dtype)
            except (OSError, SafetensorError) as error:
                raise StoreFailed(
                    f"could not write the export to {directory}: {error}; free space on its disk"
                ) from error
    return policy, drafter


def describe_weights(models: RankModels) -> WeightManifest:
    """List the policy's tensors, then the drafter's, in the order in which they are sent."""
    shapes = models.policy.weight_map.full_shapes
    found = [_describe_tensor(name, WeightOwner.POLICY, models.policy.dtype, shape) for name, shape in shapes.items()]
    if models.drafter is not None:
        owner = models.drafter.model.owner
        found += [_describe_tensor(name, owner, x.dtype, x.shape) for name, x in _drafter_tensors(models)]
    return WeightManifest(tuple(found), models.spec.weights.bucket_mib << 20)


def _describe_tensor(name: str, owner: WeightOwner, dtype: torch.dtype, shape: torch.Size) -> TensorMeta:
    return TensorMeta(name, owner, str(dtype).removeprefix("torch."), tuple(shape))


def _drafter_version(models: RankModels) -> int:
    """Return the step that last trained the drafter: the current one if it is trained online, else 0."""
    if models.drafter is None or _has_native_heads(models):
        return NO_DRAFTER  # native heads have the policy's version
    # Without online training, the drafter is initialised before step 1 and does not change afterwards. Online, a step
    # without rollouts counts, too: it changes neither policy nor drafter.
    return models.state.step if models.spec.trainer.drafter.online else 0


def _has_native_heads(models: RankModels) -> bool:
    """Whether the drafter's tensors are part of the policy."""
    return models.drafter is not None and models.drafter.model.owner is WeightOwner.POLICY


def _all_tensors(models: RankModels) -> Tensors:
    yield from models.policy.gather_tensors()
    yield from _drafter_tensors(models)


def _drafter_tensors(models: RankModels) -> Tensors:
    if models.drafter is not None:
        yield from models.drafter.model.collect_tensors(models.policy.dtype).items()


@contextmanager
def _gather_to_end(groups: RankGroups, tensors: Tensors) -> Iterator[Tensors]:
    """Yield `tensors`, and consume the rest of them at the end, even after an error.

    Gathering is a collective. If rank 0 stopped early, the ranks that gather with it would wait until a timeout.
    """
    try:
        yield tensors
    finally:
        if groups.gathers_with_rank_0:
            for _ in tensors:
                pass
