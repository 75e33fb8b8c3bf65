"""What replicas and the trainer say of themselves: counters, metrics, versions."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from itertools import accumulate, zip_longest
from operator import mul

from specrl.errors import RecordInvalid
from specrl.records.step_costs import LONGEST_DRAFT, MOST_BINS, StepCost
from specrl.records.stream_place import StreamPlace
from specrl.records.weights import NO_DRAFTER

DRAFTING_STATES = ("drafting", "off", "trial")


@dataclass(frozen=True)
class SpeculationCounters:
    """Running counts of one replica. accepted_per_position[i]: drafts whose token i was accepted."""

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    accepted_per_position: tuple[int, ...] = ()
    generated_tokens: int = 0

    def minus(self, earlier: SpeculationCounters) -> SpeculationCounters:
        """Counts since `earlier`, position by position."""
        return self._with(earlier, -1)

    def plus(self, other: SpeculationCounters) -> SpeculationCounters:
        """Counts of both, for a sum over replicas."""
        return self._with(other, 1)

    def _with(self, other: SpeculationCounters, sign: int) -> SpeculationCounters:
        positions = zip_longest(self.accepted_per_position, other.accepted_per_position, fillvalue=0)
        return SpeculationCounters(
            self.drafts + sign * other.drafts,
            self.draft_tokens + sign * other.draft_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(mine + sign * theirs for mine, theirs in positions),
            self.generated_tokens + sign * other.generated_tokens,
        )

    @property
    def acceptance_length(self) -> float | None:
        """Mean tokens emitted per verification, bonus token included; None before the first draft."""
        return 1 + self.accepted_tokens / self.drafts if self.drafts else None


@dataclass(frozen=True)
class Drafting:
    """What an adaptive draft length is doing. Gains: speed over that of decoding without drafts, at recent loads.

    state: drafting, off, trial (generation/draft_length.py). measured_gain: None before the first step of decoding.
    """

    state: str
    predicted_gain: float
    measured_gain: float | None = None


@dataclass(frozen=True)
class GenerationStatus:
    """A replica at one moment. policy_version -1: no weights committed yet.

    drafter_version: policy version at which the drafter that is served was last trained; -1: no drafter committed.
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
    """Of all steps since the replica's start that did nothing but decode."""

    def check(self) -> None:
        """Raise RecordInvalid unless these are numbers that counters and gains can have."""
        name, counters, drafting = self.replica_id[:64], self.speculation, self.drafting
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
        if len(self.step_costs) > MOST_BINS:
            raise RecordInvalid(f"a status of {name!r} must have at most {MOST_BINS} step costs, got more; report it")
        if min(counts) < 0 or len(counters.accepted_per_position) > LONGEST_DRAFT:
            raise RecordInvalid(f"a status of {name!r} must count from 0 up, got others; report it again")
        if drafting is None:
            return
        gains = (drafting.predicted_gain, drafting.measured_gain or 0.0)
        if not all(math.isfinite(gain) and gain >= 0 for gain in gains):
            raise RecordInvalid(f"gains of {name!r} must be finite and >= 0, got {gains}; measure again")
        if drafting.state not in DRAFTING_STATES:
            known = ", ".join(DRAFTING_STATES)
            raise RecordInvalid(f"drafting of {name!r} must be one of {known}, got {drafting.state[:64]!r}; report it")


@dataclass(frozen=True)
class DrafterMetrics:
    """One training step, epoch or measurement of the drafter, over the tokens that it was given.

    loss is what was minimised: nats, or a share for `TotalVariation`. acceptance_per_position[j]: how probably the
    policy accepts draft token j at the run's temperature, given that it accepted those before it.
    """

    loss: float
    grad_norm: float
    acceptance_per_position: tuple[float, ...]
    seconds: float

    @property
    def acceptance_length(self) -> float:
        """Expected tokens of one verification, bonus token included: 1 + sum_j prod_(i <= j) a_i."""
        return float(1 + sum(accumulate(self.acceptance_per_position, mul)))


@dataclass(frozen=True)
class TrainMetrics:
    """One optimizer step. Fields as in trainer.proto: nats, seconds, shares of 1. With 0 tokens nothing was trained."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    logprob_seconds: float
    train_seconds: float
    mismatch_mean_abs: float
    mismatch_max_abs: float
    mismatch_kl: float
    mismatch_tokens: int
    importance_weight_mean: float
    clip_fraction: float
    entropy: float
    effective_sample_size: float
    drafter: DrafterMetrics | None = None
    clip_fraction_high: float = 0.0
    importance_capped_fraction: float = 0.0
    masked_fraction: float = 0.0
    reference_kl: float = 0.0
    updates: int = 1
    is_skipped: bool = False

    def with_zeros_for_non_finite(self) -> TrainMetrics:
        """These, with 0 for what is NaN or infinite, as the figures of a step that is skipped may be."""
        poisoned = {
            name: 0.0 for name, value in vars(self).items() if isinstance(value, float) and not math.isfinite(value)
        }
        return replace(self, **poisoned)  # type: ignore[arg-type]

    @classmethod
    def of_nothing(cls, learning_rate: float) -> TrainMetrics:
        """Of a step whose batch holds no rollouts."""
        zeros: dict[str, float] = {field.name: 0 for field in fields(cls) if field.name != "drafter"}
        return cls(**zeros | {"learning_rate": learning_rate, "is_skipped": False})  # type: ignore[arg-type]


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer at one moment. step: last one trained or loaded, which is the policy version."""

    step: int
    checkpoint_step: int
    is_drafter_initialised: bool
    world_size: int
    stream: StreamPlace | None = None
    """Where the data stand with checkpoint_step; None of the initial model, and of checkpoints that do not say."""
