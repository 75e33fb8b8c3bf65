"""Records survive the wire bit for bit, and unreadable messages raise RecordInvalid."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from specrl.api.v1 import coordinator_pb2, rollout_pb2, trainer_pb2, weights_pb2
from specrl.errors import RecordInvalid
from specrl.records import (
    Batch,
    DrafterMetrics,
    Drafting,
    FinishReason,
    GenerationStatus,
    GradedRollout,
    HeldRollout,
    NamedReward,
    OutputSpan,
    Peer,
    Reward,
    Role,
    Rollout,
    RolloutRequest,
    Sampling,
    SamplingSets,
    SpeculationCounters,
    StepCost,
    StreamPlace,
    TensorMeta,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    VersionSpan,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
    wire,
)
from specrl.records.status import DRAFTING_STATES
from specrl.telemetry.training_figures import FIGURES

text = st.text(max_size=12)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)


def many(elements: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


samplings = st.builds(Sampling, int32, number, number, int32, st.none() | int64, many(text))
requests = st.builds(RolloutRequest, text, text, int32, many(int32), samplings)
experts = st.builds(
    lambda shape, kind: np.arange(np.prod(shape)).astype(kind).reshape(shape),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([np.uint8, np.uint16]),
)
sets = st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=3), min_size=1, max_size=4).map(
    SamplingSets.from_lists
)
rollouts = st.builds(
    Rollout,
    rollout_id=text,
    group_id=text,
    sample_index=int32,
    token_ids_T=st.lists(int32, max_size=6).map(lambda ids: np.array(ids, np.int32)),
    sampler_logprobs_T=st.lists(st.floats(width=32), max_size=6).map(lambda values: np.array(values, np.float32)),
    versions=many(st.builds(VersionSpan, int64, int32, int32)),
    finish_reason=st.sampled_from(FinishReason),
    replica_id=text,
    text=text,
    seconds=number,
    outputs=many(st.builds(OutputSpan, int32, int32)),
    stop=text,
    experts_SLK=st.none() | experts,
    sets=st.none() | sets,
)
textless_rollouts = rollouts.map(lambda rollout: replace(rollout, text=""))  # as trainers get them
plain_rewards = st.builds(Reward, st.none() | number, text)
named_rewards = st.builds(NamedReward, text, number, plain_rewards)
rewards = st.builds(Reward, st.none() | number, text, named=st.lists(named_rewards, max_size=2).map(tuple))
batches = st.builds(Batch, int64, many(st.builds(TrainRollout, many(int32), rollouts, number), 3), many(int64))
tensors = st.builds(
    TensorMeta, text, st.sampled_from(WeightOwner), st.sampled_from(["float32", "bfloat16"]), many(st.integers(0, 2**9))
)
manifests = st.builds(
    WeightManifest,
    st.lists(tensors, min_size=1, max_size=4, unique_by=lambda tensor: (tensor.owner, tensor.name)).map(tuple),
    st.integers(1, 2**40),
)
checksums = st.builds(WeightChecksums, int64, many(st.integers(0, 2**64 - 1)), int64)
weight_groups = st.builds(WeightGroup, text, text, int32, int32, int32, number, text)
count = st.integers(0, 2**63 - 1)
counters = st.builds(SpeculationCounters, count, count, count, many(count), count)
draftings = st.builds(Drafting, st.sampled_from(DRAFTING_STATES), st.floats(0, 9), st.none() | st.floats(0, 9))
step_costs = st.builds(
    StepCost, st.integers(0, 9), st.integers(1, 9), st.floats(0, 9), st.floats(0, 9), st.floats(0, 9)
)
statuses = st.builds(
    GenerationStatus,
    text,
    int64,
    st.booleans(),
    st.integers(0, 2**31 - 1),
    counters,
    int64,
    st.none() | draftings,
    many(step_costs),
)
drafter_metrics = st.builds(DrafterMetrics, number, number, many(number), number)
train_metrics = st.builds(
    TrainMetrics,
    **{name: int32 if name == "mismatch_tokens" else number for name in FIGURES},
    tokens=int64,
    logprob_seconds=number,
    train_seconds=number,
    updates=int64,
    is_skipped=st.booleans(),
    drafter=st.none() | drafter_metrics,
)
stream_places = st.builds(
    StreamPlace,
    st.integers(0, 2**40),
    st.integers(1, 2**40),
    st.text("0123456789abcdef", min_size=1, max_size=32),
)
trainer_statuses = st.builds(TrainerStatus, int64, int64, st.booleans(), int32, st.none() | stream_places)


def plain(record: Any) -> Any:
    """Convert a record to nested tuples, with arrays by type and bits: NaN equals NaN, and 0.0 differs from -0.0."""
    if isinstance(record, np.ndarray):
        return (record.dtype.str, record.shape, record.tobytes())
    if is_dataclass(record):
        return (type(record), *(plain(getattr(record, field.name)) for field in fields(record)))
    if isinstance(record, BaseModel):
        return (type(record), *((name, plain(value)) for name, value in record))
    if isinstance(record, tuple | list):
        return tuple(plain(item) for item in record)
    return (type(record), repr(record))


KINDS = [
    ("request", requests),
    ("reward", rewards),
    ("rollout", rollouts),
    ("train_rollout", st.builds(TrainRollout, many(int32), textless_rollouts, number, number)),
    ("batch", batches),
    ("manifest", manifests),
    ("checksums", checksums),
    ("weight_group", weight_groups),
    ("generation_status", statuses),
    ("drafter_metrics", drafter_metrics),
    ("train_metrics", train_metrics),
    ("trainer_status", trainer_statuses),
]


@pytest.mark.parametrize(("kind", "records"), KINDS, ids=[kind for kind, _ in KINDS])
@given(data=st.data())
def test_a_record_survives_the_wire(kind: str, records: st.SearchStrategy[Any], data: st.DataObject) -> None:
    record = data.draw(records)
    message = getattr(wire, f"{kind}_to_wire")(record)
    received = type(message).FromString(message.SerializeToString())
    assert plain(getattr(wire, f"{kind}_from_wire")(received)) == plain(record)


@pytest.mark.parametrize("role", Role)
def test_a_registration_survives_the_wire(role: Role) -> None:
    peer = Peer("gen-0", role, "127.0.0.1:1", "digest", "incarnation", 9)
    status = GenerationStatus("gen-0", 3, is_paused=False, live_requests=0)
    held = [HeldRollout("1-0-0-0", 3)]
    message = wire.registration_to_wire(peer, status, held)
    assert wire.peer_from_wire(message) == peer
    assert wire.generation_status_from_wire(message.generation) == status
    assert [wire.held_from_wire(item) for item in message.held_rollouts] == held
    assert not wire.registration_to_wire(peer, None, []).HasField("generation")


@given(batch=batches)
def test_a_batch_survives_a_round_trip_with_equal_bytes(batch: Batch) -> None:
    data = wire.batch_to_bytes(batch)
    assert plain(wire.batch_from_bytes(data)) == plain(batch)
    assert wire.batch_to_bytes(wire.batch_from_bytes(data)) == data


@given(rollout=rollouts)
def test_a_parsed_rollout_is_encoded_as_the_same_bytes(rollout: Rollout) -> None:
    """Unknown fields are kept, too. A copy with another value does not keep the message."""
    data = wire.rollout_to_wire(rollout).SerializeToString() + b"\xf8\x3f\x07"  # field 1023, a varint
    received = wire.rollout_from_bytes(data)
    assert plain(replace(received)) == plain(rollout)
    assert wire.rollout_to_bytes(received) is data
    assert plain(wire.rollout_from_bytes(wire.rollout_to_bytes(replace(received, text="other")))) != plain(received)
    with pytest.raises(ValueError, match="read-only"):
        received.token_ids_T[:] = 0
    graded = wire.graded_to_bytes(GradedRollout(received, Reward(0.5)))
    assert plain(replace(wire.graded_from_bytes(graded).rollout)) == plain(rollout)
    assert b"\xf8\x3f\x07" in graded


@given(rollout=rollouts)
def test_only_the_text_of_an_encoded_rollout_is_dropped(rollout: Rollout) -> None:
    """Unknown fields of every wire type are kept. A group, which cannot be skipped by its length, keeps the text."""
    message = wire.rollout_to_wire(rollout)
    unknown = b"\xf8\x3f\x07" + b"\xf9\x3f12345678" + b"\xfa\x3f\x03abc" + b"\xfd\x3f1234"
    data = message.SerializeToString() + unknown
    message.ClearField("text")
    assert wire.drop_text(data) == message.SerializeToString() + unknown
    grouped = data + b"\xfb\x3f\xfc\x3f"
    assert wire.drop_text(grouped) == grouped


@given(batch=batches)
def test_rollouts_reach_a_trainer_without_their_text(batch: Batch) -> None:
    sent = [wire.train_rollout_from_wire(wire.train_rollout_to_wire(item)) for item in batch.rollouts]
    assert plain(Batch(batch.step, tuple(sent), batch.positions)) == plain(without_text(batch))


def numbered(batch: Batch) -> Batch:
    """Rollouts of a batch must have unique ids, as those of a step have."""
    return Batch(
        batch.step,
        tuple(
            replace(item, rollout=replace(item.rollout, rollout_id=f"r{place}"))
            for place, item in enumerate(batch.rollouts)
        ),
        batch.positions,
    )


def without_text(batch: Batch) -> Batch:
    """Leave out what no trainer reads."""
    items = [replace(item, rollout=replace(item.rollout, text="")) for item in batch.rollouts]
    return Batch(batch.step, tuple(items), batch.positions)


def joined(parts: Sequence[bytes]) -> trainer_pb2.TrainPartsRequest:
    """Join parts one after another, as the trainer does."""
    whole = None
    for part in parts:
        whole = wire.join_train_part(whole, trainer_pb2.TrainPartsRequest.FromString(part))
    return wire.check_joined_parts(whole)


@given(batch=batches.map(numbered), part_bytes=st.integers(1, 2000))
def test_joined_parts_equal_the_batch(batch: Batch, part_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", part_bytes)
        sent = list(wire.encode_train_parts(batch))
    parts = [trainer_pb2.TrainPartsRequest.FromString(part) for part in sent]
    assert all(part.batch.rollouts for part in parts[1:])
    assert {part.rollouts_total for part in parts} == {len(batch.rollouts)}
    assert plain(wire.batch_from_wire(joined(sent).batch)) == plain(without_text(batch))
    assert all(
        len(data) <= part_bytes + 16 for data, part in zip(sent, parts, strict=True) if len(part.batch.rollouts) > 1
    )


@given(first=batches.filter(lambda batch: len(batch.rollouts) > 0).map(numbered))
def test_missing_parts_and_parts_of_two_batches_are_refused(first: Batch) -> None:
    with pytest.raises(RecordInvalid, match="at least one part, got none"):
        wire.check_joined_parts(None)
    with pytest.raises(RecordInvalid, match=r"step must be equal in all parts of a batch, got \[1, 2\]"):
        joined([part for step in (2, 1) for part in wire.encode_train_parts(Batch(step, first.rollouts))])


@given(batch=batches.filter(lambda batch: len(batch.rollouts) > 1).map(numbered))
def test_a_batch_with_a_missing_or_repeated_part_is_refused(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", 1)
        parts = list(wire.encode_train_parts(batch))
    for wrong in (parts[:-1], parts[1:], [*parts, parts[-1]], [*parts[:-1], parts[0]]):
        with pytest.raises(RecordInvalid, match="different rollouts together, got"):
            joined(wrong)


@given(batch=batches)
def test_a_batch_is_stored_without_its_rollouts_and_read_back_with_them(batch: Batch) -> None:
    graded = [wire.graded_to_bytes(GradedRollout(item.rollout, Reward(1.0))) for item in batch.rollouts]
    outline = wire.batch_to_outline(batch)
    assert plain(wire.batch_from_stored(outline, graded)) == plain(batch)
    with pytest.raises(RecordInvalid, match="must have all"):
        wire.batch_from_stored(outline, [*graded, b""])


@given(data=st.binary(max_size=200))
def test_random_bytes_are_parsed_or_refused_and_never_crash(data: bytes) -> None:
    for read in (wire.graded_from_bytes, wire.batch_from_bytes):
        try:
            read(data)
        except RecordInvalid:
            continue


def test_truncated_records_are_refused() -> None:
    with pytest.raises(RecordInvalid, match="must be a protobuf GradedRollout"):
        wire.graded_from_bytes(b"\x0a\xff")
    with pytest.raises(RecordInvalid, match="must be a protobuf Batch"):
        wire.batch_from_bytes(b"\x0a\xff")


def test_an_unknown_finish_reason_or_role_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="finish_reason must be known"):
        wire.rollout_from_wire(rollout_pb2.Rollout(rollout_id="r"))
    with pytest.raises(RecordInvalid, match=r"role of peer .* must be known"):
        wire.peer_from_wire(coordinator_pb2.RegisterRequest(peer_id="p"))


def test_an_unknown_tensor_owner_is_refused() -> None:
    message = weights_pb2.WeightManifest(tensors=[weights_pb2.TensorMeta(name="w")])
    with pytest.raises(RecordInvalid, match="owner"):
        wire.manifest_from_wire(message)


def test_a_reward_of_zero_differs_from_ungraded() -> None:
    rewards = (
        Reward(0.0, extracted="7", reason="another number"),
        Reward(0.0, reason="no answer found", lacks_answer=True),
        Reward(0.0, error="KeyError at my_rewards.py:12"),
        Reward(None, "crash: died"),
    )
    assert [wire.reward_from_wire(wire.reward_to_wire(reward)) for reward in rewards] == list(rewards)


@pytest.mark.parametrize("name", ["packed_token_ids", "packed_sampler_logprobs"])
def test_truncated_packed_numbers_are_refused(name: str) -> None:
    message = rollout_pb2.Rollout(rollout_id="r", finish_reason=rollout_pb2.FINISH_REASON_STOP, **{name: bytes(7)})
    with pytest.raises(RecordInvalid, match=r"rollout r: packed numbers must have 4 bytes each, got 7 bytes"):
        wire.rollout_from_wire(message)


@pytest.mark.parametrize("changes", [{"expert_bytes": 4}, {"expert_layers": 0}, {"packed_experts": bytes(7)}])
def test_experts_of_partial_tokens_are_refused(changes: dict[str, Any]) -> None:
    sound = {"packed_experts": bytes(12), "expert_layers": 3, "experts_per_token": 2, "expert_bytes": 1}
    message = rollout_pb2.Rollout(rollout_id="r", finish_reason=rollout_pb2.FINISH_REASON_STOP, **(sound | changes))
    with pytest.raises(RecordInvalid, match="rollout r: packed_experts must hold whole tokens"):
        wire.rollout_from_wire(message)


def test_json_of_a_stored_rollout_lists_its_numbers() -> None:
    rollout = Rollout(
        rollout_id="r",
        group_id="g",
        sample_index=0,
        token_ids_T=np.asarray([7, 1], dtype=np.int32),
        sampler_logprobs_T=np.asarray([-0.5, -0.25], dtype=np.float32),
        versions=(VersionSpan(0, 0, 2),),
        finish_reason=FinishReason.STOP,
        replica_id="gen-0",
        text="seven",
        seconds=1.0,
    )
    found = wire.graded_to_json(wire.graded_to_bytes(GradedRollout(rollout, Reward(1.0))))["rollout"]
    assert (found["tokenIds"], found["samplerLogprobs"], found["text"]) == ([7, 1], [-0.5, -0.25], "seven")
    assert not [name for name in found if name.startswith("packed")]
