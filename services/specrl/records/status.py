"""What replicas and the trainer say of themselves: counters, metrics, versions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import zip_longest


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
class GenerationStatus:
    """A replica at one moment. policy_version -1: no weights committed yet."""

    replica_id: str
    policy_version: int
    is_paused: bool
    live_requests: int
    speculation: SpeculationCounters = SpeculationCounters()


@dataclass(frozen=True)
class DrafterMetrics:
    """One training step or epoch of the drafter. acceptance_per_position is estimated on the training tokens."""

    loss: float
    grad_norm: float
    acceptance_per_position: tuple[float, ...]
    seconds: float


@dataclass(frozen=True)
class TrainMetrics:
    """One optimizer step. Fields as in trainer.proto: nats, seconds, shares of 1."""

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


@dataclass(frozen=True)
class TrainerStatus:
    """The trainer at one moment. step: last one trained or loaded, which is the policy version."""

    step: int
    checkpoint_step: int
    is_drafter_initialised: bool
    world_size: int
