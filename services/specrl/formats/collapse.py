"""Recognises a run whose policy learns nothing, because its rewards do not differ. Pure.

    collapse     every reward and every gradient is 0, so the policy no longer changes
    no signal    the rewards within each group are equal, whatever they are

Called by the coordinator's status, step by step. A single step of this kind is common: its prompts were hard.
"""

from __future__ import annotations

from dataclasses import dataclass

from specrl.formats.reports import StepReport

COLLAPSE_STEPS = 3
"""Steps in a row that count as a collapse, or as steps without a signal."""
LOW_REWARD = 0.5
"""Mean reward below which prompts are called hard. Only words of advice depend on it."""


@dataclass
class CollapseWatch:
    """Counts the steps in a row that taught nothing.

    since: first of these steps; None if the last step taught something. steps: their number.
    was_rewarded: whether any earlier step had a reward above 0.
    """

    since: int | None = None
    steps: int = 0
    was_rewarded: bool = False

    def add_step(self, report: StepReport) -> bool:
        """Count a step. Returns whether it completes a collapse, which is true once for each."""
        if not _taught_nothing(report):
            self.since = None
            self.steps = 0
            self.was_rewarded = self.was_rewarded or bool(report.reward)
            return False
        self.since = self.since or report.step
        self.steps += 1
        return self.steps == COLLAPSE_STEPS

    @property
    def collapsed_since(self) -> int | None:
        """First step of a collapse that has lasted until now; None without one."""
        return self.since if self.steps >= COLLAPSE_STEPS else None

    def describe_collapse(self) -> str:
        """Say since when the policy no longer changes, and what to try. Empty without a collapse."""
        if self.collapsed_since is None:
            return ""
        said = f"since step {self.since} every reward and every gradient is 0, so the policy no longer changes; "
        if not self.was_rewarded:
            return said + (
                "the policy has never had a reward: try easier prompts, a lower generation.sampling.temperature, more "
                "maxTokens, or look at what it answers with `specrl rollouts`"
            )
        return said + (
            "the policy has probably collapsed: start a new run from an earlier checkpoint (`specrl checkpoint list`, "
            "`specrl run --checkpoint`) with a lower trainer.optimizer.learningRate"
        )


@dataclass
class SignalWatch:
    """Counts the steps in a row in which no group had a training signal.

    since: first of these steps; None if the last step had a signal. steps: their number. reward: sum of their rewards.
    """

    since: int | None = None
    steps: int = 0
    reward: float = 0.0
    advice: str = ""

    def add_step(self, report: StepReport) -> bool:
        """Count a step. Returns whether it is the last of COLLAPSE_STEPS, which is true once for each such row."""
        if not report.groups or report.groups_without_signal < report.groups:
            self.since = None
            self.steps = 0
            self.reward = 0.0
            self.advice = ""
            return False
        self.since = self.since or report.step
        self.steps += 1
        self.reward += report.reward or 0.0
        if self.steps != COLLAPSE_STEPS:
            return False
        mean = self.reward / self.steps
        self.advice = (
            f"since step {self.since} the rewards within each group are equal (mean {mean:.3f}), so the policy learns "
            f"nothing from them; try {'easier' if mean < LOW_REWARD else 'harder'} prompts, another "
            "generation.sampling.temperature or a larger schedule.groupSize, or look at the answers with "
            "`specrl rollouts`"
        )
        return True


def _taught_nothing(report: StepReport) -> bool:
    """Whether all rewards were 0, no group had a signal, and the gradient was 0."""
    return (
        report.reward == 0
        and report.groups_without_signal == report.groups
        and report.grad_norm == 0
        and not report.is_skipped  # its gradient was not finite, which is reported as 0
    )
