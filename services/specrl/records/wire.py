"""Converts records to protobuf and back. No other module knows both forms.

`x_to_wire` and `x_from_wire` convert one record. Functions for stored and streamed data work on bytes, because parsing
and encoding a rollout again costs more than copying it. Every `from` function raises RecordInvalid for a message that
cannot be read. `rpc`, the services and the ledger call them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError, Message
from pydantic import ValidationError

from specrl.api.v1 import coordinator_pb2, generation_pb2, rollout_pb2, trainer_pb2, weights_pb2
from specrl.errors import RecordInvalid
from specrl.records.peer import HeldRollout, Peer, Role
from specrl.records.rollout import (
    Batch,
    ExpertArray,
    FinishReason,
    GradedRollout,
    NamedReward,
    OutputSpan,
    Reward,
    Rollout,
    RolloutRequest,
    Sampling,
    TrainRollout,
    VersionSpan,
)
from specrl.records.sampling_sets import SamplingSets
from specrl.records.status import (
    DrafterEpoch,
    DrafterEpochMetrics,
    DrafterMetrics,
    Drafting,
    GenerationStatus,
    SpeculationCounters,
    TrainerStatus,
    TrainMetrics,
)
from specrl.records.step_costs import StepCost
from specrl.records.stream_place import StreamPlace
from specrl.records.weights import NO_DRAFTER, TensorMeta, WeightChecksums, WeightGroup, WeightManifest, WeightOwner
from specrl.telemetry.training_figures import FIGURES

# Each table in both directions. UNSPECIFIED and values of a later version have no entry, and are refused.
_FINISH_TO_WIRE = {reason: rollout_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}") for reason in FinishReason}
_FINISH_FROM_WIRE = {number: reason for reason, number in _FINISH_TO_WIRE.items()}
_OWNER_TO_WIRE = {owner: weights_pb2.WeightOwner.Value(f"WEIGHT_OWNER_{owner.name}") for owner in WeightOwner}
_OWNER_FROM_WIRE = {number: owner for owner, number in _OWNER_TO_WIRE.items()}
_ROLE_TO_WIRE = {role: coordinator_pb2.Role.Value(f"ROLE_{role.name}") for role in Role}
_ROLE_FROM_WIRE = {number: role for role, number in _ROLE_TO_WIRE.items()}

# Packed numbers of a rollout, little-endian on the wire whatever the machine's byte order. Packed, they are a copy of
# memory; as repeated fields they cost about forty times as much (docs/decisions/0011).
_EXPERT_DTYPES: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}  # by the bytes of one number
_TOKEN_DTYPE = np.dtype("<i4")
_LOGPROB_DTYPE = np.dtype("<f4")

PART_BYTES = 1 << 20
"""Size of a part of a batch that is sent to the trainer. Encoding one blocks the event loop for about a millisecond."""


def _read_scalars(message: Message) -> dict[str, Any]:
    """Read the fields of a message that are numbers or texts, by name, for a record with the same names.

    A repeated field becomes a tuple, and an absent optional one None.
    """
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None:
            value: Any = getattr(message, field.name)
            if field.is_repeated:
                value = tuple(value)
            elif field.has_presence and not message.HasField(field.name):
                value = None
            found[field.name] = value
    return found


def _read_enum[N, E](known: Mapping[N, E], number: N, what: str) -> E:
    """Return the value of an enum's number. Raises RecordInvalid for one that this version does not know."""
    if number not in known:
        raise RecordInvalid(f"{what} must be known, got {number}; use the same version of specrl everywhere")
    return known[number]


def _parse_message[M: Message](kind: type[M], data: bytes, what: str) -> M:
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RecordInvalid(
            f"{what} must be a protobuf {kind.__name__} message, got {len(data)} other bytes; use the same version of "
            "specrl everywhere"
        ) from error


def registration_to_wire(
    peer: Peer, generation: GenerationStatus | None, held_rollouts: Sequence[HeldRollout]
) -> coordinator_pb2.RegisterRequest:
    return coordinator_pb2.RegisterRequest(
        **(vars(peer) | {"role": _ROLE_TO_WIRE[peer.role]}),
        generation=generation_status_to_wire(generation) if generation is not None else None,
        held_rollouts=[coordinator_pb2.HeldRollout(**vars(held)) for held in held_rollouts],
    )


