"""Calls to all ranks, and what happens when ranks end a call differently. Without processes."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from fsspec.implementations.local import LocalFileSystem
from google.protobuf.empty_pb2 import Empty
from google.protobuf.message import Message
from google.protobuf.wrappers_pb2 import StringValue
from tests.integration.trainer.runs import a_batch, a_spec
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.api.v1 import trainer_pb2
from specrl.errors import MemoryTooSmall, PeerUnavailable, RecordInvalid, VersionConflict
from specrl.records import Batch, TrainMetrics, wire
from specrl.spec.run import Checkpoint
from specrl.trainer import service
from specrl.trainer.calls import RANK_0_MAY_REFUSE, RankCalls, add_share, list_rollouts
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.memory.exhaustion import report_exhaustion
from specrl.trainer.ranks import AllRanks, RankLost, decode_call, encode_call, follow_rank_0
from specrl.trainer.service import TrainerService

VOCAB = 16
PLACE = trainer_pb2.StreamPlace(cursor=10, identity="\n")  # contains the byte that separates name and request
OF_RANK_0 = {"GetTrainerStatus"}  # calls that rank 0 answers without the other ranks


class FakeControl:
    """The control group of rank 0 of two ranks. The other rank always has the same outcome."""

    rank = 0
    world_size = 2

    def __init__(self, others_outcome: int = 0) -> None:
        self.sent: list[bytes] = []
        self.others_outcome = others_outcome

    def send_message(self, message: bytes) -> None:
        self.sent.append(message)

    def receive_message(self) -> bytes:
        return self.sent.pop(0)

    def gather_outcomes(self, outcome: int) -> list[int]:
        return [outcome, self.others_outcome]


def loaded() -> StandInBackend:
    backend = StandInBackend(VOCAB)
    backend.load_model(None)
    return backend


def calls_of(backend: StandInBackend, run: Path = Path("run")) -> RankCalls:
    return RankCalls(backend, a_spec(run), run, "127.0.0.1")


def two_ranks(others_outcome: int = 0, run: Path = Path("run")) -> tuple[AllRanks, FakeControl]:
    control = FakeControl(others_outcome)
    return AllRanks(calls_of(loaded(), run), control), control  # type: ignore[arg-type]  # for the Gloo group


def a_step(step: int) -> trainer_pb2.TrainPartsRequest:
    batch = wire.batch_to_wire(a_batch(step, VOCAB))
    return trainer_pb2.TrainPartsRequest(batch=batch, rollouts_total=len(batch.rollouts))


@pytest.mark.parametrize(
    ("name", "request_"),
    [
        ("TrainParts", a_step(1)),
        ("TrainSupervised", a_step(1).batch),
        (
            "TrainDrafter",
            trainer_pb2.TrainDrafterRequest(rollouts=a_step(1).batch.rollouts, epochs=[trainer_pb2.DrafterEpoch()]),
        ),
        (
            "SaveCheckpoint",
            trainer_pb2.SaveCheckpointRequest(step=10, stream=trainer_pb2.StreamPlace(cursor=10, identity="\n")),
        ),
        ("Load", StringValue(value="run/checkpoints/step-000001")),
        ("Load", StringValue()),
        ("Close", Empty()),
    ],
)
def test_decode_returns_the_encoded_call(name: str, request_: Message) -> None:
    assert decode_call(encode_call(name, request_)) == (name, request_)


def test_rank_calls_cover_every_rpc() -> None:
    """RankCalls has a method for each RPC, with the request type of the proto."""
    service = trainer_pb2.DESCRIPTOR.services_by_name["TrainerService"]
    for method in service.methods:
        assert method.name in vars(TrainerService)
        if method.name not in OF_RANK_0:
            hints = get_type_hints(getattr(RankCalls, method.name))
            assert hints["request"].DESCRIPTOR is method.input_type, method.name
    assert set(RANK_0_MAY_REFUSE) < {method.name for method in service.methods}


def test_another_rank_gets_the_weights_of_rank_0_and_rejects_the_same_requests(tmp_path: Path) -> None:
    first = loaded()
    other = StandInBackend(VOCAB)
    control = FakeControl()
    ranks = AllRanks(calls_of(first, tmp_path), control)  # type: ignore[arg-type]
    ranks.load_checkpoint(None)
    ranks.run_call(RankCalls.TrainParts, a_step(1))
    control.others_outcome = 1
    with pytest.raises(VersionConflict):
        ranks.run_call(RankCalls.TrainParts, a_step(3))
    with pytest.raises(RecordInvalid, match="epochs must be"):
        ranks.run_call(RankCalls.TrainDrafter, trainer_pb2.TrainDrafterRequest(rollouts=a_step(1).batch.rollouts))
    control.others_outcome = 0
    ranks.run_call(RankCalls.Close, Empty())

    class Other(FakeControl):
        """The control group of rank 1. Rank 0 has the same outcomes."""

        def gather_outcomes(self, outcome: int) -> list[int]:
            return [outcome, outcome]

    of_other = Other()
    of_other.sent = control.sent
    follow_rank_0(calls_of(other, tmp_path), of_other)  # type: ignore[arg-type]
    assert control.sent == []
    assert other.get_status() == first.get_status()
    assert np.array_equal(other.policy_VV, first.policy_VV)


def test_error_of_all_ranks_is_raised_as_it_is() -> None:
    ranks, _ = two_ranks(others_outcome=1)
    with pytest.raises(VersionConflict):
        ranks.run_call(RankCalls.TrainParts, a_step(2))


@pytest.mark.parametrize(("step", "others_outcome"), [(1, 1), (2, 0)])
def test_different_outcomes_of_a_step_raise_rank_lost(step: int, others_outcome: int) -> None:
    ranks, _ = two_ranks(others_outcome)
    with pytest.raises(RankLost, match="trainer ranks disagree on"):
        ranks.run_call(RankCalls.TrainParts, a_step(step))


def test_rank_0_alone_may_fail_to_broadcast() -> None:
    ranks, _ = two_ranks(others_outcome=0)
    with pytest.raises(VersionConflict):
        ranks.run_call(RankCalls.BroadcastWeights, trainer_pb2.BroadcastWeightsRequest(group_id="unknown"))


def test_broken_connection_raises_rank_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, control = two_ranks()

    def broken(message: bytes) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(control, "send_message", broken)
    with pytest.raises(RankLost, match="Connection closed"):
        ranks.run_call(RankCalls.CheckAlive, Empty())


async def test_other_ranks_hear_of_rank_0_while_it_fetches_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They waited for its first call in silence, and gave up after an hour. So a larger mirror was never restored."""
    spec = a_spec(tmp_path).model_copy(update={"checkpoint": Checkpoint(mirror=f"file://{tmp_path}/mirror")})
    first = TrainerService(loaded(), spec, tmp_path / "first", "127.0.0.1")
    await first.load_model()
    await first.SaveCheckpoint(trainer_pb2.SaveCheckpointRequest(step=0), None)
    await first.close()
    control = FakeControl()
    fetch_file = LocalFileSystem.get_file

    def fetch_slowly(*arguments: Any, **options: Any) -> None:
        known = len(control.sent)
        deadline = time.monotonic() + 20
        while len(control.sent) == known:
            assert time.monotonic() < deadline, "no call reached the other ranks"
            time.sleep(0.01)
        fetch_file(*arguments, **options)

    monkeypatch.setattr(LocalFileSystem, "get_file", fetch_slowly)
    monkeypatch.setattr(service, "IDLE_CHECK_S", 0.02)
    second = TrainerService(loaded(), spec, tmp_path / "second", "127.0.0.1", control)  # type: ignore[arg-type]
    await second.load_model()
    calls = [decode_call(message) for message in control.sent]
    checkpoint = checkpoints.step_directory(tmp_path / "second", 0)
    assert calls[0] == ("CheckAlive", Empty())
    assert calls[-1] == ("Load", StringValue(value=str(checkpoint)))
    await second.close()


