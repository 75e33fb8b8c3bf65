"""Prompt -> Rollout -> Group -> Batch. A Rollout is checked once, when it enters a process (`Rollout.check`).

A rollout that calls tools has turns, in which the policy samples, and between them the tools' outputs, which it only
reads. They are one sequence of tokens; whatever is trained, measured or compared is about the sampled ones alone.

Shapes: T tokens of one completion, N of them sampled (N = T without tools), G rollouts of one group; S tokens of prompt
and completion but the last one, L layers, K experts of each token.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
import numpy.typing as npt

from specrl.errors import RecordInvalid

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.unsignedinteger[Any]]


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
    """A task with its verifier's data. `position` is its place in the shuffled stream, from 0, epochs included.

    row: all columns of its record, for a verifier that may ask for them. It stays in the coordinator: no message
    carries it.
    """

    prompt_id: str
    position: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True)
class RolloutRequest:
    """One completion that a replica is asked for."""

    rollout_id: str
    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    traceparent: str = field(default="", compare=False)
    """The span that it is part of, as the sender wrote it; it says nothing of what is asked for."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    """A tool was called in the last turn that a rollout may have."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [first, end) were sampled under `policy_version`."""

    policy_version: int
    first: int
    end: int


@dataclass(frozen=True)
class OutputSpan:
    """Tokens [first, end) are a tool's output."""

    first: int
    end: int


@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion. token_ids_T [T] int32 and sampler_logprobs_T [T] float32 (nats), the end token included.

    versions cover the sampled tokens, outputs the others, whose log-probability is written as 0. text is what was
    sampled, a tool's output left out. stop is the stop string that ended the last turn, empty where none did.
    experts_SLK [S, L, K] uint8 or uint16 are the experts that the sampler sent tokens to, with trainer.routing Replay.
    message is what it was read from, to be passed on as it is (docs/decisions/0017); None where it was made here. The
    arrays cannot be written to then, and a copy with other values has none.
    """

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
    outputs: tuple[OutputSpan, ...] = ()
    stop: str = ""
    experts_SLK: ExpertArray | None = None
    message: bytes | None = field(default=None, init=False, repr=False)

    @property
    def length(self) -> int:
        """Tokens, outputs of tools included."""
        return len(self.token_ids_T)

    @property
    def sampled_length(self) -> int:
        """N: tokens that the policy sampled."""
        return self.length - sum(span.end - span.first for span in self.outputs)

    @property
    def turns(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of what the policy sampled without a pause: all tokens, or those between outputs of tools."""
        ends = [*(span.first for span in self.outputs), self.length]
        return tuple(zip([0, *(span.end for span in self.outputs)], ends, strict=True))

    @property
    def sampled_N(self) -> npt.NDArray[np.int64]:
        """[N] indices of the sampled tokens, ascending."""
        return np.concatenate([np.arange(first, end) for first, end in self.turns])

    @property
    def oldest_version(self) -> int:
        """Oldest policy version among the sampled tokens of all turns; policy lag is counted from it."""
        return min(span.policy_version for span in self.versions)

    def check(self, max_tokens: int, versions: range | None = None) -> None:
        """Raise RecordInvalid unless the rollout is one that may be trained on.

        versions: the policy versions that its replica can have served while it was sampled; None where nobody knows.
        """

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
        self._check_spans(refuse, versions)

    def check_replayed(self, prompt_tokens: int) -> None:
        """Raise RecordInvalid unless it holds experts for every token of the prompt and of its own but the last one."""
        wanted = prompt_tokens + self.length - 1
        held = 0 if self.experts_SLK is None else len(self.experts_SLK)
        if held != wanted:
            raise RecordInvalid(
                f"rollout {self.rollout_id}: with trainer.routing Replay experts must be those of {wanted} tokens, got "
                f"{held}; it is generated again"
            )

    def _check_spans(self, refuse: Callable[[str], None], versions: range | None) -> None:
        """Every token was sampled under one version, or is of one output; outputs stand between what was sampled."""
        got = f"{self.versions} and {self.outputs}" if self.outputs else f"{self.versions}"
        spans: list[VersionSpan | OutputSpan] = [*self.versions, *self.outputs]
        end, version, was_output = 0, -math.inf, True
        for span in sorted(spans, key=lambda span: span.first):
            if span.first != end or span.end <= span.first:
                refuse(f"version spans must cover every token once, got {got}")
            if isinstance(span, OutputSpan):
                if was_output:
                    refuse(f"the output of a tool must follow what the policy sampled, got {got}")
            else:
                if span.policy_version < version:
                    refuse(f"policy versions must never fall, got {got}")
                if versions is not None and span.policy_version not in versions:
                    allowed = f"{versions.start} to {versions.stop - 1}"
                    refuse(f"policy versions must be those that its replica served, {allowed}, got {got}")
                version = span.policy_version
            end, was_output = span.end, isinstance(span, OutputSpan)
        if end != self.length:
            refuse(f"version spans must cover all {self.length} tokens, got {got}")
        if was_output:
            refuse(f"the last token must be sampled, got {got}")
        if any(self.sampler_logprobs_T[span.first : span.end].any() for span in self.outputs):
            refuse("a tool's output must have no log-probabilities, got some other than 0")


