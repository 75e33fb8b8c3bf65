"""The worker's methods without vLLM: what is staged, who is told, and when loading is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
from tests.weight_sender import WeightSender, manifest_of

from specrl.errors import ChecksumMismatch, CollectiveFailed, DeadlineExceeded, EngineFailed
from specrl.generation.vllm_backend import worker
from specrl.records import TensorMeta, WeightManifest, WeightOwner

TENSORS = [
    (TensorMeta("a", WeightOwner.POLICY, "float32", (3, 2)), torch.arange(6.0).reshape(3, 2)),
    (TensorMeta("b", WeightOwner.DRAFTER, "int64", (4,)), torch.arange(4)),
]


def a_worker(rank: int = 0) -> worker.WorkerExtension:
    found = worker.WorkerExtension()
    found.rank = rank
    return found


def test_manifest_survives_vllms_encoding() -> None:
    manifest = manifest_of(TENSORS)
    assert worker.manifest_from_rows(worker.manifest_to_rows(manifest), manifest.bucket_bytes) == manifest


async def test_what_arrives_is_staged_and_can_be_dropped() -> None:
    sender, receiver, manifest = WeightSender(), a_worker(), manifest_of(TENSORS)
    answer, sent = await asyncio.gather(_receive(receiver, sender, manifest), sender.send(TENSORS, 1))
    assert worker.unwrap(answer) == list(sent.checksums)
    assert worker.unwrap(receiver.specrl_received()) == list(sent.checksums)  # as while another rank is slower
    assert receiver.specrl_staged is not None
    tensors, _ = receiver.specrl_staged
    for (meta, tensor), (expected_meta, expected) in zip(tensors, TENSORS, strict=True):
        assert meta == expected_meta
        assert torch.equal(tensor, expected)
    assert worker.unwrap(receiver.specrl_discard()) is None
    assert receiver.specrl_staged is None
    receiver._specrl_leave()
    sender.close()


async def _receive(receiver: worker.WorkerExtension, sender: WeightSender, manifest: WeightManifest) -> worker.Answer:
    """Begin, and ask until everything has arrived, as the engine does."""
    rows = worker.manifest_to_rows(manifest)
    assert worker.unwrap(receiver.specrl_receive(vars(sender.group()), rows, manifest.bucket_bytes)) is None
    while (answer := receiver.specrl_received()) == {"value": None}:  # noqa: ASYNC110 - another thread
        await asyncio.sleep(0.002)
    return answer


async def test_broken_transfer_stages_nothing_and_leaves_the_group() -> None:
    sender, receiver = WeightSender(timeout_s=0.5), a_worker()
    answer = await _receive(receiver, sender, manifest_of(TENSORS))
    with pytest.raises((DeadlineExceeded, ConnectionError)):
        worker.unwrap(answer)
    assert receiver.specrl_staged is None
    assert receiver.specrl_group is None
    sender.close()


async def test_one_transfer_at_a_time_and_none_is_received_that_was_not_begun() -> None:
    sender, receiver, manifest = WeightSender(timeout_s=0.5), a_worker(), manifest_of(TENSORS)
    rows = worker.manifest_to_rows(manifest)
    with pytest.raises(CollectiveFailed, match="got nothing"):
        worker.unwrap(receiver.specrl_received())
    worker.unwrap(receiver.specrl_receive(vars(sender.group()), rows, manifest.bucket_bytes))
    with pytest.raises(CollectiveFailed, match="one transfer at a time"):
        worker.unwrap(receiver.specrl_receive(vars(sender.group()), rows, manifest.bucket_bytes))
    while receiver.specrl_received() == {"value": None}:  # noqa: ASYNC110 - another thread
        await asyncio.sleep(0.002)
    sender.close()


def test_loading_is_refused_when_the_thread_count_changed() -> None:
    """Packed weights would silently give wrong products; see the module's docstring."""
    receiver = a_worker()
    receiver.specrl_staged, receiver.specrl_threads = (list(TENSORS), ()), torch.get_num_threads() + 1
    with pytest.raises(EngineFailed, match="threads"):
        worker.unwrap(receiver.specrl_load())


def test_errors_keep_their_class_through_data() -> None:
    def fail() -> Any:
        raise ChecksumMismatch("corrupt")

    with pytest.raises(ChecksumMismatch, match="corrupt"):
        worker.unwrap(worker._answer(fail))
    assert worker.unwrap(worker._answer(lambda: 3)) == 3