def test_a_rank_that_ends_while_rank_0_fetches_a_checkpoint_ends_the_trainer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fetch went on, and the process waited for its thread."""
    spec = a_spec(tmp_path).model_copy(update={"checkpoint": Checkpoint(mirror=f"file://{tmp_path}/mirror")})
    control = FakeControl(others_outcome=1)
    may_end, has_ended = threading.Event(), threading.Event()

    def wait(*_arguments: Any, **_options: Any) -> bool:
        may_end.wait(20)
        has_ended.set()
        return False

    async def load() -> None:
        await TrainerService(loaded(), spec, tmp_path / "run", "127.0.0.1", control).load_model()  # type: ignore[arg-type]

    monkeypatch.setattr(LocalFileSystem, "exists", wait)
    monkeypatch.setattr(service, "IDLE_CHECK_S", 0.02)
    with pytest.raises(RankLost):
        asyncio.run(load())
    assert not has_ended.is_set()
    may_end.set()


def test_unexpected_error_raises_rank_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, _ = two_ranks()
    monkeypatch.setattr(StandInBackend, "train_step", lambda *_: np.zeros(1)[5])
    with pytest.raises(RankLost, match="IndexError"):
        ranks.run_call(RankCalls.TrainParts, a_step(1))


def two_replicas(run: Path) -> tuple[RankCalls, FakeControl]:
    return RankCalls(loaded(), a_spec(run, data=2), run, "127.0.0.1"), FakeControl()


@pytest.mark.parametrize("kind", ["TrainParts", "TrainSupervised", "Score"])
def test_a_replica_gets_its_rollouts_and_outlines_of_the_others(tmp_path: Path, kind: str) -> None:
    whole = a_step(1)
    requests = {
        "TrainParts": whole,
        "TrainSupervised": whole.batch,
        "Score": trainer_pb2.ScoreRequest(rollouts=whole.batch.rollouts),
    }
    calls, _ = two_replicas(tmp_path)
    shared = calls.share_rollouts(requests[kind])
    assert shared is not None
    assert sorted(index for share in shared.indices for index in share) == list(range(len(whole.batch.rollouts)))
    for replica, mine in enumerate(shared.indices):
        received = type(shared.outline).FromString(shared.outline.SerializeToString())
        add_share(received, shared.encode_share(replica))
        for index, (item, sent) in enumerate(zip(list_rollouts(received), whole.batch.rollouts, strict=True)):
            assert item == sent if index in mine else item.HasField("outline")


def test_rollout_of_another_replica_is_rejected_before_anything_is_sent(tmp_path: Path) -> None:
    """The ranks that do not get it could not reject it, and would no longer agree with rank 0."""
    calls, control = two_replicas(tmp_path)
    ranks = AllRanks(calls, control)  # type: ignore[arg-type]
    for place in range(len(a_step(1).batch.rollouts)):
        request = a_step(1)
        request.batch.rollouts[place].rollout.packed_token_ids = np.int32([VOCAB]).tobytes()
        with pytest.raises(RecordInvalid):
            ranks.run_call(RankCalls.TrainParts, request)
    assert control.sent == []


@pytest.mark.parametrize("data", [1, 2])
def test_an_outline_from_outside_is_rejected(tmp_path: Path, data: int) -> None:
    calls = RankCalls(loaded(), a_spec(tmp_path, data=data), tmp_path, "127.0.0.1")
    request = a_step(1)
    request.batch.rollouts[2].CopyFrom(wire.outline_train_rollout(request.batch.rollouts[2]))
    for control in (None, FakeControl()):
        with pytest.raises(RecordInvalid, match="rollouts must have tokens, got an outline"):
            AllRanks(calls, control).run_call(RankCalls.TrainParts, request)  # type: ignore[arg-type]


def test_lost_rank_is_not_retryable() -> None:
    assert not RankLost.retryable
    assert PeerUnavailable.retryable


class HungryBackend(StandInBackend):
    """Runs out of memory in every step."""

    def __init__(self, error: BaseException) -> None:
        super().__init__(VOCAB)
        self.error = error

    def train_step(self, batch: Batch) -> TrainMetrics:
        raise self.error


class Alone(FakeControl):
    """The control group of rank 1, whose other ranks are still in the middle of the call."""

    def gather_outcomes(self, outcome: int) -> list[int]:
        raise AssertionError("waited for ranks that wait for this one")


def of_cpu_allocator() -> RuntimeError:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(10**15)
    return caught.value


@pytest.mark.parametrize(
    ("error", "size"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.10 GiB. GPU 0 has a total"), "9.10 GiB"),
        (of_cpu_allocator(), "4000000000000000 bytes"),
        (MemoryError(), "an unknown size"),
    ],
)
def test_a_rank_without_memory_ends_at_once_and_says_what_to_change(error: Exception, size: str) -> None:
    """It was RankLost and exit code 1, so that the launcher restarted the ranks and sent the same batch, for ever."""
    expected = (
        rf"rank 0 ran out of memory in a training step: it tried to allocate {size}, but .* GiB are free.*; lower"
    )
    backend = HungryBackend(error)
    backend.load_model(None)
    for control in (None, Alone()):
        ranks = AllRanks(calls_of(backend), control)  # type: ignore[arg-type]  # for the Gloo group
        with pytest.raises(MemoryTooSmall, match=expected) as caught:
            ranks.run_call(RankCalls.TrainParts, a_step(1))
        assert caught.value.exit_code == 2
    of_other = Alone()
    of_other.sent = [encode_call("TrainParts", a_step(1))]
    with pytest.raises(MemoryTooSmall, match=expected):
        follow_rank_0(calls_of(backend), of_other)  # type: ignore[arg-type]


def test_the_innermost_phase_is_named_and_other_errors_pass() -> None:
    with (
        pytest.raises(MemoryTooSmall, match=r"memory in the update: .*; buy more"),
        report_exhaustion("a step", "wait"),
        report_exhaustion("the update", "buy more"),
    ):
        raise MemoryError
    with pytest.raises(RuntimeError, match="shapes"), report_exhaustion("a step", "wait"):
        raise RuntimeError("shapes differ")
