"""The records of the data path: Prompt -> Rollout -> Group -> Batch.

A rollout is validated once, when it enters a process (`Rollout.check`). Later code relies on it.

A rollout that calls tools has turns, in which the policy samples, and tool outputs between them, which the policy only
reads. All of them are one sequence of tokens. Training, metrics and comparisons use the sampled tokens alone.

Shape suffixes: T tokens of a completion; N sampled tokens (N = T without tools); G rollouts of a group; S tokens of
prompt and completion without the last one; L layers; K experts per token.
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
from specrl.records.sampling_sets import SamplingSets

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]
ExpertArray = npt.NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True)
class Sampling:
    """How one completion is drawn from the policy.

    max_tokens: longest completion in tokens, the end token included. temperature: 0 is greedy. top_p 1 and top_k 0 keep
    the whole vocabulary. seed: None lets the engine draw its own randomness. stop: generation ends before any of them.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()

    @property
    def is_truncated(self) -> bool:
        """Whether top-p or top-k may leave tokens out, so that the rollout must carry its sampling sets."""
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Prompt:
    """A task and the data of its verifier.

    position: index in the shuffled stream, from 0, over all epochs. answer: the reference. row: all columns of its
    record, for verifiers that read them. It stays in the coordinator; no message carries it. source: name of the source
    in the run file, `main` if there is only one.
    """

    prompt_id: str
    position: int
    token_ids: tuple[int, ...]
    text: str
    answer: str
    row: Mapping[str, Any] = field(default_factory=dict, compare=False)  # a mapping has no hash
    source: str = "main"


@dataclass(frozen=True)
class RolloutRequest:
    """A request for one completion.

    prompt_token_ids: the whole context; from the second turn on, earlier turns and tool outputs included.
    """

    rollout_id: str
    group_id: str
    sample_index: int
    prompt_token_ids: tuple[int, ...]
    sampling: Sampling
    traceparent: str = field(default="", compare=False)
    """The sender's span (W3C Trace Context); empty: not traced. Not compared: a resumed request has another span."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    TURNS = "turns"
    """The last turn that a rollout may have called a tool."""


@dataclass(frozen=True)
class VersionSpan:
    """Tokens [first, end) of a completion were sampled under `policy_version`."""

    policy_version: int
    first: int
    end: int


@dataclass(frozen=True)
class OutputSpan:
    """Tokens [first, end) of a completion are a tool's output."""

    first: int
    end: int