def peer_from_wire(message: coordinator_pb2.RegisterRequest) -> Peer:
    role = _read_enum(_ROLE_FROM_WIRE, message.role, f"role of peer {message.peer_id[:64]!r}")
    peer = Peer(**(_read_scalars(message) | {"role": role}))
    peer.check()
    return peer


def held_from_wire(message: coordinator_pb2.HeldRollout) -> HeldRollout:
    return HeldRollout(**_read_scalars(message))


def request_to_wire(record: RolloutRequest) -> generation_pb2.RolloutRequest:
    # vars, not asdict, which would copy the prompt token by token.
    sampling = rollout_pb2.Sampling(**vars(record.sampling))
    return generation_pb2.RolloutRequest(**(vars(record) | {"sampling": sampling}))


def request_from_wire(message: generation_pb2.RolloutRequest) -> RolloutRequest:
    return RolloutRequest(**_read_scalars(message), sampling=Sampling(**_read_scalars(message.sampling)))


def rollout_to_wire(record: Rollout) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        sample_index=record.sample_index,
        packed_token_ids=record.token_ids_T.astype(_TOKEN_DTYPE, copy=False).tobytes(),
        packed_sampler_logprobs=record.sampler_logprobs_T.astype(_LOGPROB_DTYPE, copy=False).tobytes(),
        versions=[rollout_pb2.VersionSpan(**vars(span)) for span in record.versions],
        finish_reason=_FINISH_TO_WIRE[record.finish_reason],
        replica_id=record.replica_id,
        text=record.text,
        seconds=record.seconds,
        outputs=[rollout_pb2.OutputSpan(**vars(span)) for span in record.outputs],
        stop=record.stop,
        **_experts_to_wire(record.experts_SLK),
        **_sets_to_wire(record.sets),
    )


def _experts_to_wire(experts_SLK: ExpertArray | None) -> dict[str, Any]:
    if experts_SLK is None:
        return {}
    width = experts_SLK.itemsize
    return {
        "packed_experts": experts_SLK.astype(_EXPERT_DTYPES[width], copy=False).tobytes(),
        "expert_layers": experts_SLK.shape[1],
        "experts_per_token": experts_SLK.shape[2],
        "expert_bytes": width,
    }


def _experts_from_wire(message: rollout_pb2.Rollout) -> ExpertArray | None:
    packed = message.packed_experts
    layers = message.expert_layers
    each = message.experts_per_token
    if not packed:
        return None
    kind = _EXPERT_DTYPES.get(message.expert_bytes)
    if kind is None or layers < 1 or each < 1 or len(packed) % (layers * each * kind.itemsize):
        raise RecordInvalid(
            f"rollout {message.rollout_id[:64]}: packed_experts must hold whole tokens of {layers} layers x {each} "
            f"experts of {message.expert_bytes} bytes, got {len(packed)} bytes; use the same version of specrl "
            "everywhere"
        )
    found: ExpertArray = np.frombuffer(packed, dtype=kind).astype(kind.newbyteorder("=")).reshape(-1, layers, each)
    return found


def _sets_to_wire(sets: SamplingSets | None) -> dict[str, Any]:
    if sets is None:
        return {}
    return {
        "packed_set_sizes": sets.sizes_N.astype(_TOKEN_DTYPE, copy=False).tobytes(),
        "packed_set_ids": sets.ids_M.astype(_TOKEN_DTYPE, copy=False).tobytes(),
    }


def _sets_from_wire(message: rollout_pb2.Rollout) -> SamplingSets | None:
    if not message.packed_set_sizes and not message.packed_set_ids:
        return None
    sizes_N, ids_M = (
        _unpack_numbers(message, packed, _TOKEN_DTYPE) for packed in (message.packed_set_sizes, message.packed_set_ids)
    )
    return SamplingSets(sizes_N, ids_M)


def rollout_to_bytes(record: Rollout) -> bytes:
    """Encode a rollout. One that was parsed from bytes returns those; otherwise the encoding is deterministic."""
    if record.message is not None:
        return record.message
    return rollout_to_wire(record).SerializeToString(deterministic=True)


