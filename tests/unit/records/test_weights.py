"""Both sides cut the weight stream the same way, and a corrupt tensor is named."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import ChecksumMismatch
from specrl.records import TensorMeta, WeightChecksums, WeightManifest, WeightOwner
from specrl.records.weights import ITEM_BYTES

tensors = st.lists(
    st.builds(
        TensorMeta,
        name=st.text(min_size=1, max_size=5),
        owner=st.sampled_from(WeightOwner),
        dtype=st.sampled_from(sorted(ITEM_BYTES)),
        shape=st.lists(st.integers(0, 9), max_size=3).map(tuple),
    ),
    max_size=20,
).map(tuple)


@given(tensors=tensors, bucket_bytes=st.integers(1, 2000))
def test_buckets_are_the_tensors_in_order(tensors: tuple[TensorMeta, ...], bucket_bytes: int) -> None:
    buckets = WeightManifest(tensors, bucket_bytes).cut_buckets()
    assert tuple(tensor for bucket in buckets for tensor in bucket) == tensors
    assert all(buckets), "no bucket is empty"


@given(tensors=tensors, bucket_bytes=st.integers(1, 2000))
def test_a_bucket_exceeds_its_size_only_for_a_tensor_that_is_larger_alone(
    tensors: tuple[TensorMeta, ...], bucket_bytes: int
) -> None:
    for bucket in WeightManifest(tensors, bucket_bytes).cut_buckets():
        carried = [tensor for tensor in bucket if tensor.size_bytes]
        assert sum(tensor.size_bytes for tensor in bucket) <= bucket_bytes or len(carried) == 1


@given(tensors=tensors, bucket_bytes=st.integers(1, 2000))
def test_a_bucket_is_closed_only_when_the_next_tensor_does_not_fit(
    tensors: tuple[TensorMeta, ...], bucket_bytes: int
) -> None:
    buckets = WeightManifest(tensors, bucket_bytes).cut_buckets()
    for bucket, following in pairwise(buckets):
        assert sum(tensor.size_bytes for tensor in bucket) + following[0].size_bytes > bucket_bytes


def test_sizes_are_bytes() -> None:
    weight = TensorMeta("w", WeightOwner.POLICY, "bfloat16", (3, 4))
    scalar = TensorMeta("s", WeightOwner.DRAFTER, "int64", ())
    assert (weight.size_bytes, scalar.size_bytes) == (24, 8)
    assert WeightManifest((weight, scalar), 1).size_bytes == 32


def test_equal_checksums_pass_and_corrupt_tensors_are_named() -> None:
    sent = WeightChecksums(7, (1, 2, 3))
    WeightChecksums(7, (1, 2, 3)).check_equal(sent, ["a", "b", "c"])
    with pytest.raises(ChecksumMismatch, match="2 tensors of version 7 arrived corrupt, among them a, c"):
        WeightChecksums(7, (0, 2, 0)).check_equal(sent, ["a", "b", "c"])
    with pytest.raises(ChecksumMismatch, match="3 tensors of version 6 arrived, but the trainer sent 3 of version 7"):
        WeightChecksums(6, (1, 2, 3)).check_equal(sent, ["a", "b", "c"])
    with pytest.raises(ChecksumMismatch, match="2 tensors of version 7 arrived, but the trainer sent 3"):
        WeightChecksums(7, (1, 2)).check_equal(sent, ["a", "b", "c"])