# eq=False, here and below: comparing arrays gives an array, not a bool, so these records compare by identity.
@dataclass(frozen=True, eq=False)
class Rollout:
    """One completion of one prompt.

    token_ids_T: [T] int32, the end token included. sampler_logprobs_T: [T] float32 in nats; 0 in tool outputs.
    versions: cover the sampled tokens. outputs: cover the other tokens. replica_id: replica that generated the last
    turn. text: the sampled tokens as text, without tool outputs. seconds: from admission to the last token, on the
    replica, summed over turns. stop: stop string that ended the last turn; empty if something else did. experts_SLK:
    [S, L, K] uint8 or uint16, the experts that the sampler routed each token to, recorded with trainer.routing Replay.
    sets: the tokens that could be sampled at each sampled token, recorded with top-p or top-k; their log-probabilities
    are renormalised over these.

    message: the bytes that the rollout was parsed from, which are stored unchanged, and sent on without the text
    (docs/decisions/0017); None for a rollout made in this process. While there is a message the arrays are read-only,
    and a copy made with `dataclasses.replace` has no message.
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
    sets: SamplingSets | None = None
    message: bytes | None = field(default=None, init=False, repr=False)

    @property
    def total_length(self) -> int:
        """T: tokens, tool outputs included."""
        return len(self.token_ids_T)

    @property
    def sampled_length(self) -> int:
        """N: tokens that the policy sampled."""
        return self.total_length - sum(span.end - span.first for span in self.outputs)

    @property
    def turn_spans(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of every turn: all tokens, or those before, between and after tool outputs."""
        # A turn ends where an output begins, and the next one begins where that output ends.
        ends = [*(span.first for span in self.outputs), self.total_length]
        return tuple(zip([0, *(span.end for span in self.outputs)], ends, strict=True))

    @property
    def sampled_N(self) -> npt.NDArray[np.int64]:
        """[N] int64: indices of the sampled tokens, ascending."""
        return np.concatenate([np.arange(first, end) for first, end in self.turn_spans])

    @property
    def oldest_version(self) -> int:
        """Oldest policy version of any sampled token. Policy lag is counted from it."""
        return min(span.policy_version for span in self.versions)

    def check(self, max_tokens: int, versions: range | None = None) -> None:
        """Raise RecordInvalid unless the rollout may be trained on.

        max_tokens: longest completion, tool outputs included. versions: policy versions that the replica can have
        served while it was sampled; None if the caller does not know them.
        """

        def raise_invalid(what: str) -> None:
            raise RecordInvalid(f"rollout {self.rollout_id}: {what}; generating it again")

        if self.total_length == 0:
            raise_invalid("tokens must not be empty, got length=0")
        if self.total_length > max_tokens:
            raise_invalid(f"tokens must be at most max_tokens={max_tokens}, got length={self.total_length}")
        if len(self.sampler_logprobs_T) != self.total_length:
            raise_invalid(
                f"log-probabilities must be one per token, got {len(self.sampler_logprobs_T)} for {self.total_length}"
            )
        if not np.isfinite(self.sampler_logprobs_T).all():
            raise_invalid("log-probabilities must be finite, got NaN or infinity")
        if (self.sampler_logprobs_T > 1e-4).any():  # a probability of 1 may round to just above 0 nats
            raise_invalid(f"log-probabilities must be <= 0, got max={self.sampler_logprobs_T.max()}")
        if (self.token_ids_T < 0).any():
            raise_invalid("token ids must be >= 0, got a negative one")
        self._check_spans(raise_invalid, versions)
        if self.sets is not None:
            self.sets.check(self.token_ids_T[self.sampled_N], raise_invalid)

    def check_recorded_sets(self) -> None:
        """Raise RecordInvalid unless sampling sets are recorded, for a rollout that was sampled with top-p or top-k."""
        if self.sets is None:
            raise RecordInvalid(
                f"rollout {self.rollout_id[:64]}: sampling sets must be recorded with generation.sampling.topP below 1 "
                "or topK above 0, got none; use replicas that were started with this run file"
            )

    def check_replayed_experts(self, prompt_tokens: int) -> None:
        """Raise RecordInvalid unless experts are recorded for all tokens of prompt and completion but the last.

        The last token has no successor to predict, so the sampler never routed it.
        """
        # S of the legend: the prompt's tokens and the completion's but the last.
        wanted = prompt_tokens + self.total_length - 1
        held = 0 if self.experts_SLK is None else len(self.experts_SLK)
        if held != wanted:
            raise RecordInvalid(
                f"rollout {self.rollout_id}: experts must be recorded for {wanted} tokens with trainer.routing Replay, "
                f"got {held}; generating it again"
            )

    def check_policy(self, prompt_tokens: int, vocab_size: int, experts: tuple[int, int, int]) -> None:
        """Raise RecordInvalid unless the policy has all token ids and experts of a rollout that `check` accepts.

        experts: (layers, experts per token, experts in each layer), as `PolicyConfig.experts_shape`.
        """

        def raise_invalid(what: str) -> None:
            # The id comes from another process and may be unchecked here, so its length is bounded.
            raise RecordInvalid(
                f"rollout {self.rollout_id[:64]}: {what}; use the policy's folder for replicas and tokenizers"
            )

        if (highest := int(self.token_ids_T.max())) >= vocab_size:
            raise_invalid(f"token ids must be < {vocab_size}, got {highest}")
        if self.sets is not None and (highest := int(self.sets.ids_M.max())) >= vocab_size:
            raise_invalid(f"ids of sampling sets must be < {vocab_size}, got {highest}")
        if self.experts_SLK is not None:
            layers, each, count = experts
            tokens = prompt_tokens + self.total_length - 1
            highest = int(self.experts_SLK.max()) if self.experts_SLK.size else -1
            if self.experts_SLK.shape != (tokens, layers, each) or highest >= count:
                raise_invalid(
                    f"experts must be {tokens} tokens x {layers} layers x {each}, each < {count}, got shape "
                    f"{self.experts_SLK.shape} up to {highest}"
                )

    def _check_spans(self, raise_invalid: Callable[[str], None], versions: range | None) -> None:
        """Check that each token is in one version span or one output, and that outputs lie between sampled tokens."""
        got = f"{self.versions} and {self.outputs}" if self.outputs else f"{self.versions}"
        spans: list[VersionSpan | OutputSpan] = [*self.versions, *self.outputs]
        # Walk over all spans in order: each begins where the one before ended.
        end = 0
        version = -math.inf
        was_output = True  # so that an output at the start is refused: nothing was sampled before it
        for span in sorted(spans, key=lambda span: span.first):
            if span.first != end or span.end <= span.first:
                raise_invalid(f"version spans must cover every token once, got {got}")
            if isinstance(span, OutputSpan):
                if was_output:
                    raise_invalid(f"a tool output must follow sampled tokens, got {got}")
            else:
                if span.policy_version < version:
                    raise_invalid(f"policy versions must not decrease, got {got}")
                if versions is not None and span.policy_version not in versions:
                    allowed = f"{versions.start} to {versions.stop - 1}"
                    raise_invalid(f"policy versions must be among those that its replica served, {allowed}, got {got}")
                version = span.policy_version
            end = span.end
            was_output = isinstance(span, OutputSpan)
        if end != self.total_length:
            raise_invalid(f"version spans must cover all {self.total_length} tokens, got {got}")
        # A rollout ends with the policy's own tokens: an output is only read by the turn after it.
        if was_output:
            raise_invalid(f"the last token must be sampled, got {got}")
        if any(self.sampler_logprobs_T[span.first : span.end].any() for span in self.outputs):
            raise_invalid("log-probabilities of tool outputs must be 0, got others")