def rollout_from_bytes(data: bytes) -> Rollout:
    """Parse a rollout and keep `data` as its message, so that it is stored and sent on as the same bytes.

    Its arrays are read-only: writing to them would make them differ from the message. Raises RecordInvalid.
    """
    rollout = rollout_from_wire(_parse_message(rollout_pb2.Rollout, data, "a rollout"))
    arrays = [rollout.token_ids_T, rollout.sampler_logprobs_T, rollout.experts_SLK]
    if rollout.sets is not None:
        arrays += [rollout.sets.sizes_N, rollout.sets.ids_M]
    for numbers in arrays:
        if numbers is not None:
            numbers.flags.writeable = False
    object.__setattr__(rollout, "message", data)  # the record is frozen, and `message` is no argument of __init__
    return rollout


def rollout_from_wire(message: rollout_pb2.Rollout) -> Rollout:
    finish_reason = _read_enum(
        _FINISH_FROM_WIRE, message.finish_reason, f"rollout {message.rollout_id[:64]}: finish_reason"
    )
    return Rollout(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        sample_index=message.sample_index,
        token_ids_T=_unpack_numbers(message, message.packed_token_ids, _TOKEN_DTYPE),
        sampler_logprobs_T=_unpack_numbers(message, message.packed_sampler_logprobs, _LOGPROB_DTYPE),
        versions=tuple(VersionSpan(span.policy_version, span.first, span.end) for span in message.versions),
        finish_reason=finish_reason,
        replica_id=message.replica_id,
        text=message.text,
        seconds=message.seconds,
        outputs=tuple(OutputSpan(span.first, span.end) for span in message.outputs),
        stop=message.stop,
        experts_SLK=_experts_from_wire(message),
        sets=_sets_from_wire(message),
    )


def _unpack_numbers(message: rollout_pb2.Rollout, packed: bytes, kind: np.dtype[Any]) -> Any:
    """Decode an array of packed numbers."""
    if len(packed) % kind.itemsize:
        raise RecordInvalid(
            f"rollout {message.rollout_id}: packed numbers must have {kind.itemsize} bytes each, got {len(packed)} "
            "bytes; use the same version of specrl everywhere"
        )
    return np.frombuffer(packed, dtype=kind).astype(kind.newbyteorder("="))  # a copy: frombuffer's array is read-only


def reward_to_wire(record: Reward) -> rollout_pb2.Reward:
    named = [
        rollout_pb2.NamedReward(name=it.name, weight=it.weight, reward=reward_to_wire(it.reward)) for it in record.named
    ]
    return rollout_pb2.Reward(**(vars(record) | {"named": named}))


def reward_from_wire(message: rollout_pb2.Reward) -> Reward:
    # A named reward has none of its own: further levels of a message are not read.
    named = (NamedReward(it.name, it.weight, Reward(**_read_scalars(it.reward))) for it in message.named)
    return Reward(**_read_scalars(message), named=tuple(named))


def graded_to_bytes(record: GradedRollout) -> bytes:
    """Encode a finished rollout as it is stored. The rollout's own bytes are embedded, not encoded again."""
    rollout = rollout_to_bytes(record.rollout)
    rest = rollout_pb2.GradedRollout(reward=reward_to_wire(record.reward)).SerializeToString(deterministic=True)
    return b"".join((_encode_field_prefix(rollout_pb2.GradedRollout.ROLLOUT_FIELD_NUMBER, len(rollout)), rollout, rest))


def graded_from_bytes(data: bytes) -> GradedRollout:
    message = _parse_message(rollout_pb2.GradedRollout, data, "a stored rollout")
    return GradedRollout(rollout_from_wire(message.rollout), reward_from_wire(message.reward))


def graded_to_json(data: bytes) -> dict[str, Any]:
    """Convert a stored rollout to JSON for people to read. As in protobuf's JSON, 64-bit numbers are strings."""
    rollout = graded_from_bytes(data).rollout
    found: dict[str, Any] = MessageToDict(rollout_pb2.GradedRollout.FromString(data))
    # Packed numbers are base64, of no use to a reader. Experts and sampling sets are left out.
    for name in ("packedTokenIds", "packedSamplerLogprobs", "packedExperts", "packedSetSizes", "packedSetIds"):
        found["rollout"].pop(name, None)
    found["rollout"] |= {
        "tokenIds": rollout.token_ids_T.tolist(),
        "samplerLogprobs": rollout.sampler_logprobs_T.tolist(),
    }
    return found


def train_rollout_to_wire(record: TrainRollout) -> rollout_pb2.TrainRollout:
    """Encode a rollout for a trainer: without its text, which no trainer reads."""
    message = _train_rollout_with_text(record)
    message.rollout.ClearField("text")
    return message