@dataclass(frozen=True)
class Reward:
    """A verifier's verdict. `value` None means ungraded, for a reason that no answer can cause: `failure` says it."""

    value: float | None
    failure: str = ""
    extracted: str = ""
    """The answer that the verifier found in the completion; empty: it found none, or judges the whole completion."""
    reason: str = ""
    """Why the value is what it is, in one line."""
    lacks_answer: bool = False
    """The verifier looked for an answer in the completion and found none; the value is 0."""
    error: str = ""
    """What the verifier raised while it read the answer, by type and place, or `timeout` or `crash`; the value is 0."""


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
    """A rollout with its prompt, the one advantage that all of its sampled tokens share, and its shaped reward."""

    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    advantage: float
    reward: float = 0.0

    def check_experts(self, shape: tuple[int, int, int]) -> None:
        """Raise RecordInvalid unless its experts, if it has any, are those of a mixture.

        shape: layers, experts of each token, and experts that each layer has.
        """
        experts_SLK = self.rollout.experts_SLK
        if experts_SLK is None:
            return
        tokens, (layers, each, count) = len(self.prompt_token_ids) + self.rollout.length - 1, shape
        if experts_SLK.shape != (tokens, layers, each) or (experts_SLK.size and int(experts_SLK.max()) >= count):
            highest = int(experts_SLK.max()) if experts_SLK.size else -1
            raise RecordInvalid(
                f"rollout {self.rollout.rollout_id[:64]}: experts must be {tokens} tokens x {layers} layers x {each}, "
                f"each < {count}, got {experts_SLK.shape} up to {highest}: sampler and trainer have different models"
            )

    def check(self, max_length: int, vocab_size: int) -> None:
        """Raise RecordInvalid unless a model of this length and vocabulary can be trained on it."""
        prompt, ids_T = self.prompt_token_ids, self.rollout.token_ids_T

        def refuse(what: str) -> None:
            raise RecordInvalid(f"rollout {self.rollout.rollout_id[:64]}: {what}; generate it again")

        if not prompt or len(prompt) + len(ids_T) > max_length:
            refuse(f"prompt and completion must have 1 to {max_length} tokens, got {len(prompt)} + {len(ids_T)}")
        self.rollout.check(max_length)
        if min(prompt) < 0 or max(*prompt, int(ids_T.max())) >= vocab_size:
            refuse(f"token ids must be >= 0 and < {vocab_size}, got others: sampler and trainer have different models")
        if not (math.isfinite(self.advantage) and math.isfinite(self.reward)):
            refuse(f"advantage and reward must be finite, got {self.advantage} and {self.reward}")


@dataclass(frozen=True, eq=False)
class Batch:
    """What optimizer step `step` (>= 1) trains on, ordered by group, then sample. It produces policy version `step`.

    positions: places in the stream that the step settles, ascending; one without rollouts was given up or left out.
    """

    step: int
    rollouts: tuple[TrainRollout, ...]
    positions: tuple[int, ...] = ()

    @property
    def policy_lags(self) -> list[int]:
        """Per rollout: (step - 1) minus the oldest policy version among its tokens."""
        return [self.step - 1 - item.rollout.oldest_version for item in self.rollouts]
