"""A few rollouts in full, for people who want to read what the policy says. Opt-in: telemetry.rolloutsShown.

Prompts and completions are private, so by default none is kept; they stay in this process's memory, and nothing writes
them. The newest are kept, one of each group, so that they are of different prompts.
"""

from __future__ import annotations

from collections import deque

from specrl.coordinator.report import Report
from specrl.records import GradedRollout, Prompt

LONGEST_TEXT = 16 << 10
"""Letters of each text that are kept: 256 rollouts are 16 MB at most."""


class RolloutSample(Report):
    """One graded rollout."""

    id: str
    replica: str
    oldest_version: int
    newest_version: int
    """Policy versions of its oldest and of its newest token."""
    tokens: int
    seconds: float
    finish_reason: str
    reward: float | None
    extracted: str
    """The answer that the verifier found in the completion; empty: none."""
    reason: str
    """Why the reward is what it is."""
    prompt: str
    completion: str


class Samples:
    """The newest `kept` of them."""

    def __init__(self, kept: int = 0) -> None:
        self._samples: deque[RolloutSample] = deque(maxlen=kept)

    @property
    def kept(self) -> int:
        """How many there can be; 0: the run has not opted in."""
        return self._samples.maxlen or 0

    def offer(self, prompt: Prompt, graded: GradedRollout) -> None:
        """Keep it, when it is the first sample of its group and the run has opted in."""
        rollout = graded.rollout
        if self.kept and rollout.sample_index == 0:
            sample = RolloutSample(
                id=rollout.rollout_id,
                replica=rollout.replica_id,
                oldest_version=rollout.oldest_version,
                newest_version=max(span.policy_version for span in rollout.versions),
                tokens=rollout.sampled_length,
                seconds=rollout.seconds,
                finish_reason=rollout.finish_reason.value,
                reward=graded.reward.value,
                extracted=graded.reward.extracted[:LONGEST_TEXT],
                reason=graded.reward.reason[:LONGEST_TEXT],
                prompt=prompt.text[:LONGEST_TEXT],
                completion=rollout.text[:LONGEST_TEXT],
            )
            self._samples.append(sample)

    def newest(self, limit: int) -> list[RolloutSample]:
        """The newest first."""
        return list(reversed(self._samples))[:limit]
