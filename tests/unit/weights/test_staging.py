"""The shares of a node's ranks make up the version, and shared memory ends with the processes that map it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.errors import CollectiveFailed
from specrl.records import TensorMeta, WeightManifest, WeightOwner
from specrl.weights.staging import BucketShare, StagingArea, merge_checksums, split_bucket

kinds = st.lists(
    st.tuples(st.sampled_from(("float32", "bfloat16", "int64", "bool")), st.lists(st.integers(0, 5), max_size=2)),
    max_size=12,
)


def a_manifest(found: list[tuple[str, list[int]]], bucket_bytes: int) -> WeightManifest:
    metas = (TensorMeta(f"t{n}", WeightOwner.POLICY, kind, tuple(shape)) for n, (kind, shape) in enumerate(found))
    return WeightManifest(tuple(metas), bucket_bytes)


def filled(manifest: WeightManifest, share: BucketShare) -> StagingArea:
    """Fill a staging area. Each byte of a tensor is the tensor's number in the manifest."""
    area = StagingArea(manifest, share)
    places = {meta: n for n, meta in enumerate(manifest.tensors)}
    for number in area.bucket_numbers:
        for meta, slot in split_bucket(area.buckets[number], area.bucket_memory(number)):
            slot.fill_(places[meta])
        area.add_checksums(number)
    return area


@settings(deadline=None)
@given(found=kinds, bucket_bytes=st.integers(1, 200), count=st.integers(1, 5))
def test_every_rank_maps_all_shares_of_the_version(
    found: list[tuple[str, list[int]]], bucket_bytes: int, count: int
) -> None:
    manifest = a_manifest(found, bucket_bytes)
    whole = filled(manifest, BucketShare())
    ranks = [filled(manifest, BucketShare(index, count)) for index in range(count)]
    assert merge_checksums(manifest, [rank.checksums for rank in ranks]) == whole.checksums
    for rank in ranks:
        gathered = rank.gather_tensors([other.address for other in ranks])
        assert [meta for meta, _ in gathered] == list(manifest.tensors)
        for (_, tensor), (_, expected) in zip(gathered, whole.gather_tensors([None]), strict=True):
            assert tensor.dtype == expected.dtype
            assert torch.equal(tensor.reshape(-1).view(torch.uint8), expected.reshape(-1).view(torch.uint8))


TWO = a_manifest([("int64", [4]), ("int64", [4])], 32)


def test_another_process_maps_the_memory_and_cannot_change_it() -> None:
    mine = filled(TWO, BucketShare(0, 2))
    program = f"""
from tests.unit.weights.test_staging import TWO, filled
from specrl.weights.staging import BucketShare
found = filled(TWO, BucketShare(1, 2)).gather_tensors([{mine.address}, None])
print([tensor.view(-1).tolist() for _, tensor in found])
found[0][1].fill_(9)
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root)
    assert done.stdout == f"{[[0] * 4, [0x0101010101010101] * 4]}\n"
    assert not mine.bucket_memory(0).any()


def test_shared_memory_ends_with_the_last_view_of_it() -> None:
    def shared() -> list[str]:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return [line for line in maps.splitlines() if "specrl-weights" in line]

    descriptors = set(Path("/proc/self/fd").iterdir())
    first = filled(TWO, BucketShare(0, 2))
    second = filled(TWO, BucketShare(1, 2))
    gathered = first.gather_tensors([first.address, second.address])
    del first, second
    assert len(shared()) == 2
    assert gathered[1][1].tolist() == [0x0101010101010101] * 4
    del gathered
    assert shared() == []
    assert set(Path("/proc/self/fd").iterdir()) == descriptors


def test_memory_that_cannot_be_mapped_raises_collective_failed(tmp_path: Path) -> None:
    area = filled(TWO, BucketShare(0, 2))
    another = tmp_path / "too-short"
    another.touch()
    with another.open() as opened:
        for address in ((os.getpid(), 9999), (2**22 + 1, 3), (os.getpid(), opened.fileno())):
            with pytest.raises(CollectiveFailed, match="could not map the staging memory of process"):
                area.gather_tensors([area.address, address])
