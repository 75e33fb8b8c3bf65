"""Status of replicas and of the trainer: counters, metrics, versions.

Replicas send theirs with every heartbeat. The trainer answers with its own when asked, and with metrics after a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, zip_longest
from operator import mul

from specrl.errors import RecordInvalid
from specrl.records.step_costs import LONGEST_DRAFT, MAX_BINS, StepCost
from specrl.records.stream_place import StreamPlace
from specrl.records.weights import NO_DRAFTER
from specrl.telemetry.training_figures import TrainingFigures

DRAFTING_STATES = ("drafting", "off", "trial")


@dataclass(frozen=True)
class SpeculationCounters:
    """Counts of one replica since its start.

    drafts: verifications with at least one draft token. accepted_per_position[i]: drafts whose token i was accepted.
    generated_tokens: all emitted tokens, drafted or not.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    generated_tokens: int = 0

    def minus(self, earlier: SpeculationCounters) -> SpeculationCounters:
        """Return the counts since `earlier`, position by position."""
        return self._combine_with(earlier, -1)

    def plus(self, other: SpeculationCounters) -> SpeculationCounters:
        """Return the sum of both, for a total over replicas."""
        return self._combine_with(other, 1)

    def _combine_with(self, other: SpeculationCounters, sign: int) -> SpeculationCounters:
        # One of them may have seen longer drafts: the positions that it lacks count 0.
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationCounters(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(mine + sign * theirs for mine, theirs in positions),
            self.generated_tokens + sign * other.generated_tokens,
        )

    @property
    def acceptance_by_position(self) -> list[float]:
        """For each position, the share of drafts whose token there was accepted. Ends with the longest possible draft.

        Drafts of an adaptive length may all be shorter than the run's longest. Positions that none can have reached are
        left out, since nothing was measured there.
        """
        # Every other draft has at least one token, so this bounds the longest.
        longest = max(0, self.draft_tokens - (self.drafts - 1))
        return [count / self.drafts for count in self.accepted_per_position[:longest]] if self.drafts else []

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verification, the bonus token included; None before the first draft."""
        # Every verification emits one token of the policy's own after the accepted draft tokens.
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Drafting:
    """State of an adaptive draft length (generation/draft_lengths).

    state: one of DRAFTING_STATES. A gain is the decoding speed divided by the speed without drafts, at recent loads.
    measured_gain: None before the first decoding step.
    """

    state: str
    predicted_gain: float
    measured_gain: float | None = None


@dataclass(frozen=True)
class GenerationStatus:
    """A replica at one moment.

    policy_version: version that is served; -1 before the first commit. drafter_version: policy version at which the
    served drafter was last trained; NO_DRAFTER before one was committed. live_requests: rollouts in the engine, queued
    ones included.
    """

    replica_id: str
    policy_version: int
    is_paused: bool
    live_requests: int
    speculation: SpeculationCounters = SpeculationCounters()
    drafter_version: int = NO_DRAFTER
    drafting: Drafting | None = None
    """None without speculation, and with a fixed draft length."""
    step_costs: tuple[StepCost, ...] = ()
    """Costs of all steps since the replica's start that only decoded. Heartbeats leave them out."""

    def check(self) -> None:
        """Raise RecordInvalid unless counters, gains and step costs have possible values."""
        name = self.replica_id[:64]
        counters = self.speculation
        drafting = self.drafting
        counts = (
            self.live_requests,
            counters.drafts,
            counters.draft_tokens,
            counters.accepted_tokens,
            counters.generated_tokens,
            *counters.accepted_per_position,
        )
        for cost in self.step_costs:
            cost.check()
        # Bounds on lists: the coordinator keeps what a replica sends, for every replica.
        if len(self.step_costs) > MAX_BINS:
            raise RecordInvalid(
                f"step_costs of {name!r} must be at most {MAX_BINS}, got {len(self.step_costs)}; use the same version "
                "of specrl everywhere"
            )
        if min(counts) < 0 or len(counters.accepted_per_position) > LONGEST_DRAFT:
            raise RecordInvalid(
                f"counters of {name!r} must be >= 0, with at most {LONGEST_DRAFT} positions, got min={min(counts)}, "
                f"positions={len(counters.accepted_per_position)}; restart the replica"
            )
        if drafting is None:  # no speculation, or a fixed draft length
            return
        gains = (drafting.predicted_gain, drafting.measured_gain or 0.0)
        if not all(math.isfinite(gain) and gain >= 0 for gain in gains):
            raise RecordInvalid(f"gains of {name!r} must be finite and >= 0, got {gains}; restart the replica")
        if drafting.state not in DRAFTING_STATES:
            known = ", ".join(DRAFTING_STATES)
            raise RecordInvalid(
                f"drafting of {name!r} must be one of {known}, got {drafting.state[:64]!r}; use the same version of "
                "specrl everywhere"
            )


