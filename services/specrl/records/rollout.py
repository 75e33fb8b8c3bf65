"""Prompt -> Rollout -> Group -> Batch. A Rollout is checked once, when it enters a process (`Rollout.check`).

Shapes: T tokens of one completion, G rollouts of one group.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from specrl.errors import RecordInvalid

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Sampling:
    """How one completion is drawn. temperature 0 is greedy; top_k 0 and top_p 1 keep the whole vocabulary."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Prompt:
    """A task with its verifier's data. `position` is its place in the shuffled stream, from 0, epochs included."""

    prompt_id: str
    position: int
    token_ids: tuple[int, ...]
    text: str
    answer: str


@dataclass(frozen=True)
class RolloutRequest:
    """One completion that a replica is asked for."""

    rollout_id: str
    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [first, end) were sampled under `policy_version`."""

    policy_version: int
    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion. token_ids_T [T] int32 and sampler_logprobs_T [T] float32 (nats), the end token included."""

    rollout_id: str
    group_id: str
    sample_index: int
    token_ids_T: IntArray
    sampler_logprobs_T: FloatArray
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    replica_id: str
    text: str
    seconds: float

    @property
    def length(self) -> int:
        """Generated tokens."""
        return len(self.token_ids_T)

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the tokens; policy lag is counted from it."""
        return min(span.policy_version for span in self.versions)

    def check(self, max_tokens: int) -> None:
        """Raise RecordInvalid unless the rollout is one that may be trained on."""

        def refuse(what: str) -> None:
            raise RecordInvalid(f"rollout {self.rollout_id}: {what}; it is generated again")

        if self.length == 0:
            refuse("tokens must not be empty, got length=0")
        if self.length > max_tokens:
            refuse(f"tokens must be at most max_tokens={max_tokens}, got length={self.length}")
        if len(self.sampler_logprobs_T) != self.length:
            refuse(f"log-probabilities must be one per token, got {len(self.sampler_logprobs_T)} for {self.length}")
        if not np.isfinite(self.sampler_logprobs_T).all():
            refuse("log-probabilities must be finite, got NaN or infinity")
        if (self.sampler_logprobs_T > 1e-4).any():
            refuse(f"log-probabilities must be <= 0, got max={self.sampler_logprobs_T.max()}")
        if (self.token_ids_T < 0).any():
            refuse("token ids must be >= 0, got a negative one")
        end = 0
        for span in self.versions:
            if span.first != end or span.end <= span.first:
                refuse(f"version spans must cover every token once, got {self.versions}")
            end = span.end
        if end != self.length:
            refuse(f"version spans must cover all {self.length} tokens, got {self.versions}")


@dataclass(frozen=True)
class Reward:
    """A verifier's verdict. `value` None means ungraded, which is not zero; `failure` then says why."""

    value: float | None
    failure: str = ""


@dataclass(frozen=True, eq=False)
class GradedRollout:
    """A finished rollout with its verdict."""

    rollout: Rollout
    reward: Reward


@dataclass(frozen=True, eq=False)
class Group:
    """The G rollouts of one prompt in sample order, each graded. Complete: nothing is missing or ungraded."""

    group_id: str
    prompt: Prompt
    target_step: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    @property
    def rewards_G(self) -> FloatArray:
        """[G] float32. Raises RecordInvalid when a rollout is ungraded."""
        values = [reward.value for reward in self.rewards]
        if any(value is None for value in values):
            raise RecordInvalid(f"group {self.group_id}: every rollout must be graded; regenerate the ungraded ones")
        return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class TrainRollout:
    """A rollout with its prompt and the one advantage that all of its tokens share."""

    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    advantage: float


@dataclass(frozen=True, eq=False)
class Batch:
    """What optimizer step `step` (>= 1) trains on, ordered by group, then sample. It produces policy version `step`."""

    step: int
    rollouts: tuple[TrainRollout, ...]

    @property
    def policy_lags(self) -> list[int]:
        """Per rollout: (step - 1) minus the oldest policy version among its tokens."""
        return [self.step - 1 - item.rollout.oldest_version for item in self.rollouts]
