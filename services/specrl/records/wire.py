"""Records to protobuf and back: the only place that knows both. A message that cannot be read raises RecordInvalid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import lru_cache
from typing import Any

import numpy as np
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import DecodeError

from specrl.api.v1 import coordinator_pb2, generation_pb2, rollout_pb2, trainer_pb2, weights_pb2
from specrl.errors import RecordInvalid
from specrl.records.peer import HeldRollout, Peer, Role
from specrl.records.rollout import (
    Batch,
    ExpertArray,
    FinishReason,
    GradedRollout,
    Group,
    OutputSpan,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    Sampling,
    TrainRollout,
    VersionSpan,
)
from specrl.records.status import (
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

_FINISH = {
    FinishReason.STOP: rollout_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: rollout_pb2.FINISH_REASON_LENGTH,
    FinishReason.TURNS: rollout_pb2.FINISH_REASON_TURNS,
}
_FINISH_BACK = {number: reason for reason, number in _FINISH.items()}
_OWNER = {
    WeightOwner.POLICY: weights_pb2.WEIGHT_OWNER_POLICY,
    WeightOwner.DRAFTER: weights_pb2.WEIGHT_OWNER_DRAFTER,
}
_OWNER_BACK = {number: owner for owner, number in _OWNER.items()}

_EXPERT: dict[int, np.dtype[Any]] = {1: np.dtype("u1"), 2: np.dtype("<u2")}  # by the bytes of a number
_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f4")
"""Numbers of a rollout's tokens as they lie in a message: a copy of memory. As repeated fields they cost some
forty times as much (docs/decisions/0011)."""

PART_BYTES = 1 << 20
"""Of a batch on its way to the trainer. What makes one up holds the event loop for a millisecond."""

_ROLE = {Role.GENERATION: coordinator_pb2.ROLE_GENERATION, Role.TRAINER: coordinator_pb2.ROLE_TRAINER}
_ROLE_BACK = {number: role for role, number in _ROLE.items()}


def role_to_wire(record: Role) -> coordinator_pb2.Role.ValueType:
    return _ROLE[record]


def peer_from_wire(message: coordinator_pb2.RegisterRequest) -> Peer:
    if message.role not in _ROLE_BACK:
        raise RecordInvalid(
            f"peer {message.peer_id[:64]!r}: role must be known, got {message.role}; use the same version"
        )
    peer = Peer(
        message.peer_id,
        _ROLE_BACK[message.role],
        message.address,
        message.spec_digest,
        message.incarnation,
        message.metrics_port,
    )
    peer.check()
    return peer


def held_to_wire(record: HeldRollout) -> coordinator_pb2.HeldRollout:
    return coordinator_pb2.HeldRollout(rollout_id=record.rollout_id, policy_version=record.policy_version)


def held_from_wire(message: coordinator_pb2.HeldRollout) -> HeldRollout:
    return HeldRollout(message.rollout_id, message.policy_version)


def sampling_to_wire(record: Sampling) -> rollout_pb2.Sampling:
    return rollout_pb2.Sampling(**vars(record))


def sampling_from_wire(message: rollout_pb2.Sampling) -> Sampling:
    return Sampling(
        max_tokens=message.max_tokens,
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed if message.HasField("seed") else None,
        stop=tuple(message.stop),
    )


def prompt_to_wire(record: Prompt) -> rollout_pb2.Prompt:
    """All but its row, which stays in the coordinator."""
    return rollout_pb2.Prompt(
        prompt_id=record.prompt_id,
        position=record.position,
        token_ids=record.token_ids,
        text=record.text,
        answer=record.answer,
    )


def prompt_from_wire(message: rollout_pb2.Prompt) -> Prompt:
    return Prompt(message.prompt_id, message.position, tuple(message.token_ids), message.text, message.answer)


def request_to_wire(record: RolloutRequest) -> generation_pb2.RolloutRequest:
    return generation_pb2.RolloutRequest(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        sample_index=record.sample_index,
        prompt_token_ids=record.prompt_token_ids,
        sampling=sampling_to_wire(record.sampling),
        traceparent=record.traceparent,
    )


def request_from_wire(message: generation_pb2.RolloutRequest) -> RolloutRequest:
    return RolloutRequest(
        message.rollout_id,
        message.group_id,
        message.sample_index,
        tuple(message.prompt_token_ids),
        sampling_from_wire(message.sampling),
        message.traceparent,
    )


def rollout_to_wire(record: Rollout) -> rollout_pb2.Rollout:
    return rollout_pb2.Rollout(
        rollout_id=record.rollout_id,
        group_id=record.group_id,
        sample_index=record.sample_index,
        packed_token_ids=record.token_ids_T.astype(_TOKEN, copy=False).tobytes(),
        packed_sampler_logprobs=record.sampler_logprobs_T.astype(_LOGPROB, copy=False).tobytes(),
        versions=[rollout_pb2.VersionSpan(**vars(span)) for span in record.versions],
        finish_reason=_FINISH[record.finish_reason],
        replica_id=record.replica_id,
        text=record.text,
        seconds=record.seconds,
        outputs=[rollout_pb2.OutputSpan(**vars(span)) for span in record.outputs],
        stop=record.stop,
        **_experts_to_wire(record.experts_SLK),
    )


def _experts_to_wire(experts_SLK: ExpertArray | None) -> dict[str, Any]:
    if experts_SLK is None:
        return {}
    width = experts_SLK.itemsize
    return {
        "packed_experts": experts_SLK.astype(_EXPERT[width], copy=False).tobytes(),
        "expert_layers": experts_SLK.shape[1],
        "experts_per_token": experts_SLK.shape[2],
        "expert_bytes": width,
    }


def _experts_from_wire(message: rollout_pb2.Rollout) -> ExpertArray | None:
    packed, layers, each = message.packed_experts, message.expert_layers, message.experts_per_token
    if not packed:
        return None
    kind = _EXPERT.get(message.expert_bytes)
    if kind is None or layers < 1 or each < 1 or len(packed) % (layers * each * kind.itemsize):
        raise RecordInvalid(
            f"rollout {message.rollout_id[:64]}: experts must be whole tokens of {layers} layers x {each} experts of "
            f"{message.expert_bytes} bytes, got {len(packed)} bytes; use the same version everywhere"
        )
    found: ExpertArray = np.frombuffer(packed, dtype=kind).astype(kind.newbyteorder("=")).reshape(-1, layers, each)
    return found


def rollout_to_bytes(record: Rollout) -> bytes:
    """The message that it was read from; or the one that says it, the same every time."""
    if record.message is not None:
        return record.message
    return rollout_to_wire(record).SerializeToString(deterministic=True)


def rollout_from_bytes(data: bytes) -> Rollout:
    """A rollout that remembers its message: parsed once, it is stored and sent on as the bytes that came."""
    try:
        rollout = rollout_from_wire(rollout_pb2.Rollout.FromString(data))
    except DecodeError as error:
        raise RecordInvalid(
            f"a rollout must be the protobuf message of its name, got {len(data)} other bytes; use the same version of "
            "specrl everywhere"
        ) from error
    for numbers in (rollout.token_ids_T, rollout.sampler_logprobs_T, rollout.experts_SLK):
        if numbers is not None:
            numbers.flags.writeable = False
    object.__setattr__(rollout, "message", data)  # frozen for everybody else
    return rollout


def rollout_from_wire(message: rollout_pb2.Rollout) -> Rollout:
    if message.finish_reason not in _FINISH_BACK:
        raise RecordInvalid(
            f"rollout {message.rollout_id[:64]}: finish_reason must be known, got {message.finish_reason}"
        )
    return Rollout(
        rollout_id=message.rollout_id,
        group_id=message.group_id,
        sample_index=message.sample_index,
        token_ids_T=_unpacked(message, message.packed_token_ids, message.token_ids, _TOKEN),
        sampler_logprobs_T=_unpacked(message, message.packed_sampler_logprobs, message.sampler_logprobs, _LOGPROB),
        versions=tuple(VersionSpan(span.policy_version, span.first, span.end) for span in message.versions),
        finish_reason=_FINISH_BACK[message.finish_reason],
        replica_id=message.replica_id,
        text=message.text,
        seconds=message.seconds,
        outputs=tuple(OutputSpan(span.first, span.end) for span in message.outputs),
        stop=message.stop,
        experts_SLK=_experts_from_wire(message),
    )


def _unpacked(message: rollout_pb2.Rollout, packed: bytes, listed: Sequence[float], kind: np.dtype[Any]) -> Any:
    """One number a token; listed: where rollouts have it that were stored before there was the packed form."""
    if listed and not packed:
        return np.asarray(listed, dtype=kind.newbyteorder("="))
    if len(packed) % kind.itemsize:
        raise RecordInvalid(
            f"rollout {message.rollout_id}: packed numbers must be of {kind.itemsize} bytes each, got {len(packed)} "
            "bytes; use the same version everywhere"
        )
    return np.frombuffer(packed, dtype=kind).astype(kind.newbyteorder("="))  # which may be written to


def reward_to_wire(record: Reward) -> rollout_pb2.Reward:
    return rollout_pb2.Reward(
        value=record.value,
        failure=record.failure,
        extracted=record.extracted,
        reason=record.reason,
        lacks_answer=record.lacks_answer,
        error=record.error,
    )


def reward_from_wire(message: rollout_pb2.Reward) -> Reward:
    value = message.value if message.HasField("value") else None
    return Reward(value, message.failure, message.extracted, message.reason, message.lacks_answer, message.error)


def graded_to_bytes(record: GradedRollout) -> bytes:
    """The stored form of a finished rollout."""
    rollout = rollout_to_bytes(record.rollout)
    rest = rollout_pb2.GradedRollout(reward=reward_to_wire(record.reward)).SerializeToString(deterministic=True)
    return b"".join((_prefix(rollout_pb2.GradedRollout.ROLLOUT_FIELD_NUMBER, len(rollout)), rollout, rest))


def graded_from_bytes(data: bytes) -> GradedRollout:
    try:
        message = rollout_pb2.GradedRollout.FromString(data)
    except DecodeError as error:
        raise RecordInvalid(f"a stored rollout must be a GradedRollout, got {len(data)} other bytes") from error
    return GradedRollout(rollout_from_wire(message.rollout), reward_from_wire(message.reward))


def graded_to_json(data: bytes) -> dict[str, Any]:
    """A stored rollout for people to read: protobuf's JSON, in which 64-bit numbers are text."""
    rollout = graded_from_bytes(data).rollout
    found: dict[str, Any] = MessageToDict(rollout_pb2.GradedRollout.FromString(data))
    for name in ("packedTokenIds", "packedSamplerLogprobs", "packedExperts"):  # experts are nothing to be read
        found["rollout"].pop(name, None)
    found["rollout"] |= {
        "tokenIds": rollout.token_ids_T.tolist(),
        "samplerLogprobs": rollout.sampler_logprobs_T.tolist(),
    }
    return found