def _train_rollout_with_text(record: TrainRollout) -> rollout_pb2.TrainRollout:
    return rollout_pb2.TrainRollout(
        prompt_token_ids=record.prompt_token_ids,
        rollout=rollout_to_wire(record.rollout),
        advantage=record.advantage,
        reward=record.reward,
    )


def outline_train_rollout(message: rollout_pb2.TrainRollout) -> rollout_pb2.TrainRollout:
    """Return an encoded rollout with its lengths instead of its tokens, for ranks that do not train on it."""
    outline = rollout_pb2.RolloutOutline(
        group_id=message.rollout.group_id,
        prompt_tokens=len(message.prompt_token_ids),
        completion_tokens=len(message.rollout.packed_token_ids) // _TOKEN_DTYPE.itemsize,
        outputs=message.rollout.outputs,
    )
    return rollout_pb2.TrainRollout(outline=outline, advantage=message.advantage, reward=message.reward)


def _outline_from_wire(message: rollout_pb2.TrainRollout) -> TrainRollout:
    outline = message.outline
    count = outline.completion_tokens
    rollout = Rollout(
        rollout_id="",
        group_id=outline.group_id,
        sample_index=0,
        token_ids_T=np.broadcast_to(np.int32(0), count),  # which takes no memory
        sampler_logprobs_T=np.broadcast_to(np.float32(0), count),
        versions=(),
        finish_reason=FinishReason.LENGTH,
        replica_id="",
        text="",
        seconds=0.0,
        outputs=tuple(OutputSpan(span.first, span.end) for span in outline.outputs),
    )
    return TrainRollout((0,) * outline.prompt_tokens, rollout, message.advantage, message.reward, is_outline=True)


def train_rollout_from_wire(message: rollout_pb2.TrainRollout) -> TrainRollout:
    if message.HasField("outline"):
        return _outline_from_wire(message)
    rollout = rollout_from_wire(message.rollout)
    return TrainRollout(tuple(message.prompt_token_ids), rollout, message.advantage, message.reward)


def batch_to_wire(record: Batch) -> rollout_pb2.Batch:
    return rollout_pb2.Batch(
        step=record.step,
        rollouts=[_train_rollout_with_text(item) for item in record.rollouts],
        positions=record.positions,
    )


def batch_from_wire(message: rollout_pb2.Batch) -> Batch:
    rollouts = tuple(train_rollout_from_wire(item) for item in message.rollouts)
    return Batch(message.step, rollouts, tuple(message.positions))


def batch_to_bytes(record: Batch) -> bytes:
    """Encode a batch and its rollouts as one message, for `specrl store export`."""
    return batch_to_wire(record).SerializeToString(deterministic=True)


def batch_from_bytes(data: bytes) -> Batch:
    return batch_from_wire(_parse_message(rollout_pb2.Batch, data, "a batch"))


def batch_to_outline(record: Batch) -> bytes:
    """Encode a batch without its rollouts, as it is stored. `batch_from_stored` puts both together again."""
    # deterministic=True, here and elsewhere: a batch that is sent or stored again is the same bytes.
    parts = [rollout_pb2.Batch(step=record.step, positions=record.positions).SerializeToString(deterministic=True)]
    for outline in _encode_outlines(record):
        parts += [_encode_field_prefix(rollout_pb2.Batch.ROLLOUTS_FIELD_NUMBER, len(outline)), outline]
    return b"".join(parts)


def batch_from_stored(data: bytes, rollouts: Sequence[bytes]) -> Batch:
    """Decode a batch from its outline and the graded rollouts that are stored beside it, in the batch's order.

    Raises RecordInvalid unless there are as many rollouts as the outline has.
    """
    message = _parse_message(rollout_pb2.Batch, data, "a stored batch")
    if len(message.rollouts) != len(rollouts):
        raise RecordInvalid(
            f"the stored batch of step {message.step} must have all {len(message.rollouts)} rollouts, got "
            f"{len(rollouts)}; restore the store from a backup"
        )
    for item, graded in zip(message.rollouts, rollouts, strict=True):
        # The reward is dropped: a batch has advantages instead.
        item.rollout.CopyFrom(_parse_message(rollout_pb2.GradedRollout, graded, "a stored rollout").rollout)
    return batch_from_wire(message)


