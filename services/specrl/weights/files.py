"""One version as files in a folder that trainer and replicas share, where they can form no collective.

    writing into a hidden folder --renamed--> the version's folder      whole, or not there

One safetensors file for each bucket, so that neither side holds more than that beside its own copy. Checksums are of
the same bytes as those of a broadcast, taken before writing and after reading.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specrl.errors import ChecksumMismatch, StoreFailed
from specrl.records import TensorMeta, WeightManifest
from specrl.weights.staging import WHOLE, Share, StagingArea, checksum, slots
from specrl.weights.stream import check_meta


def write(folder: Path, manifest: WeightManifest, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[int, ...]:
    """Write tensors in manifest order into `folder`, which must not exist; returns their checksums.

    Raises TrainerFailed when `tensors` disagree with the manifest, StoreFailed when the folder cannot be written.
    """
    stream = iter(tensors)
    checksums: list[int] = []
    scratch = folder.with_name(f".{folder.name}.tmp")
    try:
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir(parents=True)
        for number, bucket in enumerate(manifest.buckets()):
            whole = {}
            for meta in bucket:
                name, tensor = next(stream)
                check_meta(meta, name, tensor)
                whole[_key(meta)] = tensor.detach().to("cpu", copy=True).contiguous()
                checksums.append(checksum(_bytes(whole[_key(meta)])))
            save_file(whole, _file(scratch, number))
        scratch.rename(folder)
    except (OSError, SafetensorError) as error:
        raise StoreFailed(f"weights must be written to {folder}, got {error}; make room on the disk") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return tuple(checksums)


def read(folder: Path, manifest: WeightManifest, share: Share = WHOLE) -> StagingArea:
    """Read a version's share into memory of its own. Returns it with its checksums.

    Raises ChecksumMismatch when a file is missing, torn or not the manifest's: the transfer may be repeated.
    """
    area = StagingArea(manifest, share)
    try:
        for number in area.kept:
            with safe_open(_file(folder, number), framework="pt") as opened:
                for meta, slot in slots(area.buckets[number], area.bucket(number)):
                    tensor = opened.get_tensor(_key(meta))
                    if tuple(tensor.shape) != meta.shape or str(tensor.dtype) != f"torch.{meta.dtype}":
                        raise ChecksumMismatch(
                            f"weights in {folder} must be the manifest's, got {tuple(tensor.shape)} {tensor.dtype} for "
                            f"{meta}; the transfer is repeated"
                        )
                    # Summed is the copy: what is loaded later is that, whatever becomes of the file.
                    slot.copy_(_bytes(tensor))
            area.sum(number)
    except (OSError, SafetensorError) as error:
        raise ChecksumMismatch(
            f"weights must be whole in a folder that trainer and replicas share, got {folder}: {error}; mount the "
            "run's directory at every replica, or use another weights.transport"
        ) from error
    return area


def _file(folder: Path, number: int) -> Path:
    return folder / f"bucket-{number:05d}.safetensors"


def _key(meta: TensorMeta) -> str:
    """Policy and drafter have tensors of one name."""
    return f"{meta.owner.value}/{meta.name}"


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