def group_to_wire(record: Group) -> rollout_pb2.Group:
    return rollout_pb2.Group(
        group_id=record.group_id,
        prompt=prompt_to_wire(record.prompt),
        target_step=record.target_step,
        rollouts=[rollout_to_wire(rollout) for rollout in record.rollouts],
        rewards=[reward_to_wire(reward) for reward in record.rewards],
    )


def group_from_wire(message: rollout_pb2.Group) -> Group:
    return Group(
        group_id=message.group_id,
        prompt=prompt_from_wire(message.prompt),
        target_step=message.target_step,
        rollouts=tuple(rollout_from_wire(rollout) for rollout in message.rollouts),
        rewards=tuple(reward_from_wire(reward) for reward in message.rewards),
    )


def group_to_bytes(record: Group) -> bytes:
    """The stored form of a group."""
    return group_to_wire(record).SerializeToString(deterministic=True)


def group_from_bytes(data: bytes) -> Group:
    try:
        return group_from_wire(rollout_pb2.Group.FromString(data))
    except DecodeError as error:
        raise RecordInvalid(f"a stored group must be a protobuf Group, got {len(data)} other bytes") from error


def train_rollout_to_wire(record: TrainRollout) -> rollout_pb2.TrainRollout:
    return rollout_pb2.TrainRollout(
        prompt_token_ids=record.prompt_token_ids,
        rollout=rollout_to_wire(record.rollout),
        advantage=record.advantage,
        reward=record.reward,
    )