def encode_train_parts(record: Batch) -> Iterator[bytes]:
    """Yield the encoded TrainPartsRequests of a batch, each of about `PART_BYTES` or of one larger rollout.

    Each message is concatenated from encoded fields, so that rollouts are copied and not encoded again. Protobuf allows
    that: a message is the concatenation of its fields, without header or checksum. The rollouts' text is left out.
    """
    total = trainer_pb2.TrainPartsRequest(rollouts_total=len(record.rollouts)).SerializeToString(deterministic=True)
    head = rollout_pb2.Batch(step=record.step, positions=record.positions).SerializeToString(deterministic=True)
    parts = [head]
    size_bytes = len(head)
    for item, outline in zip(record.rollouts, _encode_outlines(record), strict=True):
        rollout = drop_text(rollout_to_bytes(item.rollout))
        inner = _encode_field_prefix(rollout_pb2.TrainRollout.ROLLOUT_FIELD_NUMBER, len(rollout))
        length = len(outline) + len(inner) + len(rollout)
        if size_bytes + length > PART_BYTES and len(parts) > 1:  # the part has at least one rollout
            yield _train_parts_request(parts, size_bytes, total)
            # Only the first part carries the positions: the receiver concatenates those of all parts.
            head = rollout_pb2.Batch(step=record.step).SerializeToString(deterministic=True)
            parts = [head]
            size_bytes = len(head)
        outer = _encode_field_prefix(rollout_pb2.Batch.ROLLOUTS_FIELD_NUMBER, length)
        parts += [outer, outline, inner, rollout]
        size_bytes += len(outer) + length
    yield _train_parts_request(parts, size_bytes, total)


def join_train_part(
    whole: trainer_pb2.TrainPartsRequest | None, part: trainer_pb2.TrainPartsRequest
) -> trainer_pb2.TrainPartsRequest:
    """Append a part to the parts before it, joined in `whole`; None before the first. Returns the joined parts.

    Raises RecordInvalid unless the part is of the same batch. Call `check_joined_parts` after the last one.
    """
    if whole is None:
        return part
    if not part.batch.rollouts:
        raise RecordInvalid("every part of a batch after the first must have rollouts, got none; leave the part out")
    if part.rollouts_total != whole.rollouts_total:
        raise RecordInvalid(
            f"rollouts_total must be equal in all parts of a batch, got {whole.rollouts_total} and "
            f"{part.rollouts_total}; send one batch per call"
        )
    if part.batch.step != whole.batch.step:
        steps = sorted((part.batch.step, whole.batch.step))
        raise RecordInvalid(f"step must be equal in all parts of a batch, got {steps}; send one batch per call")
    whole.MergeFrom(part)  # protobuf concatenates repeated fields
    return whole


def check_joined_parts(whole: trainer_pb2.TrainPartsRequest | None) -> trainer_pb2.TrainPartsRequest:
    """Return the joined batch. Raises RecordInvalid unless it has every rollout exactly once."""
    if whole is None:
        raise RecordInvalid("a batch must have at least one part, got none; send one part even without rollouts")
    count = len(whole.batch.rollouts)
    # Both: a part that was lost and another that came twice would leave the count right.
    distinct = len({item.rollout.rollout_id for item in whole.batch.rollouts})
    if not distinct == count == whole.rollouts_total:
        raise RecordInvalid(
            f"the parts of a batch must have {whole.rollouts_total} different rollouts together, got {count}, of which "
            f"{distinct} are different; send the whole batch again"
        )
    return whole


def _train_parts_request(parts: Sequence[bytes], size_bytes: int, total: bytes) -> bytes:
    return b"".join((_encode_field_prefix(trainer_pb2.TrainPartsRequest.BATCH_FIELD_NUMBER, size_bytes), *parts, total))


def _encode_outlines(record: Batch) -> Iterator[bytes]:
    """Encode each TrainRollout without its rollout. The rollouts of a group share one encoding of their prompt."""
    prompt: tuple[int, ...] | None = None
    encoded = b""
    for item in record.rollouts:
        if item.prompt_token_ids is not prompt:  # identity suffices: a group's rollouts share the tuple
            prompt = item.prompt_token_ids
            encoded = rollout_pb2.TrainRollout(prompt_token_ids=prompt).SerializeToString(deterministic=True)
        own = rollout_pb2.TrainRollout(advantage=item.advantage, reward=item.reward)
        yield encoded + own.SerializeToString(deterministic=True)


