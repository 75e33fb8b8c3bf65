"""A version in a shared folder is complete or absent, and damage to its files is detected."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from specrl.errors import ChecksumMismatch, StoreFailed, TrainerFailed
from specrl.records import TensorMeta, WeightManifest, WeightOwner
from specrl.weights import files

MANIFEST = WeightManifest(
    (
        TensorMeta("norm.weight", WeightOwner.POLICY, "bfloat16", (6,)),
        TensorMeta("layer.weight", WeightOwner.POLICY, "float32", (4, 3)),
        TensorMeta("norm.weight", WeightOwner.DRAFTER, "bfloat16", (6,)),
        TensorMeta("d2t", WeightOwner.DRAFTER, "int64", (5,)),
    ),
    64,
)
FIRST = "bucket-00000.safetensors"
SECOND = "bucket-00001.safetensors"


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        (meta.name, torch.arange(7 * number, 7 * number + torch.Size(meta.shape).numel()).reshape(meta.shape).to(dtype))
        for number, meta in enumerate(MANIFEST.tensors)
        for dtype in [getattr(torch, meta.dtype)]
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write_version(tmp_path / "version", MANIFEST, some_tensors())
    return tmp_path / "version"


def test_read_returns_the_written_tensors_with_the_same_checksums(tmp_path: Path) -> None:
    sums = files.write_version(tmp_path / "version", MANIFEST, some_tensors())
    area = files.read_version(tmp_path / "version", MANIFEST)
    assert area.checksums == sums
    for (meta, mine), expected_meta, (_, expected) in zip(
        area.gather_tensors([None]), MANIFEST.tensors, some_tensors(), strict=True
    ):
        assert meta == expected_meta
        assert torch.equal(mine, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["version"]


def test_read_tensors_do_not_change_with_the_files(folder: Path) -> None:
    area = files.read_version(folder, MANIFEST)
    data = (folder / FIRST).read_bytes()
    with (folder / FIRST).open("r+b") as opened:
        opened.write(bytes(len(data)))
    for (_, mine), (_, expected) in zip(area.gather_tensors([None]), some_tensors(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("place", [-1, -13, -24])
def test_a_flipped_bit_changes_a_checksum(folder: Path, place: int) -> None:
    before = files.read_version(folder, MANIFEST).checksums
    data = bytearray((folder / SECOND).read_bytes())
    data[place] ^= 1
    (folder / SECOND).write_bytes(data)
    assert files.read_version(folder, MANIFEST).checksums != before


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_a_truncated_file_is_rejected(folder: Path, size: int) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:size])
    with pytest.raises(ChecksumMismatch, match="could not read all weights"):
        files.read_version(folder, MANIFEST)


def test_a_missing_file_or_folder_is_rejected_with_a_remedy(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(ChecksumMismatch, match="the run's directory at every replica"):
        files.read_version(folder, MANIFEST)
    with pytest.raises(ChecksumMismatch):
        files.read_version(folder.with_name("another"), MANIFEST)


def test_tensors_of_another_shape_dtype_or_name_are_rejected(folder: Path) -> None:
    for wrong in (
        {"policy/norm.weight": torch.zeros(7)},
        {"policy/norm.weight": torch.zeros(6)},
        {"other": torch.ones(1)},
    ):
        save_file(wrong, folder / FIRST)
        with pytest.raises(ChecksumMismatch):
            files.read_version(folder, MANIFEST)


def test_a_failed_write_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(TrainerFailed):
        files.write_version(tmp_path / "version", MANIFEST, [*some_tensors()[:3], ("another", torch.zeros(1))])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match=r"could not write weights to .*; free space"):
        files.write_version(tmp_path / "file" / "version", MANIFEST, some_tensors())