def train_rollout_from_wire(message: rollout_pb2.TrainRollout) -> TrainRollout:
    rollout = rollout_from_wire(message.rollout)
    return TrainRollout(tuple(message.prompt_token_ids), rollout, message.advantage, message.reward)


def batch_to_wire(record: Batch) -> rollout_pb2.Batch:
    return rollout_pb2.Batch(
        step=record.step,
        rollouts=[train_rollout_to_wire(item) for item in record.rollouts],
        positions=record.positions,
    )


def batch_from_wire(message: rollout_pb2.Batch) -> Batch:
    rollouts = tuple(train_rollout_from_wire(item) for item in message.rollouts)
    return Batch(message.step, rollouts, tuple(message.positions))


def batch_to_bytes(record: Batch) -> bytes:
    """The stored form of a batch: what is replayed is what was sent."""
    return batch_to_wire(record).SerializeToString(deterministic=True)


def batch_from_bytes(data: bytes) -> Batch:
    return batch_from_wire(_batch_message(data))


def batch_outline(record: Batch) -> bytes:
    """A batch whose rollouts lie elsewhere: what `batch_from_stored` makes it of, with them."""
    parts = [rollout_pb2.Batch(step=record.step, positions=record.positions).SerializeToString(deterministic=True)]
    for outline in _outlines(record):
        parts += [_prefix(rollout_pb2.Batch.ROLLOUTS_FIELD_NUMBER, len(outline)), outline]
    return b"".join(parts)


