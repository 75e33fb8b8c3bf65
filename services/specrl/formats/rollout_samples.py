"""The record of one graded rollout with its texts: a line of rollouts.jsonl, and an answer of the page's API.

Prompts and completions may be private. Nothing else that a run writes for people or serves holds them.
"""

from __future__ import annotations

from specrl.formats.reports import ReportModel


class RolloutSample(ReportModel):
    """One graded rollout with its texts, each of at most 16,384 characters."""

    step: int
    """Step that it was sampled for."""
    id: str
    """Step, prompt of the step, sample of the prompt and attempt: 000012-00003-000-0."""
    replica: str
    """Replica that generated it."""
    oldest_version: int
    """Policy version of its oldest token."""
    newest_version: int
    """Policy version of its newest token."""
    tokens: int
    """Sampled tokens, the end token included."""
    seconds: float
    """Seconds of its generation."""
    finish_reason: str
    """stop: the policy ended it. length: it reached generation.sampling.maxTokens. turns: it used all of its turns."""
    reward: float | None
    """Reward of the rollout. Null if it could not be graded."""
    rewards: dict[str, float | None]
    """Rewards by name, before weighting, of which `reward` is made. Null: not graded. Empty if the only one was not."""
    extracted: str
    """The answer that the verifier found in the completion; empty without one."""
    reason: str
    """The verifier's reason for the reward."""
    error: str = ""
    """Exception of the verifier while it read the answer; empty without one."""
    prompt: str
    """The text that the policy was given."""
    completion: str
    """The text that the policy sampled, without the outputs of tools."""