def drop_text(rollout: bytes) -> bytes:
    """Leave the text out of an encoded rollout, which is not decoded for it. Other fields, unknown ones too, are kept.

    Trainers do not read the text. Source: protobuf.dev/programming-guides/encoding.
    """
    kept: list[bytes] = []
    place = 0
    while place < len(rollout):
        first = place
        tag, place = _decode_varint(rollout, place)
        match tag & 7:  # wire types
            case 0:  # VARINT
                _, place = _decode_varint(rollout, place)
            case 1:  # I64
                place += 8
            case 2:  # LEN
                length, place = _decode_varint(rollout, place)
                place += length
            case 5:  # I32
                place += 4
            case _:  # a group, which no version of specrl sends
                return rollout
        if tag >> 3 != rollout_pb2.Rollout.TEXT_FIELD_NUMBER:
            kept.append(rollout[first:place])
    return b"".join(kept)


def _decode_varint(data: bytes, place: int) -> tuple[int, int]:
    """Decode the number at `place`. Returns it and the place after it."""
    value = 0
    shift = 0
    while data[place] > 0x7F:
        value |= (data[place] & 0x7F) << shift
        shift += 7
        place += 1
    return value | data[place] << shift, place + 1


def _encode_field_prefix(number: int, size_bytes: int) -> bytes:
    """Encode the tag and the length, both varints, that precede an embedded message in field `number`.

    Source: protobuf.dev/programming-guides/encoding, wire type LEN (2).
    """
    found = bytearray()
    for value in (number << 3 | 2, size_bytes):  # 2 is the wire type LEN
        left = value
        while left > 0x7F:  # 7 bits per byte, the lowest first; the top bit says that another byte follows
            found.append(left & 0x7F | 0x80)
            left >>= 7
        found.append(left)
    return bytes(found)


# Every replica is sent the same manifest, which lists tens of thousands of tensors for a large MoE.
@lru_cache(maxsize=1)
def manifest_to_wire(record: WeightManifest) -> weights_pb2.WeightManifest:
    return weights_pb2.WeightManifest(
        tensors=[
            weights_pb2.TensorMeta(name=t.name, owner=_OWNER_TO_WIRE[t.owner], dtype=t.dtype, shape=t.shape)
            for t in record.tensors
        ],
        bucket_bytes=record.bucket_bytes,
    )


def manifest_from_wire(message: weights_pb2.WeightManifest) -> WeightManifest:
    tensors = []
    for tensor in message.tensors:
        owner = _read_enum(_OWNER_FROM_WIRE, tensor.owner, f"owner of tensor {tensor.name[:64]!r}")
        tensors.append(TensorMeta(tensor.name, owner, tensor.dtype, tuple(tensor.shape)))
    manifest = WeightManifest(tuple(tensors), message.bucket_bytes)
    manifest.check()  # before anybody allocates memory for it
    return manifest


def checksums_to_wire(record: WeightChecksums) -> weights_pb2.WeightChecksums:
    return weights_pb2.WeightChecksums(
        **(vars(record) | {"drafter_version": drafter_version_to_wire(record.drafter_version)})
    )


def checksums_from_wire(message: weights_pb2.WeightChecksums) -> WeightChecksums:
    return WeightChecksums(message.policy_version, tuple(message.checksums), drafter_version_from_wire(message))


def drafter_version_to_wire(version: int) -> int | None:
    """Return None without a drafter, which leaves the optional field absent."""
    return None if version == NO_DRAFTER else version


def drafter_version_from_wire(
    message: weights_pb2.WeightChecksums | generation_pb2.GenerationStatus | generation_pb2.CommitUpdateReply,
) -> int:
    """Read the drafter's version of any message that has one; NO_DRAFTER if the field is absent."""
    return message.drafter_version if message.HasField("drafter_version") else NO_DRAFTER


def weight_group_to_wire(record: WeightGroup) -> weights_pb2.WeightGroup:
    return weights_pb2.WeightGroup(**asdict(record))


def weight_group_from_wire(message: weights_pb2.WeightGroup) -> WeightGroup:
    return WeightGroup(**_read_scalars(message))


def generation_status_to_wire(record: GenerationStatus) -> generation_pb2.GenerationStatus:
    return generation_pb2.GenerationStatus(
        **(asdict(record) | {"drafter_version": drafter_version_to_wire(record.drafter_version)})
    )


