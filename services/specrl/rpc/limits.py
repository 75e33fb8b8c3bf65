"""How large a message of each service may be: what the largest legal one of the run is, and no more.

Both sides of a service keep to one limit, in both directions. Run files are equal at all processes of a run, and so are
the limits. A message beyond is refused where it would be sent, and again where it arrives (`server.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.spec import RunSpec
from specrl.spec.trainer import Routing

LARGEST_BYTES = (1 << 31) - 1
"""Of a protobuf message, whatever is asked for; and of what gRPC's options can say."""

CONTROL_BYTES = 1 << 20
"""Of a call to the coordinator: names, an address, a status. Metadata of gRPC itself is limited to 8 KiB."""

FRAME_BYTES = 64 << 20
"""What a call may hold beside rollouts. The largest is a manifest: 100 bytes a tensor, for half a million tensors."""

REQUEST_BYTES = 1024
"""A rollout's names, sampling and, with room to spare, stop strings."""

ID_BYTES = 5
"""A token id: a varint of 32 bits at its longest."""

TOKEN_BYTES = ID_BYTES + 4 + 24 + 128
"""A generated token: id, log-probability, a version span of its own (which is absurd), and its text; the longest tokens
of the vocabularies in use are runs of 128 spaces."""


@dataclass(frozen=True)
class MessageLimits:
    """Bytes of one message, by the service that it is a call to, or an answer of."""

    coordinator: int = CONTROL_BYTES
    generation: int = LARGEST_BYTES
    trainer: int = LARGEST_BYTES


WIDEST = MessageLimits()
"""Where there is no run file."""


def message_limits(spec: RunSpec) -> MessageLimits:
    """A run's limits; LARGEST_BYTES where they would be beyond: rollouts are mostly shorter than they may be.

    So it is for rollouts that hold experts, whose number is the model's.
    """
    if spec.trainer.routing is Routing.REPLAY:
        return WIDEST
    schedule, prompt = spec.schedule, spec.prompts.max_tokens * ID_BYTES
    batch = schedule.prompts_per_step * schedule.group_size
    start = spec.trainer.drafter.initialisation
    validation = spec.validation
    validated = validation.limit * validation.sampling.samples_per_prompt if validation is not None else 0
    lessons = start.prompts * start.samples_per_prompt
    asked = max(batch * (1 + schedule.max_policy_lag), validated, lessons)
    trained = max(batch, lessons)
    completion = spec.generation.sampling.max_tokens * TOKEN_BYTES
    return MessageLimits(
        generation=_at_most(max(asked * (REQUEST_BYTES + prompt), completion)),
        trainer=_at_most(trained * (REQUEST_BYTES + prompt + completion)),
    )


def _at_most(size_bytes: int) -> int:
    return min(FRAME_BYTES + size_bytes, LARGEST_BYTES)