def batch_from_stored(data: bytes, rollouts: Sequence[bytes]) -> Batch:
    """A batch of its outline and its graded rollouts, in its order; or of a message that has them itself.

    Raises RecordInvalid unless there is one for each that the outline has, and no other.
    """
    message = _batch_message(data)
    outlined = [item for item in message.rollouts if not item.HasField("rollout")]
    if len(outlined) != len(rollouts):
        raise RecordInvalid(
            f"the stored batch of step {message.step} must have all of its {len(outlined)} rollouts, got "
            f"{len(rollouts)}; restore the store"
        )
    for item, graded in zip(outlined, rollouts, strict=True):
        item.rollout.CopyFrom(rollout_pb2.GradedRollout.FromString(graded).rollout)
    return batch_from_wire(message)


def batch_positions(data: bytes) -> tuple[int, ...]:
    """Places in the stream that a stored batch settles; none if it was made before there was an order but InOrder."""
    return tuple(_batch_message(data).positions)


def train_step_parts(record: Batch) -> Iterator[bytes]:
    """Messages of a TrainParts call, TrainStepRequest each, of some `PART_BYTES` or of one rollout.

    They are put together from their parts' bytes, which is what a message with these fields is: protobuf's encoding has
    no header and no checksum.
    """
    total = trainer_pb2.TrainStepRequest(rollouts_total=len(record.rollouts)).SerializeToString(deterministic=True)
    head = rollout_pb2.Batch(step=record.step, positions=record.positions).SerializeToString(deterministic=True)
    parts, size_bytes = [head], len(head)
    for item, outline in zip(record.rollouts, _outlines(record), strict=True):
        rollout = rollout_to_bytes(item.rollout)
        inner = _prefix(rollout_pb2.TrainRollout.ROLLOUT_FIELD_NUMBER, len(rollout))
        length = len(outline) + len(inner) + len(rollout)
        if size_bytes + length > PART_BYTES and len(parts) > 1:
            yield _train_step_request(parts, size_bytes, total)
            head = rollout_pb2.Batch(step=record.step).SerializeToString(deterministic=True)
            parts, size_bytes = [head], len(head)
        outer = _prefix(rollout_pb2.Batch.ROLLOUTS_FIELD_NUMBER, length)
        parts += [outer, outline, inner, rollout]
        size_bytes += len(outer) + length
    yield _train_step_request(parts, size_bytes, total)


