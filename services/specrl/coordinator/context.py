"""The context of a run: its spec, members, ledger, prompts and verifier. `wiring.py` builds it once per process.

The loop and its parts receive the whole context instead of long argument lists. It holds no observer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from specrl.coordinator.controls import Controls
from specrl.coordinator.ledger.continuation import IdentifiedPrompts
from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.replica_session import TurnSettings
from specrl.coordinator.phase import RunPhase
from specrl.coordinator.reports import StepTally
from specrl.coordinator.run_events import RunEvents
from specrl.coordinator.run_spans import RunSpans
from specrl.models.policy_config import PolicyConfig
from specrl.records import Prompt, Reward, Rollout
from specrl.spec import RunSpec
from specrl.telemetry import metrics


class PromptStream(IdentifiedPrompts, Protocol):
    """The prompts of a run, in training order. Implemented by `specrl.prompts`."""

    def prompt(self, position: int) -> Prompt:
        """Return the prompt at this position of the shuffled stream. Positions count from 0 through all epochs."""


class Grader(Protocol):
    """Grades completions. Implemented by `specrl.rewards.VerifierPool`."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        """Return the reward of a completion. If the verifier fails, the reward has no value but a reason."""


@dataclass(frozen=True)
class RunContext:
    """All that the parts of one run share.

    directory: holds the run file, store, logs, checkpoints and export.
    tally: counts for the next step report.
    turns: tool settings of multi-turn rollouts; None if rollouts have one turn.
    policy: the architecture that rollouts must fit; None, so that none is compared, if it could not be read.
    events: the parts of a run publish here, and only observers subscribe.
    spans: traces of the run; recorded only if a trace sink is configured.
    outcomes: rollouts by outcome, since the coordinator started.
    """

    spec: RunSpec
    directory: Path
    registry: Registry
    ledger: Ledger
    phase: RunPhase
    tally: StepTally
    controls: Controls
    prompts: PromptStream
    validation_prompts: Sequence[Prompt]
    grader: Grader
    turns: TurnSettings | None
    policy: PolicyConfig | None
    events: RunEvents
    spans: RunSpans
    outcomes: Counter[str] = field(default_factory=Counter)

    def check_rollout(
        self, rollout: Rollout, prompt_tokens: int, max_tokens: int, versions: range | None = None
    ) -> None:
        """Raise RecordInvalid for a rollout that the trainer would refuse. That would end the run.

        max_tokens, versions: as in `Rollout.check`.
        """
        rollout.check(max_tokens, versions)
        self.check_policy(rollout, prompt_tokens)

    def check_policy(self, rollout: Rollout, prompt_tokens: int) -> None:
        """Raise RecordInvalid for a well-formed rollout with tokens or experts that the policy does not have."""
        if self.policy is not None:
            rollout.check_policy(prompt_tokens, self.policy.vocab_size, self.policy.experts_shape)

    def count_outcome(self, outcome: str, count: int) -> None:
        """Count rollouts with this outcome, in the status and in the metrics."""
        self.outcomes[outcome] += count
        metrics.ROLLOUTS.labels(self.spec.name, outcome).inc(count)
