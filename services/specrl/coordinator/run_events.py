"""Events of a run. The loop and its parts publish them, and observers subscribe.

An event never requests anything. No part of a run subscribes, so a run trains the same
with and without observers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from specrl.coordinator.members.agreement import LogprobComparison
from specrl.formats.reports import Phase, StepReport, ValidationReport
from specrl.records import GradedRollout, Group, Prompt


class CanaryOutcome(StrEnum):
    """Result of one replica's canary. The values are labels of a metric."""

    AGREED = "agreed"
    DISAGREED = "disagreed"
    SKIPPED = "skipped"  # no answer in time, or none that is well-formed
    LOST = "lost"  # the replica was lost first


class RunEvent:
    """Base class of all events, which report what has happened."""


@dataclass(frozen=True)
class PhaseEntered(RunEvent):
    """The run has changed its phase."""

    phase: Phase


@dataclass(frozen=True)
class RolloutGraded(RunEvent):
    """A training rollout is graded and stored."""

    prompt: Prompt
    graded: GradedRollout


@dataclass(frozen=True)
class VerdictFailed(RunEvent):
    """The verifier failed on `count` rollouts, or a tool failed before they could be graded."""

    reason: str
    count: int = 1


@dataclass(frozen=True)
class VersionServed(RunEvent):
    """Every live replica serves this policy version. Suspect and draining replicas do not count: they receive none."""

    policy_version: int


@dataclass(frozen=True)
class CanaryEnded(RunEvent):
    """One replica's canary has ended. comparison: None if nothing was compared."""

    outcome: CanaryOutcome
    comparison: LogprobComparison | None = None


@dataclass(frozen=True)
class CanariesFinished(RunEvent):
    """All canaries of an update have ended. seconds: how long the trainer waited for them."""

    seconds: float


@dataclass(frozen=True)
class StepServed(RunEvent):
    """A step is trained and its policy version served.

    policy_lags: lag of each trained rollout, in versions. groups: all graded groups of the step. busy_cores: mean busy
    cores of this machine during exposed generation and during training; None if there was no such phase.
    """

    report: StepReport
    policy_lags: Sequence[int]
    groups: Sequence[Group]
    busy_cores: tuple[float | None, float | None]


@dataclass(frozen=True)
class StepReported(RunEvent):
    """The report of a step is final. If its version was to be validated, that validation has ended."""

    report: StepReport


@dataclass(frozen=True)
class VersionValidated(RunEvent):
    """A validation has ended."""

    report: ValidationReport


@dataclass(frozen=True)
class CheckpointFailed(RunEvent):
    """The trainer could not write a checkpoint. The run continues with the previous one."""

    reason: str


@dataclass(frozen=True)
class ReplicasScaled(RunEvent):
    """A user has set the number of replicas that the launcher keeps."""

    replicas: int


@dataclass(frozen=True)
class RunFinished(RunEvent):
    """The last step is trained, and policy and drafter are exported into these folders."""

    policy_path: str
    drafter_path: str
    checkpoint_path: str


class RunEvents:
    """Delivers each event to all subscribers at once, in the order of their subscription."""

    def __init__(self) -> None:
        self._subscribers: list[Callable[[RunEvent], None]] = []

    def subscribe(self, note: Callable[[RunEvent], None]) -> None:
        """Call `note` with every event from now on. It runs in the loop's task, so it must not block."""
        self._subscribers.append(note)

    def publish(self, event: RunEvent) -> None:
        """Call every subscriber with this event."""
        for note in self._subscribers:
            note(event)
