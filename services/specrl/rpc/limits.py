"""Size limits of gRPC messages: per service, the largest message that the run file allows.

Client and server of a service apply the same limit, in both directions. All processes have the same run file, so they
compute the same limits. A larger message is refused by its sender, and again by its receiver (`server.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.spec import RunSpec
from specrl.spec.trainer import Routing

LARGEST_BYTES = (1 << 31) - 1
"""Largest protobuf message, 2 GiB. It is also the largest value of gRPC's size options, which are signed 32-bit."""

CONTROL_BYTES = 1 << 20
"""Limit of calls to the coordinator: names, an address, a status with its step costs."""

FRAME_BYTES = 64 << 20
"""Allowance for everything but rollouts.

The largest is a manifest: 100 bytes per tensor, for half a million tensors.
"""

REQUEST_BYTES = 1024
"""Allowance for a rollout's ids, sampling parameters and stop strings, with room to spare."""

ID_BYTES = 5
"""Longest token id: a 32-bit varint."""

TOKEN_BYTES = ID_BYTES + 4 + 24 + 128
"""Largest generated token: id, log-probability (4), its own version span (24) and its text (128).

The longest tokens of common vocabularies are runs of 128 spaces.
"""


@dataclass(frozen=True)
class MessageLimits:
    """Largest request or reply of each service, in bytes."""

    coordinator: int = CONTROL_BYTES
    generation: int = LARGEST_BYTES
    trainer: int = LARGEST_BYTES


WIDEST_LIMITS = MessageLimits()
"""Limits of a process without a run file."""


def message_limits(spec: RunSpec) -> MessageLimits:
    """Compute the limits of a run. A limit above LARGEST_BYTES becomes LARGEST_BYTES.

    That is safe, because most rollouts are far shorter than the longest one. Runs that replay expert routing have the
    widest limits: the size of their rollouts depends on the model, which is not known here. So do runs with topP or
    topK: a sampling set may be the whole vocabulary, since topK keeps all tokens that are as likely as the last one.
    """
    if spec.trainer.routing is Routing.REPLAY or spec.generation.sampling.is_truncated:
        return WIDEST_LIMITS
    schedule = spec.schedule
    prompt = spec.prompts.max_tokens * ID_BYTES
    batch = schedule.prompts_per_step * schedule.group_size
    start = spec.trainer.drafter.initialisation
    validations = spec.validation.all_sets if spec.validation is not None else ()
    validated = sum(it.limit * it.sampling.samples_per_prompt for it in validations)
    lessons = start.most_prompts * start.samples_per_prompt
    # Most rollouts that one request may ask for: all steps that the policy lag allows at once, a validation, or the
    # drafter's initialisation.
    asked = max(batch * (1 + schedule.max_policy_lag), validated, lessons)
    # Most rollouts that one call to the trainer may carry.
    trained = max(batch, lessons)
    longest = max([spec.generation.sampling.max_tokens, *(it.sampling.max_tokens or 0 for it in validations)])
    completion = longest * TOKEN_BYTES
    return MessageLimits(
        generation=_add_frame(max(asked * (REQUEST_BYTES + prompt), completion)),
        trainer=_add_frame(trained * (REQUEST_BYTES + prompt + completion)),
    )


def _add_frame(size_bytes: int) -> int:
    return min(FRAME_BYTES + size_bytes, LARGEST_BYTES)
