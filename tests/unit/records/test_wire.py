"""What goes onto the wire comes off it, bit for bit; what cannot be read is RecordInvalid."""

from __future__ import annotations

from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.api.v1 import coordinator_pb2, rollout_pb2, trainer_pb2, weights_pb2
from specrl.errors import RecordInvalid
from specrl.records import (
    Batch,
    DrafterMetrics,
    FinishReason,
    GenerationStatus,
    GradedRollout,
    Group,
    OutputSpan,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    Sampling,
    SpeculationCounters,
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

text = st.text(max_size=12)
int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
number = st.floats(allow_nan=False)


def many(elements: st.SearchStrategy[Any], most: int = 4) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.lists(elements, max_size=most).map(tuple)


samplings = st.builds(Sampling, int32, number, number, int32, st.none() | int64, many(text))
prompts = st.builds(Prompt, text, int64, many(int32), text, text)
requests = st.builds(RolloutRequest, text, text, int32, many(int32), samplings)
experts = st.builds(
    lambda shape, kind: np.arange(np.prod(shape)).astype(kind).reshape(shape),
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    st.sampled_from([np.uint8, np.uint16]),
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
)
rewards = st.builds(Reward, st.none() | number, text)
groups = st.builds(Group, text, prompts, int64, many(rollouts, 3), many(rewards, 3))
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
statuses = st.builds(GenerationStatus, text, int64, st.booleans(), st.integers(0, 2**31 - 1), counters, int64)
drafter_metrics = st.builds(DrafterMetrics, number, number, many(number), number)
train_metrics = st.builds(
    TrainMetrics,
    **{
        field.name: {"int": int64, "bool": st.booleans()}.get(str(field.type), number)
        for field in fields(TrainMetrics)
        if field.name != "drafter"
    },
    drafter=st.none() | drafter_metrics,
)
stream_places = st.builds(
    lambda places, problems, identity: StreamPlace(places[0], tuple(places[1:]), problems, identity),
    st.lists(st.integers(0, 2**40), min_size=1, max_size=5, unique=True).map(sorted),
    st.integers(1, 2**40),
    st.text("0123456789abcdef", min_size=1, max_size=32),
)
trainer_statuses = st.builds(TrainerStatus, int64, int64, st.booleans(), int32, st.none() | stream_places)


def plain(record: Any) -> Any:
    """A record as nested tuples, arrays by type and bits: NaN equals NaN, and 0.0 is not -0.0."""
    if isinstance(record, np.ndarray):
        return (record.dtype.str, record.shape, record.tobytes())
    if is_dataclass(record):
        return (type(record), *(plain(getattr(record, field.name)) for field in fields(record)))
    if isinstance(record, tuple | list):
        return tuple(plain(item) for item in record)
    return (type(record), repr(record))


KINDS = [
    ("sampling", samplings),
    ("prompt", prompts),
    ("request", requests),
    ("rollout", rollouts),
    ("group", groups),
    ("train_rollout", st.builds(TrainRollout, many(int32), rollouts, number, number)),
    ("batch", batches),
    ("manifest", manifests),
    ("checksums", checksums),
    ("weight_group", weight_groups),
    ("counters", counters),
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


@given(group=groups)
def test_a_stored_group_is_read_back_and_its_bytes_are_the_same_again(group: Group) -> None:
    data = wire.group_to_bytes(group)
    assert plain(wire.group_from_bytes(data)) == plain(group)
    assert wire.group_to_bytes(wire.group_from_bytes(data)) == data


@given(batch=batches)
def test_a_stored_batch_is_read_back_and_its_bytes_are_the_same_again(batch: Batch) -> None:
    data = wire.batch_to_bytes(batch)
    assert plain(wire.batch_from_bytes(data)) == plain(batch)
    assert wire.batch_to_bytes(wire.batch_from_bytes(data)) == data


@given(rollout=rollouts)
def test_a_rollout_is_passed_on_as_the_bytes_that_came(rollout: Rollout) -> None:
    """Fields that this version does not know included; a copy with another value is not what came."""
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


def numbered(batch: Batch) -> Batch:
    """Its rollouts have names of their own, as those of a step have."""
    return Batch(
        batch.step,
        tuple(
            replace(item, rollout=replace(item.rollout, rollout_id=f"r{place}"))
            for place, item in enumerate(batch.rollouts)
        ),
        batch.positions,
    )


@given(batch=batches.map(numbered), part_bytes=st.integers(1, 2000))
def test_a_batch_arrives_in_parts_as_it_was(batch: Batch, part_bytes: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", part_bytes)
        sent = list(wire.train_step_parts(batch))
    messages = [trainer_pb2.TrainStepRequest.FromString(part) for part in sent]
    assert all(message.batch.rollouts for message in messages[1:])
    parts = [wire.batch_from_wire(message.batch) for message in messages]
    assert {message.rollouts_total for message in messages} == {len(batch.rollouts)}
    assert plain(wire.batch_from_parts(parts, len(batch.rollouts))) == plain(batch)
    assert all(len(part) <= part_bytes + 16 for part, read in zip(sent, parts, strict=True) if len(read.rollouts) > 1)


def test_parts_of_no_batch_and_of_two_are_refused() -> None:
    with pytest.raises(RecordInvalid, match="at least one part, got none"):
        wire.batch_from_parts([], 0)
    with pytest.raises(RecordInvalid, match=r"one step, got \[1, 2\]"):
        wire.batch_from_parts([Batch(2, ()), Batch(1, ())], 0)


@given(batch=batches.filter(lambda batch: len(batch.rollouts) > 1).map(numbered))
def test_a_batch_that_lacks_a_part_or_has_one_twice_is_refused(batch: Batch) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "PART_BYTES", 1)
        sent = [trainer_pb2.TrainStepRequest.FromString(part) for part in wire.train_step_parts(batch)]
    parts, total = [wire.batch_from_wire(message.batch) for message in sent], sent[0].rollouts_total
    for wrong in (parts[:-1], parts[1:], [*parts, parts[-1]], [*parts[:-1], parts[0]]):
        with pytest.raises(RecordInvalid, match="each once, got"):
            wire.batch_from_parts(wrong, total)


@given(batch=batches)
def test_a_batch_is_stored_without_its_rollouts_and_read_back_with_them(batch: Batch) -> None:
    graded = [wire.graded_to_bytes(GradedRollout(item.rollout, Reward(1.0))) for item in batch.rollouts]
    outline = wire.batch_outline(batch)
    assert plain(wire.batch_from_stored(outline, graded)) == plain(batch)
    assert plain(wire.batch_from_stored(wire.batch_to_bytes(batch), [])) == plain(batch), "as older stores have it"
    assert wire.batch_positions(outline) == batch.positions
    with pytest.raises(RecordInvalid, match="must have all of its"):
        wire.batch_from_stored(outline, [*graded, b""])


@given(data=st.binary(max_size=200))
def test_any_other_bytes_are_refused_or_read_and_never_crash(data: bytes) -> None:
    for read in (wire.group_from_bytes, wire.batch_from_bytes):
        try:
            read(data)
        except RecordInvalid:
            continue


def test_truncated_records_are_refused() -> None:
    group = Group("g", Prompt("p", 0, (1, 2), "text", "answer"), 1, (), (Reward(1.0),))
    with pytest.raises(RecordInvalid, match="must be a protobuf Group"):
        wire.group_from_bytes(wire.group_to_bytes(group)[:-1])
    with pytest.raises(RecordInvalid, match="must be a protobuf Batch"):
        wire.batch_from_bytes(b"\x0a\xff")


def test_an_unknown_finish_reason_or_role_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="finish_reason must be known"):
        wire.rollout_from_wire(rollout_pb2.Rollout(rollout_id="r"))
    with pytest.raises(RecordInvalid, match="role must be known"):
        wire.peer_from_wire(coordinator_pb2.RegisterRequest(peer_id="p"))


def test_an_unknown_tensor_owner_is_refused() -> None:
    message = weights_pb2.WeightManifest(tensors=[weights_pb2.TensorMeta(name="w")])
    with pytest.raises(RecordInvalid, match="owner"):
        wire.manifest_from_wire(message)


def test_zero_is_not_the_same_as_ungraded() -> None:
    rewards = (
        Reward(0.0, extracted="7", reason="another number"),
        Reward(0.0, reason="no answer found", lacks_answer=True),
        Reward(0.0, error="KeyError at my_rewards.py:12"),
        Reward(None, "crash: died"),
    )
    group = Group("g", Prompt("p", 0, (), "", "", {"points": 3}), 1, (), rewards)
    assert wire.group_from_bytes(wire.group_to_bytes(group)).rewards == group.rewards


def test_a_rollout_that_was_stored_before_numbers_were_packed_is_read() -> None:
    message = rollout_pb2.Rollout(
        rollout_id="r",
        token_ids=[3, -1, 2**31 - 1],
        sampler_logprobs=[-0.5, -1.25, 0.0],
        versions=[rollout_pb2.VersionSpan(policy_version=1, first=0, end=3)],
        finish_reason=rollout_pb2.FINISH_REASON_STOP,
    )
    rollout = wire.rollout_from_wire(message)
    assert (rollout.token_ids_T.dtype, rollout.token_ids_T.tolist()) == (np.int32, [3, -1, 2**31 - 1])
    assert (rollout.sampler_logprobs_T.dtype, rollout.sampler_logprobs_T.tolist()) == (np.float32, [-0.5, -1.25, 0.0])


@pytest.mark.parametrize("name", ["packed_token_ids", "packed_sampler_logprobs"])
def test_packed_numbers_that_were_cut_short_are_refused(name: str) -> None:
    message = rollout_pb2.Rollout(rollout_id="r", finish_reason=rollout_pb2.FINISH_REASON_STOP, **{name: bytes(7)})
    with pytest.raises(RecordInvalid, match=r"rollout r: packed numbers must be of 4 bytes each, got 7 bytes"):
        wire.rollout_from_wire(message)


@pytest.mark.parametrize("changes", [{"expert_bytes": 4}, {"expert_layers": 0}, {"packed_experts": bytes(7)}])
def test_experts_that_are_no_whole_tokens_are_refused(changes: dict[str, Any]) -> None:
    sound = {"packed_experts": bytes(12), "expert_layers": 3, "experts_per_token": 2, "expert_bytes": 1}
    message = rollout_pb2.Rollout(rollout_id="r", finish_reason=rollout_pb2.FINISH_REASON_STOP, **(sound | changes))
    with pytest.raises(RecordInvalid, match="rollout r: experts must be whole tokens"):
        wire.rollout_from_wire(message)


def test_people_read_a_stored_rollout_as_numbers() -> None:
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
