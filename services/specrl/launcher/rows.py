"""Reports as rows of text: columns for a terminal, `name value` pairs for a log. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rich.text import Text

from specrl.coordinator.counters import count_events
from specrl.coordinator.reasons import Reasons, given_up_in_words, reasons_in_words
from specrl.coordinator.report import DrafterStart, Status, StepReport, Summary, ValidationReport

_NOTHING = "-"


@dataclass(frozen=True)
class Column:
    """priority: columns with the highest are left out first where a terminal is narrow."""

    title: str
    width: int
    priority: int
    value: Callable[[StepReport], str]


def exposed_share(report: StepReport) -> float:
    """Share of the step's wall time in which the trainer waited for rollouts."""
    total = report.stages.total
    return report.exposed_generation / total if total > 0 else 0.0


def _number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _seconds(value: float) -> str:
    """Two digits below ten seconds, then fewer: a column of five."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


COLUMNS = (
    Column("step", 5, 0, lambda report: str(report.step)),
    Column("reward", 6, 0, lambda report: _number(report.reward, 3)),
    Column("valid", 5, 0, lambda report: _number(report.validation_reward, 3)),
    Column("data", 5, 3, lambda report: _seconds(report.stages.data)),
    Column("prep", 5, 3, lambda report: _seconds(report.stages.prepare)),
    Column("gen", 5, 1, lambda report: _seconds(report.stages.generation)),
    Column("logp", 5, 3, lambda report: _seconds(report.stages.logprob)),
    Column("train", 5, 1, lambda report: _seconds(report.stages.train)),
    Column("exposed", 7, 0, lambda report: f"{exposed_share(report):.0%}"),
    Column("accept", 6, 0, lambda report: _number(report.acceptance_length, 2)),
    Column("lag", 3, 1, lambda report: str(report.policy_lag_max)),
    Column("version", 7, 4, lambda report: str(report.policy_version)),
    Column("tokens", 7, 2, lambda report: str(report.tokens)),
)


class Columns:
    """The table of steps in a terminal of this width."""

    def __init__(self, width: int) -> None:
        shown = list(COLUMNS)
        while sum(column.width + 1 for column in shown) > width and any(column.priority for column in shown):
            least = max(column.priority for column in shown)
            shown = [column for column in shown if column.priority < least]
        self._shown = shown

    def header(self) -> Text:
        return Text(" ".join(f"{column.title:>{column.width}}" for column in self._shown), style="bold")

    def step(self, report: StepReport) -> Text:
        return Text(" ".join(f"{column.value(report):>{column.width}}" for column in self._shown))

    def validation(self, report: ValidationReport) -> Text:
        return Text(f"      {plain_validation(report)}", style="cyan")


def plain_step(report: StepReport) -> str:
    """One line that says everything the table says, readable without a header."""
    stages = report.stages
    parts = [f"step {report.step}", f"reward {_number(report.reward, 3)}"]
    if report.validation_reward is not None:
        parts.append(f"validation reward {report.validation_reward:.3f}")
    names = ("data", "prepare", "generation", "logprob", "train")
    parts += [f"{name} {_seconds(getattr(stages, name))}s" for name in names]
    parts.append(f"exposed {exposed_share(report):.0%}")
    if report.acceptance_length is not None:
        parts.append(f"acceptance {report.acceptance_length:.2f}")
    parts += [f"lag {report.policy_lag_max}", f"version {report.policy_version}", f"tokens {report.tokens}"]
    return " ".join(parts)


def plain_validation(report: ValidationReport) -> str:
    """A validation in one line: mean reward and pass@k, each with its own 95 % interval, and what was not judged."""
    said = f"version {report.policy_version} validated: mean reward {report.reward:.3f}"
    if report.reward_low is not None and report.reward_high is not None:
        said += f" ({report.reward_low:.2f} to {report.reward_high:.2f})"
    said += f" on {report.problems} problems"
    said += "".join(f", pass@{it.k} {it.rate:.3f} ({it.low:.2f} to {it.high:.2f})" for it in report.pass_at)
    return f"{said}; {failed_answers(report)}" if report.failed else said


def failed_answers(report: ValidationReport) -> str:
    """`28 of 32 graded, 4 failed: KeyError at my_rewards.py:12 (4)`."""
    judged = report.answers - report.failed
    return f"{judged} of {report.answers} graded, {report.failed} failed: {reasons_in_words(report.failures)}"


def step_notices(report: StepReport) -> list[str]:
    """Lines below a step's row: prompts that were given up, and that no group teaches anything."""
    said = []
    if report.failed:
        said.append(f"step {report.step}: {given_up_in_words(Reasons(report.failed.values()).counts)}")
    if report.groups and report.groups_without_signal == report.groups:
        said.append(f"step {report.step}: {without_signal(report.groups, report.groups)}")
    return said