@dataclass(frozen=True)
class Reward:
    """A verifier's verdict on a rollout.

    value: None means ungraded, for a reason that no answer of the policy can cause; `failure` names the reason.
    """

    value: float | None
    failure: str = ""
    extracted: str = ""
    """Answer that the verifier found in the completion; empty: none, or it judges the whole completion."""
    reason: str = ""
    """Reason of the value, in one line."""
    lacks_answer: bool = False
    """The verifier looked for an answer and found none; the value is 0."""
    error: str = ""
    """Exception of the verifier while reading the answer: type and place, or `timeout` or `crash`; the value is 0."""
    named: tuple[NamedReward, ...] = ()
    """The rewards whose weighted sum is the value, in the run file's order; empty if the run has one reward. Then error
    and failure begin with the reward's name."""


@dataclass(frozen=True)
class NamedReward:
    """One of several rewards of a rollout. reward: the verdict before weighting; weight: its factor in the sum."""

    name: str
    weight: float
    reward: Reward


@dataclass(frozen=True, eq=False)
class GradedRollout:
    """A finished rollout and its reward."""

    rollout: Rollout
    reward: Reward


@dataclass(frozen=True, eq=False)
class Group:
    """The G rollouts of one prompt, in sample order. A group is complete: no rollout is missing or ungraded."""

    group_id: str
    prompt: Prompt
    target_step: int
    rollouts: tuple[Rollout, ...]
    rewards: tuple[Reward, ...]

    @property
    def rewards_G(self) -> FloatArray:
        """[G] float32: the rollouts' rewards. Raises RecordInvalid if one is ungraded."""
        # Groups are made of graded rollouts only; this guards against a 0 in place of a missing reward.
        values = [reward.value for reward in self.rewards]
        if any(value is None for value in values):
            raise RecordInvalid(
                f"group {self.group_id}: every rollout must be graded, got {values}; generate the ungraded ones again"
            )
        return np.asarray(values, dtype=np.float32)


@dataclass(frozen=True, eq=False)
class TrainRollout:
    """A rollout ready to train.

    advantage: shared by all sampled tokens. reward: the verifier's value after shaping; read only if a KL penalty is
    part of the reward.
    is_outline: another rank trains on the rollout, so that this one knows its lengths, group and outputs alone. Its
    tokens and log-probabilities are 0 here, and rank 0 has checked them.
    """

    prompt_token_ids: tuple[int, ...]
    rollout: Rollout
    advantage: float
    reward: float = 0.0
    is_outline: bool = False

    def check(self, max_length: int, vocab_size: int, experts: tuple[int, int, int]) -> None:
        """Raise RecordInvalid unless a model of this maximum length, vocabulary and experts can be trained on it.

        experts: as in `Rollout.check_policy`.
        """
        if self.is_outline:
            return
        prompt = self.prompt_token_ids
        ids_T = self.rollout.token_ids_T

        def raise_invalid(what: str, remedy: str = "generate it again") -> None:
            # The id comes from another process and is unchecked here, so its length is bounded.
            raise RecordInvalid(f"rollout {self.rollout.rollout_id[:64]}: {what}; {remedy}")

        # First, since an empty prompt has no smallest token.
        if not prompt or len(prompt) + len(ids_T) > max_length:
            raise_invalid(f"prompt and completion must have 1 to {max_length} tokens, got {len(prompt)} + {len(ids_T)}")
        self.rollout.check(max_length)  # also refuses negative ids, and an empty completion
        self.rollout.check_policy(len(prompt), vocab_size, experts)
        lowest = min(prompt)
        highest = max(prompt)
        if lowest < 0 or highest >= vocab_size:
            raise_invalid(
                f"the prompt's token ids must be >= 0 and < {vocab_size}, got {lowest if lowest < 0 else highest}",
                "tokenize prompts with the policy's tokenizer",
            )
        if not (math.isfinite(self.advantage) and math.isfinite(self.reward)):
            raise_invalid(f"advantage and reward must be finite, got {self.advantage} and {self.reward}")


@dataclass(frozen=True, eq=False)
class Batch:
    """The rollouts of one optimizer step. Training it produces the policy version of the same number.

    step: >= 1. rollouts: ordered by group, then sample. positions: stream positions that the step settles, ascending; a
    position without rollouts failed or was left out.
    """

    step: int
    rollouts: tuple[TrainRollout, ...]
    positions: tuple[int, ...] = ()

    @property
    def policy_lags(self) -> list[int]:
        """Policy lag per rollout: (step - 1) minus the oldest policy version of its tokens."""
        # Step s trains the policy of version s - 1, so a rollout sampled wholly under that version has lag 0.
        return [self.step - 1 - item.rollout.oldest_version for item in self.rollouts]
