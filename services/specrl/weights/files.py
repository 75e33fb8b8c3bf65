"""Transfers a version as files in a folder that trainer and replicas share. For `weights.transport: Checkpoint`.

    .NAME.tmp (being written) --rename--> NAME      so a version's folder is either complete or absent

Each bucket is one safetensors file, so neither side needs memory for more than one bucket beside its own copy.
Checksums cover the same bytes as those of a broadcast. They are computed before writing and after reading.
The trainer calls `write_version`, a replica calls `read_version`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError

from specrl.errors import ChecksumMismatch, StoreFailed
from specrl.files import write_folder
from specrl.records import TensorMeta, WeightManifest
from specrl.tensor_files import open_tensors, save_tensors
from specrl.weights.staging import WHOLE, BucketShare, StagingArea, checksum_bytes, split_bucket
from specrl.weights.stream import check_tensor


def write_version(
    folder: Path, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]
) -> tuple[int, ...]:
    """Write tensors in manifest order into `folder`, which must not exist. Returns one checksum per tensor.

    tensors: (name, full tensor) in the manifest's order, one at a time.

    Raises TrainerFailed when `tensors` disagree with the manifest, StoreFailed when the folder cannot be written.
    """
    stream = iter(tensors)
    checksums: list[int] = []
    try:
        with write_folder(folder) as scratch:  # readers never see half a version
            for number, bucket in enumerate(manifest.cut_buckets()):
                whole = {}
                for meta in bucket:
                    name, tensor = next(stream)
                    check_tensor(meta, name, tensor)
                    whole[_tensor_key(meta)] = tensor.detach().to("cpu", copy=True).contiguous()
                    checksums.append(checksum_bytes(_view_bytes(whole[_tensor_key(meta)])))
                save_tensors(whole, _bucket_file(scratch, number))
    except (OSError, SafetensorError) as error:
        raise StoreFailed(f"could not write weights to {folder}: {error}; free space on its disk") from error
    return tuple(checksums)


def read_version(folder: Path, manifest: WeightManifest, share: BucketShare = WHOLE) -> StagingArea:
    """Read this rank's share of a version into a staging area, and compute its checksums.

    Raises ChecksumMismatch when a file is missing, truncated or does not match the manifest. The error is retryable.
    """
    area = StagingArea(manifest, share)
    try:
        for number in area.bucket_numbers:
            with open_tensors(_bucket_file(folder, number), "pt") as opened:
                for meta, slot in split_bucket(area.buckets[number], area.bucket_memory(number)):
                    tensor = opened.get_tensor(_tensor_key(meta))
                    if tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
                        raise ChecksumMismatch(
                            f"weights in {folder} must match the manifest, got {tuple(tensor.shape)} {tensor.dtype} "
                            f"for {meta}; retrying the transfer"
                        )
                    # safetensors maps the file, which may change later. The checksum must cover the copy, since that
                    # is what will be loaded.
                    slot.copy_(_view_bytes(tensor))
            area.add_checksums(number)
    except (OSError, SafetensorError) as error:
        raise ChecksumMismatch(
            f"could not read all weights from the shared folder {folder}: {error}; mount the run's directory at every "
            "replica, or use another weights.transport"
        ) from error
    return area


def _bucket_file(folder: Path, number: int) -> Path:
    return folder / f"bucket-{number:05d}.safetensors"


def _tensor_key(meta: TensorMeta) -> str:
    # The owner is part of the key because policy and drafter have tensors with equal names, such as norm.weight.
    return f"{meta.owner.value}/{meta.name}"


def _view_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