def without_signal(count: int, groups: int) -> str:
    """`80 of 80 groups teach nothing: all rewards are equal within each`."""
    return f"{count} of {groups} groups teach nothing: all rewards are equal within each"


def counter_lines(status: Status) -> list[str]:
    """A line for each kind of event, then the reasons of verdicts that failed and of prompts given up."""
    lines = [f"{words}: {count}" for _, words, count in count_events(status.counters)]
    for what, reasons in (("verdicts failed", status.verdict_failures), ("prompts given up", status.given_up)):
        if reasons:
            lines.append(f"{what} by reason: {reasons_in_words(reasons)}")
    return lines


def summary_lines(status: Status) -> list[tuple[str, str]]:
    """What a finished run has achieved, as (name, value); nothing where there is no summary."""
    summary = status.summary
    if summary is None:
        return []
    lines = [("steps", f"{summary.steps}, {summary.rollouts_trained} rollouts of {summary.prompts_trained} prompts")]
    if summary.last_validation_reward is not None:
        change = _change(summary.first_validation_reward, summary.last_validation_reward, 3)
        lines.append(("validation reward", change))
    if summary.last_reward is not None:
        lines.append(("reward", _reward(summary, summary.last_reward)))
    if summary.groups_without_signal:
        lines.append(("without signal", without_signal(summary.groups_without_signal, summary.groups)))
    if summary.given_up:
        lines.append(("given up", given_up_in_words(summary.given_up)))
    if summary.last_acceptance_length is not None:
        tokens = _change(summary.first_acceptance_length, summary.last_acceptance_length, 2, "tokens per verification")
        lines.append(("acceptance length", tokens))
    if summary.drafter_start is not None:
        lines.append(("drafter's start", _drafter_start(summary.drafter_start)))
    if summary.steps:
        lines += [
            ("exposed generation", f"{summary.exposed_generation_share:.0%} of wall time"),
            ("greatest policy lag", f"{summary.policy_lag_max} steps"),
            ("discarded for age", f"{summary.discarded_for_age} rollouts"),
        ]
    paths = [
        ("policy", summary.policy_path),
        ("drafter", summary.drafter_path),
        ("checkpoint", summary.checkpoint_path),
    ]
    return lines + [(name, path) for name, path in paths if path]


def _reward(summary: Summary, last: float) -> str:
    """`0.200 -> 0.600 (+0.400), means of the first and of the last 5 steps`."""
    if summary.first_reward is None:
        return _change(None, last, 3)
    change = _change(summary.first_reward, last, 3)
    if summary.reward_steps == 1:
        return f"{change}, from the first step to the last"
    return f"{change}, means of the first and of the last {summary.reward_steps} steps"


def _drafter_start(start: DrafterStart) -> str:
    """Acceptance on prompts that were not trained on, and on those that were."""
    trained = f"{start.trained_acceptance_length:.2f} on {start.rollouts} rollouts trained on"
    if start.held_out_acceptance_length is None:
        return f"acceptance length {trained}"
    by_position = ", ".join(f"{share:.2f}" for share in start.held_out_acceptance)
    length, prompts = start.held_out_acceptance_length, start.held_out_prompts
    return f"acceptance length {length:.2f} on {prompts} held-out prompts (by position {by_position}), {trained}"


def printable(text: str) -> str:
    """Text of others without control characters: a log line must not move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _change(first: float | None, last: float, digits: int, unit: str = "") -> str:
    """`0.120 -> 0.480 (+0.360)`, or `0.480, measured once: too few to compare`."""
    after = f" {unit}" if unit else ""
    if first is None:
        return f"{last:.{digits}f}{after}, measured once: too few to compare"
    return f"{first:.{digits}f} -> {last:.{digits}f} ({last - first:+.{digits}f}){after}"
