"""A version in a folder: whole or not there, and whatever happened to its files is found before it is used."""

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
FIRST, SECOND = "bucket-00000.safetensors", "bucket-00001.safetensors"


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        (meta.name, torch.arange(7 * number, 7 * number + torch.Size(meta.shape).numel()).reshape(meta.shape).to(dtype))
        for number, meta in enumerate(MANIFEST.tensors)
        for dtype in [getattr(torch, meta.dtype)]
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    files.write(tmp_path / "version", MANIFEST, some_tensors())
    return tmp_path / "version"


def test_what_is_written_is_read_with_the_same_checksums(tmp_path: Path) -> None:
    sums = files.write(tmp_path / "version", MANIFEST, some_tensors())
    area = files.read(tmp_path / "version", MANIFEST)
    assert area.checksums == sums
    for (meta, mine), expected_meta, (_, expected) in zip(area.tensors, MANIFEST.tensors, some_tensors(), strict=True):
        assert meta == expected_meta
        assert torch.equal(mine, expected)
    assert [path.name for path in tmp_path.iterdir()] == ["version"]


def test_what_was_read_stays_what_it_was_when_the_files_change(folder: Path) -> None:
    area = files.read(folder, MANIFEST)
    data = (folder / FIRST).read_bytes()
    with (folder / FIRST).open("r+b") as opened:
        opened.write(bytes(len(data)))
    for (_, mine), (_, expected) in zip(area.tensors, some_tensors(), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.parametrize("place", [-1, -13, -24])
def test_a_flipped_bit_changes_a_checksum(folder: Path, place: int) -> None:
    before = files.read(folder, MANIFEST).checksums
    data = bytearray((folder / SECOND).read_bytes())
    data[place] ^= 1
    (folder / SECOND).write_bytes(data)
    assert files.read(folder, MANIFEST).checksums != before


@pytest.mark.parametrize("size", [0, 7, 40, -1])
def test_a_torn_file_is_refused(folder: Path, size: int) -> None:
    (folder / SECOND).write_bytes((folder / SECOND).read_bytes()[:size])
    with pytest.raises(ChecksumMismatch, match="must be whole"):
        files.read(folder, MANIFEST)


def test_a_missing_file_or_folder_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / SECOND).unlink()
    with pytest.raises(ChecksumMismatch, match="the run's directory at every replica"):
        files.read(folder, MANIFEST)
    with pytest.raises(ChecksumMismatch):
        files.read(folder.with_name("another"), MANIFEST)


def test_tensors_of_another_shape_type_or_name_are_refused(folder: Path) -> None:
    for wrong in (
        {"policy/norm.weight": torch.zeros(7)},
        {"policy/norm.weight": torch.zeros(6)},
        {"other": torch.ones(1)},
    ):
        save_file(wrong, folder / FIRST)
        with pytest.raises(ChecksumMismatch):
            files.read(folder, MANIFEST)


def test_a_version_that_cannot_be_written_whole_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TrainerFailed):
        files.write(tmp_path / "version", MANIFEST, [*some_tensors()[:3], ("another", torch.zeros(1))])
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailed, match="make room"):
        files.write(tmp_path / "file" / "version", MANIFEST, some_tensors())