def batch_from_parts(parts: Sequence[Batch], rollouts_total: int) -> Batch:
    """The batch that was sent in parts. rollouts_total: how many it has, as its parts say.

    Raises RecordInvalid unless the parts are of one step, and have every rollout of it once.
    """
    if not parts:
        raise RecordInvalid("a batch must have at least one part, got none; send one also when it has no rollouts")
    steps = sorted({part.step for part in parts})
    if len(steps) > 1:
        raise RecordInvalid(f"all parts of a batch must be of one step, got {steps[:8]}; send one batch in a call")
    rollouts = tuple(item for part in parts for item in part.rollouts)
    distinct = len({item.rollout.rollout_id for item in rollouts})
    if not distinct == len(rollouts) == rollouts_total:
        raise RecordInvalid(
            f"all parts of a batch must have its {rollouts_total} rollouts, each once, got {len(rollouts)}, of which "
            f"{distinct} are different; send it again, whole"
        )
    return Batch(steps[0], rollouts, tuple(position for part in parts for position in part.positions))


def _train_step_request(parts: Sequence[bytes], size_bytes: int, total: bytes) -> bytes:
    return b"".join((_prefix(trainer_pb2.TrainStepRequest.BATCH_FIELD_NUMBER, size_bytes), *parts, total))


def _outlines(record: Batch) -> Iterator[bytes]:
    """What each TrainRollout is without its rollout. The tokens of a group's prompt are encoded once."""
    prompt: tuple[int, ...] | None = None
    encoded = b""
    for item in record.rollouts:
        if item.prompt_token_ids is not prompt:
            prompt = item.prompt_token_ids
            encoded = rollout_pb2.TrainRollout(prompt_token_ids=prompt).SerializeToString(deterministic=True)
        own = rollout_pb2.TrainRollout(advantage=item.advantage, reward=item.reward)
        yield encoded + own.SerializeToString(deterministic=True)


def _batch_message(data: bytes) -> rollout_pb2.Batch:
    try:
        return rollout_pb2.Batch.FromString(data)
    except DecodeError as error:
        raise RecordInvalid(f"a stored batch must be a protobuf Batch, got {len(data)} other bytes") from error


def _prefix(number: int, size_bytes: int) -> bytes:
    """What stands before the bytes of a message that is field `number` of another: tag and length, as varints.

    Source: protobuf.dev/programming-guides/encoding, wire type LEN.
    """
    found = bytearray()
    for value in (number << 3 | 2, size_bytes):
        left = value
        while left > 0x7F:
            found.append(left & 0x7F | 0x80)
            left >>= 7
        found.append(left)
    return bytes(found)


@lru_cache(maxsize=1)  # it is the same for every replica, and of a mixture of experts tens of thousands of tensors
def manifest_to_wire(record: WeightManifest) -> weights_pb2.WeightManifest:
    return weights_pb2.WeightManifest(
        tensors=[
            weights_pb2.TensorMeta(name=t.name, owner=_OWNER[t.owner], dtype=t.dtype, shape=t.shape)
            for t in record.tensors
        ],
        bucket_bytes=record.bucket_bytes,
    )


def manifest_from_wire(message: weights_pb2.WeightManifest) -> WeightManifest:
    unknown = [t.name for t in message.tensors if t.owner not in _OWNER_BACK]
    if unknown:
        raise RecordInvalid(f"every tensor's owner must be known, got another for {unknown[0]}; use the same version")
    manifest = WeightManifest(
        tuple(TensorMeta(t.name, _OWNER_BACK[t.owner], t.dtype, tuple(t.shape)) for t in message.tensors),
        message.bucket_bytes,
    )
    manifest.check()
    return manifest


def checksums_to_wire(record: WeightChecksums) -> weights_pb2.WeightChecksums:
    return weights_pb2.WeightChecksums(
        policy_version=record.policy_version,
        checksums=record.checksums,
        drafter_version=drafter_version_to_wire(record.drafter_version),
    )


def checksums_from_wire(message: weights_pb2.WeightChecksums) -> WeightChecksums:
    return WeightChecksums(message.policy_version, tuple(message.checksums), drafter_version_from_wire(message))


def drafter_version_to_wire(version: int) -> int | None:
    """None, which leaves the field absent, where there is no drafter."""
    return None if version == NO_DRAFTER else version


def drafter_version_from_wire(
    message: weights_pb2.WeightChecksums | generation_pb2.GenerationStatus | generation_pb2.CommitUpdateReply,
) -> int:
    """The drafter's version in any message that carries one; absent is `NO_DRAFTER`."""
    return message.drafter_version if message.HasField("drafter_version") else NO_DRAFTER


