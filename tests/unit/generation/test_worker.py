"""The worker extension without vLLM: staging, gathering shares, and when loading fails."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest
import torch
from tests.weight_sender import WeightSender, manifest_of

from specrl.errors import ChecksumMismatch, CollectiveFailed, DeadlineExceeded, EngineFailed
from specrl.generation.vllm_backend.extensions import worker
from specrl.records import TensorMeta, WeightManifest, WeightOwner
from specrl.weights import staging
from specrl.weights.arrival import ArrivalListener
from specrl.weights.staging import NamedTensors

LIMIT_S = 60.0
NOBODY = b"\0specrl-no-listener"
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
    assert worker.MANIFEST_CODEC.validate_json(worker.MANIFEST_CODEC.dump_json(manifest)) == manifest


async def test_received_weights_are_staged_and_can_be_discarded() -> None:
    sender = WeightSender()
    receiver = a_worker()
    manifest = manifest_of(TENSORS)
    answer, sent = await asyncio.gather(_receive(receiver, sender, manifest), sender.send(TENSORS, 1))
    share = worker.unwrap_answer(answer)
    assert share == {"checksums": list(sent.checksums), "address": None}
    assert worker.unwrap_answer(receiver.specrl_received()) == share  # as while another rank is slower
    assert worker.unwrap_answer(receiver.specrl_gather([share["address"]])) is None
    assert_whole(receiver, TENSORS)
    assert worker.unwrap_answer(receiver.specrl_discard()) is None
    assert receiver.specrl_staged is receiver.specrl_whole is None
    receiver._specrl_leave()
    sender.close()


def assert_whole(receiver: worker.WorkerExtension, expected: NamedTensors) -> None:
    assert receiver.specrl_whole is not None
    for (meta, tensor), (expected_meta, expected_tensor) in zip(receiver.specrl_whole, expected, strict=True):
        assert meta == expected_meta
        assert torch.equal(tensor, expected_tensor)


async def test_the_ranks_of_a_node_share_one_copy_and_each_gathers_all_of_it() -> None:
    """Two nodes of two ranks each; seven tensors in four buckets."""
    shapes = [(3, 2), (5,), (1, 4), (16384,), (7,), (2, 2, 2), (16384,)]
    tensors = [
        (TensorMeta(f"t{n}", WeightOwner.POLICY, "float32", shape), torch.rand(shape)) for n, shape in enumerate(shapes)
    ]
    manifest = manifest_of(tensors)
    sender = WeightSender(ranks=4)
    ranks = [a_worker(rank) for rank in range(4)]
    assert len(manifest.cut_buckets()) > 2
    *answers, sent = await asyncio.gather(
        *(_receive(rank, sender, manifest, ranks_of_node=2) for rank in ranks), sender.send(tensors, 1)
    )
    shares = [worker.unwrap_answer(answer) for answer in answers]
    for node in (shares[:2], shares[2:]):
        assert staging.merge_checksums(manifest, [share["checksums"] for share in node]) == sent.checksums
    kept = [0 if rank.specrl_staged is None else rank.specrl_staged._memory.numel() for rank in ranks]
    size = sum(meta.size_bytes for meta, _ in tensors)
    for node_bytes in (kept[0] + kept[1], kept[2] + kept[3]):
        assert size <= node_bytes < size + len(manifest.cut_buckets()) * staging.ALIGNMENT
    for rank in ranks:
        assert worker.unwrap_answer(rank.specrl_gather([share["address"] for share in shares])) is None
    for rank in (ranks[0], ranks[3]):
        worker.unwrap_answer(rank.specrl_discard())
    for rank in (ranks[1], ranks[2]):
        assert_whole(rank, tensors)  # although another rank of the node has discarded its share
    for rank in ranks:
        rank._specrl_leave()
    sender.close()


async def _receive(
    receiver: worker.WorkerExtension, sender: WeightSender, manifest: WeightManifest, ranks_of_node: int = 1
) -> worker.Answer:
    """Start a transfer and take its share when the worker says that it has ended, as the engine does."""
    assert worker.unwrap_answer(receiver.specrl_expect(worker.MANIFEST_CODEC.dump_json(manifest))) is None
    with ArrivalListener() as listener:
        started = receiver.specrl_receive(vars(sender.group()), ranks_of_node, listener.address)
        assert worker.unwrap_answer(started) is None
        assert await listener.wait_for_notification(LIMIT_S)
    return receiver.specrl_received()


async def test_a_failed_transfer_stages_nothing_and_leaves_the_group() -> None:
    sender = WeightSender(timeout_s=0.5)
    receiver = a_worker()
    answer = await _receive(receiver, sender, manifest_of(TENSORS))
    with pytest.raises((DeadlineExceeded, ConnectionError)):
        worker.unwrap_answer(answer)
    assert receiver.specrl_staged is None
    assert receiver.specrl_group is None
    sender.close()


async def test_a_worker_runs_one_transfer_at_a_time_and_polling_without_one_fails() -> None:
    sender = WeightSender(timeout_s=0.5)
    receiver = a_worker()
    manifest = manifest_of(TENSORS)
    worker.unwrap_answer(receiver.specrl_expect(worker.MANIFEST_CODEC.dump_json(manifest)))
    with pytest.raises(CollectiveFailed, match="no transfer is running"):
        worker.unwrap_answer(receiver.specrl_received())
    worker.unwrap_answer(receiver.specrl_receive(vars(sender.group()), 1, NOBODY))
    with pytest.raises(CollectiveFailed, match="transfer of a worker is still running"):
        worker.unwrap_answer(receiver.specrl_receive(vars(sender.group()), 1, NOBODY))
    while receiver.specrl_received() == {"value": None}:  # noqa: ASYNC110 - another thread
        await asyncio.sleep(0.002)
    sender.close()


def test_loading_fails_if_the_thread_count_changed() -> None:
    """Packed weights would silently give wrong products; see the docstring of `worker`."""
    receiver = a_worker()
    receiver.specrl_whole = list(TENSORS)
    receiver.specrl_threads = torch.get_num_threads() + 1
    with pytest.raises(EngineFailed, match="threads"):
        worker.unwrap_answer(receiver.specrl_load())


def test_a_changed_thread_count_does_not_matter_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is packed for threads there. Once a library that set them stopped a healthy replica."""
    assert worker._count_packing_threads() == torch.get_num_threads()
    monkeypatch.setattr("vllm.platforms.current_platform", SimpleNamespace(is_cpu=lambda: False))
    loaded = list[object]()
    receiver = a_worker()
    receiver.specrl_threads = worker._count_packing_threads()
    receiver.specrl_whole = list(TENSORS)
    receiver.model_runner = SimpleNamespace(get_model=lambda: "policy", get_draft_model=lambda: "drafter")
    speculative = SimpleNamespace(method="eagle3", draft_model_config=None)
    receiver.vllm_config = SimpleNamespace(model_config=None, speculative_config=speculative)
    monkeypatch.setattr(receiver, "_specrl_load_into", lambda model, config, tensors: loaded.append(model))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 99)
    worker.unwrap_answer(receiver.specrl_load())
    assert loaded == ["policy", "drafter"]


def test_errors_keep_their_class_when_returned_as_data() -> None:
    @worker.return_answer
    def halve(number: int) -> int:
        if number % 2:
            raise ChecksumMismatch("corrupt")
        return number // 2

    with pytest.raises(ChecksumMismatch, match="corrupt"):
        worker.unwrap_answer(halve(3))
    assert worker.unwrap_answer(halve(6)) == 3