@dataclass(frozen=True)
class DrafterMetrics:
    """One training step, epoch or measurement of the drafter, averaged over its tokens.

    loss: the loss that was minimised: nats, or a share between 0 and 1 for `TotalVariation`.
    acceptance_per_position[j]: probability that the policy accepts draft token j at the run's temperature, given that
    it accepted all before it. seconds: duration.
    """

    loss: float
    grad_norm: float
    acceptance_per_position: tuple[float, ...]
    seconds: float

    @property
    def accepted_per_position(self) -> tuple[float, ...]:
        """For each position, the expected share of drafts whose token there is accepted: prod_(i <= j) a_i."""
        return tuple(accumulate(self.acceptance_per_position, mul))

    @property
    def acceptance_length(self) -> float:
        """Expected tokens per verification, the bonus token included: 1 + sum_j prod_(i <= j) a_i."""
        return float(1 + sum(self.accepted_per_position))


@dataclass(frozen=True)
class DrafterEpoch:
    """One epoch of a drafter's initialisation, as the coordinator plans it.

    rollouts: it trains on the first so many. first_rate, last_rate: shares of the drafter's learning rate, 0 to 1; the
    rate changes linearly from one to the other. uses_cross_entropy: whatever loss the run file names.
    """

    rollouts: int
    first_rate: float
    last_rate: float
    uses_cross_entropy: bool = False


@dataclass(frozen=True)
class DrafterEpochMetrics:
    """A finished epoch. trained: means over its updates. held_out: measured after it; None: nothing is held out."""

    epoch: DrafterEpoch
    trained: DrafterMetrics
    held_out: DrafterMetrics | None = None


class TrainMetrics(TrainingFigures):
    """Metrics of one training step: the figures of the base class, tokens and durations.

    tokens: sampled tokens trained on; 0: nothing was trained. train_seconds: forward, backward and optimizer, the
    drafter's included. updates: optimizer updates made. is_skipped: gradients were not finite; that update and all
    later ones of the step were skipped.
    """

    tokens: int
    logprob_seconds: float
    train_seconds: float
    drafter: DrafterMetrics | None = None
    updates: int = 1
    is_skipped: bool = False

    def replace_non_finite(self) -> TrainMetrics:
        """Return a copy with 0 in place of NaN and infinity, which the figures of a skipped step may have."""
        poisoned = {name: 0.0 for name, value in self if isinstance(value, float) and not math.isfinite(value)}
        return self.model_copy(update=poisoned)

    @classmethod
    def for_empty_batch(cls, learning_rate: float) -> TrainMetrics:
        """Return the metrics of a step whose batch has no rollouts."""
        return cls(learning_rate=learning_rate, tokens=0, logprob_seconds=0.0, train_seconds=0.0, updates=0)


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer at one moment.

    step: last step trained or loaded, which is the policy version. checkpoint_step: step of the newest complete
    checkpoint; 0: the initial model. world_size: trainer ranks.
    """

    step: int
    checkpoint_step: int
    is_drafter_initialised: bool
    world_size: int
    stream: StreamPlace | None = None
    """Data position at checkpoint_step; None for the initial model and for checkpoints that do not record it."""