def weight_group_to_wire(record: WeightGroup) -> weights_pb2.WeightGroup:
    return weights_pb2.WeightGroup(**asdict(record))


def weight_group_from_wire(message: weights_pb2.WeightGroup) -> WeightGroup:
    return WeightGroup(
        message.group_id,
        message.address,
        message.port,
        message.rank,
        message.world_size,
        message.timeout_s,
        message.transport,
        message.folder,
    )


def counters_to_wire(record: SpeculationCounters) -> generation_pb2.SpeculationCounters:
    return generation_pb2.SpeculationCounters(**asdict(record))


def counters_from_wire(message: generation_pb2.SpeculationCounters) -> SpeculationCounters:
    return SpeculationCounters(
        message.drafts,
        message.draft_tokens,
        message.accepted_tokens,
        tuple(message.accepted_per_position),
        message.generated_tokens,
    )


def generation_status_to_wire(record: GenerationStatus) -> generation_pb2.GenerationStatus:
    return generation_pb2.GenerationStatus(
        replica_id=record.replica_id,
        policy_version=record.policy_version,
        is_paused=record.is_paused,
        live_requests=record.live_requests,
        speculation=counters_to_wire(record.speculation),
        drafter_version=drafter_version_to_wire(record.drafter_version),
        drafting=generation_pb2.Drafting(**vars(record.drafting)) if record.drafting is not None else None,
        step_costs=[generation_pb2.StepCost(**vars(cost)) for cost in record.step_costs],
    )


def generation_status_from_wire(message: generation_pb2.GenerationStatus) -> GenerationStatus:
    status = GenerationStatus(
        message.replica_id,
        message.policy_version,
        message.is_paused,
        message.live_requests,
        counters_from_wire(message.speculation),
        drafter_version_from_wire(message),
        _drafting_from_wire(message.drafting) if message.HasField("drafting") else None,
        tuple(
            StepCost(cost.draft_tokens, cost.steps, cost.live_sum, cost.context_sum, cost.seconds_sum)
            for cost in message.step_costs
        ),
    )
    status.check()
    return status


def _drafting_from_wire(message: generation_pb2.Drafting) -> Drafting:
    measured = message.measured_gain if message.HasField("measured_gain") else None
    return Drafting(message.state, message.predicted_gain, measured)


def drafter_metrics_to_wire(record: DrafterMetrics) -> trainer_pb2.DrafterMetrics:
    return trainer_pb2.DrafterMetrics(**asdict(record))


def drafter_metrics_from_wire(message: trainer_pb2.DrafterMetrics) -> DrafterMetrics:
    return DrafterMetrics(message.loss, message.grad_norm, tuple(message.acceptance_per_position), message.seconds)


def train_metrics_to_wire(record: TrainMetrics) -> trainer_pb2.TrainMetrics:
    fields = {name: value for name, value in vars(record).items() if name != "drafter"}
    drafter = drafter_metrics_to_wire(record.drafter) if record.drafter is not None else None
    return trainer_pb2.TrainMetrics(**fields, drafter=drafter)


def train_metrics_from_wire(message: trainer_pb2.TrainMetrics) -> TrainMetrics:
    fields = {name: getattr(message, name) for name in TrainMetrics.__dataclass_fields__ if name != "drafter"}
    drafter = drafter_metrics_from_wire(message.drafter) if message.HasField("drafter") else None
    return TrainMetrics(**fields, drafter=drafter)


def trainer_status_to_wire(record: TrainerStatus) -> trainer_pb2.TrainerStatus:
    return trainer_pb2.TrainerStatus(**asdict(record))


def trainer_status_from_wire(message: trainer_pb2.TrainerStatus) -> TrainerStatus:
    return TrainerStatus(
        message.step,
        message.checkpoint_step,
        message.is_drafter_initialised,
        message.world_size,
        stream_place_from_wire(message.stream) if message.HasField("stream") else None,
    )


def stream_place_to_wire(record: StreamPlace) -> trainer_pb2.StreamPlace:
    return trainer_pb2.StreamPlace(**asdict(record))


def stream_place_from_wire(message: trainer_pb2.StreamPlace) -> StreamPlace:
    """Raises RecordInvalid."""
    place = StreamPlace(message.cursor, tuple(message.ahead), message.problems, message.identity)
    place.check()
    return place