def generation_status_from_wire(message: generation_pb2.GenerationStatus) -> GenerationStatus:
    status = GenerationStatus(
        **(_read_scalars(message) | {"drafter_version": drafter_version_from_wire(message)}),
        speculation=SpeculationCounters(**_read_scalars(message.speculation)),
        drafting=Drafting(**_read_scalars(message.drafting)) if message.HasField("drafting") else None,
        step_costs=tuple(StepCost(**_read_scalars(cost)) for cost in message.step_costs),
    )
    status.check()
    return status


def drafter_metrics_to_wire(record: DrafterMetrics) -> trainer_pb2.DrafterMetrics:
    return trainer_pb2.DrafterMetrics(**asdict(record))


def drafter_metrics_from_wire(message: trainer_pb2.DrafterMetrics) -> DrafterMetrics:
    return DrafterMetrics(**_read_scalars(message))


def drafter_epoch_to_wire(record: DrafterEpoch) -> trainer_pb2.DrafterEpoch:
    return trainer_pb2.DrafterEpoch(**asdict(record))


def drafter_epoch_from_wire(message: trainer_pb2.DrafterEpoch) -> DrafterEpoch:
    return DrafterEpoch(**_read_scalars(message))


def drafter_epoch_metrics_to_wire(record: DrafterEpochMetrics) -> trainer_pb2.DrafterEpochMetrics:
    return trainer_pb2.DrafterEpochMetrics(
        epoch=drafter_epoch_to_wire(record.epoch),
        trained=drafter_metrics_to_wire(record.trained),
        held_out=drafter_metrics_to_wire(record.held_out) if record.held_out is not None else None,
    )


def drafter_epoch_metrics_from_wire(message: trainer_pb2.DrafterEpochMetrics) -> DrafterEpochMetrics:
    return DrafterEpochMetrics(
        drafter_epoch_from_wire(message.epoch),
        drafter_metrics_from_wire(message.trained),
        drafter_metrics_from_wire(message.held_out) if message.HasField("held_out") else None,
    )


def train_metrics_to_wire(record: TrainMetrics) -> trainer_pb2.TrainMetrics:
    # A figure that is None, such as a KL without a reference, is left out of the map.
    values = {name: getattr(record, name) for name in FIGURES}
    return trainer_pb2.TrainMetrics(
        figures={name: value for name, value in values.items() if value is not None},
        tokens=record.tokens,
        logprob_seconds=record.logprob_seconds,
        train_seconds=record.train_seconds,
        drafter=drafter_metrics_to_wire(record.drafter) if record.drafter is not None else None,
        updates=record.updates,
        is_skipped=record.is_skipped,
    )


def train_metrics_from_wire(message: trainer_pb2.TrainMetrics) -> TrainMetrics:
    """Read the metrics of a step from a trainer of another version, too.

    Figures that this version does not know are ignored. Figures that the trainer does not send have their default.
    """
    figures = {name: message.figures[name] for name in FIGURES if name in message.figures}
    try:
        return TrainMetrics(
            **figures,  # counts are sent as doubles, too; pydantic makes them whole again
            **_read_scalars(message),
            drafter=drafter_metrics_from_wire(message.drafter) if message.HasField("drafter") else None,
        )
    except ValidationError as error:
        wrong = error.errors()[0]
        raise RecordInvalid(
            f"the figure {wrong['loc'][0]} of a training step is wrong: {wrong['msg']}, got {wrong['input']!r}; use "
            "the same version of specrl everywhere"
        ) from error


def trainer_status_to_wire(record: TrainerStatus) -> trainer_pb2.TrainerStatus:
    return trainer_pb2.TrainerStatus(**asdict(record))


def trainer_status_from_wire(message: trainer_pb2.TrainerStatus) -> TrainerStatus:
    stream = stream_place_from_wire(message.stream) if message.HasField("stream") else None
    return TrainerStatus(**_read_scalars(message), stream=stream)


def stream_place_to_wire(record: StreamPlace) -> trainer_pb2.StreamPlace:
    return trainer_pb2.StreamPlace(**asdict(record))


def stream_place_from_wire(message: trainer_pb2.StreamPlace) -> StreamPlace:
    place = StreamPlace(**_read_scalars(message))
    place.check()
    return place
