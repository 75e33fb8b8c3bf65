"""Renders reports as rows of text: columns for a terminal, `name value` pairs for a log. Pure.

Called by the views, `specrl status` and the HTML report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from rich.text import Text

from specrl.formats.counters import COUNTERS, count_events
from specrl.formats.reasons import ReasonCounts, format_given_up, format_reasons
from specrl.formats.reports import DrafterInitReport, RunSummary, StatusReport, StepReport, ValidationReport

_NOTHING = "-"


@dataclass(frozen=True)
class TableColumn:
    """A column of the step table. priority: a narrow terminal drops the columns with the highest priority first."""

    title: str
    width: int
    priority: int
    value: Callable[[StepReport], str]


def _format_number(value: float | None, digits: int) -> str:
    return _NOTHING if value is None else f"{value:.{digits}f}"


def _format_seconds(value: float) -> str:
    """Format seconds for a column of five characters: fewer decimals for larger values."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


COLUMNS = (
    TableColumn("step", 5, 0, lambda report: str(report.step)),
    TableColumn("reward", 6, 0, lambda report: _format_number(report.reward, 3)),
    TableColumn("signal", 7, 2, lambda report: f"{report.groups - report.groups_without_signal}/{report.groups}"),
    TableColumn("valid", 5, 0, lambda report: _format_number(report.validation_reward, 3)),
    TableColumn("data", 5, 3, lambda report: _format_seconds(report.phases.data)),
    TableColumn("prep", 5, 3, lambda report: _format_seconds(report.phases.prepare)),
    TableColumn("gen", 5, 1, lambda report: _format_seconds(report.phases.generation)),
    TableColumn("logp", 5, 3, lambda report: _format_seconds(report.phases.logprob)),
    TableColumn("train", 5, 1, lambda report: _format_seconds(report.phases.train)),
    TableColumn("exposed", 7, 0, lambda report: f"{report.phases.exposed_share:.0%}"),
    TableColumn("accept", 6, 0, lambda report: _format_number(report.acceptance_length, 2)),
    TableColumn("lag", 3, 1, lambda report: str(report.policy_lag_max)),
    TableColumn("version", 7, 4, lambda report: str(report.policy_version)),
    TableColumn("tokens", 7, 2, lambda report: str(report.tokens)),
)


_REWARD_PRIORITY = 2
"""Of the columns of named rewards: they go before the times of generation and training do."""
_REWARD_WIDTH = 12  # characters of a reward's name that its column shows


class StepTable:
    """The step table for a terminal of `width` columns. rewards: names of the run's rewards; empty if it has one."""

    def __init__(self, width: int, rewards: Iterable[str] = ()) -> None:
        shown = list(COLUMNS)
        after = 1 + next(place for place, column in enumerate(shown) if column.title == "reward")
        shown[after:after] = [_make_reward_column(name) for name in rewards]
        while sum(column.width + 1 for column in shown) > width and any(column.priority for column in shown):
            least = max(column.priority for column in shown)
            shown = [column for column in shown if column.priority < least]
        self._shown = shown

    def header_row(self) -> Text:
        return Text(" ".join(f"{column.title:>{column.width}}" for column in self._shown), style="bold")

    def step_row(self, report: StepReport) -> Text:
        return Text(" ".join(f"{column.value(report):>{column.width}}" for column in self._shown))


def _make_reward_column(name: str) -> TableColumn:
    """Make the column of a named reward: its mean before weighting."""
    title = name if len(name) <= _REWARD_WIDTH else f"{name[: _REWARD_WIDTH - 2]}.."
    return TableColumn(
        title, max(5, len(title)), _REWARD_PRIORITY, lambda report: _format_number(report.rewards.get(name), 3)
    )


def _format_rewards(rewards: Mapping[str, float]) -> str:
    """Format the means of named rewards: ` (answer 0.500, tags 0.900)`; "" without any."""
    return f" ({', '.join(f'{name} {mean:.3f}' for name, mean in rewards.items())})" if rewards else ""


def format_step(report: StepReport) -> str:
    """Return one line that says everything the table says and is readable without a header."""
    phases = report.phases
    parts = [f"step {report.step}", f"reward {_format_number(report.reward, 3)}{_format_rewards(report.rewards)}"]
    if report.sources:
        parts.append("by source " + ", ".join(f"{name} {part.reward:.3f}" for name, part in report.sources.items()))
    if report.groups_without_signal:
        parts.append(f"without signal {report.groups_without_signal} of {report.groups} groups")
    if report.validation_reward is not None:
        parts.append(f"validation reward {report.validation_reward:.3f}{_format_rewards(report.validation_rewards)}")
    names = ("data", "prepare", "generation", "logprob", "train")
    parts += [f"{name} {_format_seconds(getattr(phases, name))}s" for name in names]
    parts.append(f"exposed {report.phases.exposed_share:.0%}")
    parts.append(f"hidden {_format_seconds(report.hidden_generation)}s")
    if report.acceptance_length is not None:
        parts.append(f"acceptance {report.acceptance_length:.2f}")
    parts += [f"lag {report.policy_lag_max}", f"version {report.policy_version}", f"tokens {report.tokens}"]
    wall_s = report.phases.wall_seconds
    if wall_s and report.tokens:
        parts.append(f"({report.tokens / wall_s:.0f} per second)")
    return " ".join(parts)


def format_validation(report: ValidationReport) -> str:
    """Return a validation in one line: mean reward and pass@k with their 95 % intervals, and what was not graded."""
    said = f"version {report.policy_version} validated: mean reward {report.reward:.3f}"
    if report.reward_low is not None and report.reward_high is not None:
        said += f" ({report.reward_low:.2f} to {report.reward_high:.2f})"
    said += f"{_format_rewards(report.rewards)} on {report.problems} problems"
    said += "".join(f", pass@{it.k} {it.rate:.3f} ({it.low:.2f} to {it.high:.2f})" for it in report.pass_at)
    said += "".join(f", {name} {part.reward:.3f} on {part.problems}" for name, part in report.sources.items())
    return f"{said}; {format_failed_answers(report)}" if report.failed_count else said


def format_failed_answers(report: ValidationReport) -> str:
    """Return how many answers were graded and why the others were not.

    As in `28 of 32 graded, 4 failed: KeyError at my_rewards.py:12 (4)`.
    """
    judged = report.answers - report.failed_count
    return f"{judged} of {report.answers} graded, {report.failed_count} failed: {format_reasons(report.failures)}"


def step_notices(report: StepReport) -> list[str]:
    """Return the lines below a step's row: prompts that were given up, and a step whose groups all lack a signal."""
    said = []
    if report.failed:
        said.append(f"step {report.step}: {format_given_up(ReasonCounts(report.failed.values()).by_reason)}")
    if report.groups and report.groups_without_signal == report.groups:
        said.append(f"step {report.step}: {describe_missing_signal(report.groups, report.groups)}")
    return said


def describe_missing_signal(count: int, groups: int) -> str:
    """Return `80 of 80 groups have no training signal: the rewards within each group are equal`."""
    return f"{count} of {groups} groups have no training signal: the rewards within each group are equal"


def counter_lines(status: StatusReport) -> list[str]:
    """Return a line for each kind of event, then the reasons of failed verdicts, prompts and replicas."""
    lines = [f"{words}: {count}" for _, words, count in count_events(status.counters)]
    for what, reasons in (("verdicts failed", status.verdict_failures), ("prompts given up", status.given_up)):
        if reasons:
            lines.append(f"{what}, by reason: {format_reasons(reasons)}")
    lines += [f"{replica} is given up: {reason}" for replica, reason in status.replicas_given_up.items()]
    return lines


def summary_lines(status: StatusReport) -> list[tuple[str, str]]:
    """Return what a finished run achieved, as (name, value) pairs; empty when there is no summary."""
    summary = status.summary
    if summary is None:
        return []
    lines = [("steps", f"{summary.steps}, {summary.rollouts_trained} rollouts of {summary.prompts_trained} prompts")]
    if summary.last_validation_reward is not None:
        change = _format_change(summary.first_validation_reward, summary.last_validation_reward, 3)
        lines.append(("validation reward", change))
    if summary.best_version is not None:
        best = summary.best_version
        lines.append(("best checkpoint", f"step {best.policy_version}, validation reward {best.reward:.3f}"))
    if summary.last_reward is not None:
        lines.append(("reward", _format_reward_change(summary, summary.last_reward)))
    for name, last in summary.last_rewards.items():
        lines.append((f"reward {name}", _format_change(summary.first_rewards.get(name), last, 3)))
    if summary.groups_without_signal:
        lines.append(("without signal", describe_missing_signal(summary.groups_without_signal, summary.groups)))
    if errors := status.counters.get("verifierErrors"):
        lines.append(("verifier errors", f"{errors} {COUNTERS['verifierErrors']}; `specrl report` has the reasons"))
    if summary.given_up:
        lines.append(("given up", format_given_up(summary.given_up)))
    if summary.last_acceptance_length is not None:
        tokens = _format_change(
            summary.first_acceptance_length, summary.last_acceptance_length, 2, "tokens per verification"
        )
        lines.append(("acceptance length", tokens))
    if summary.drafter_start is not None:
        lines.append(("drafter's start", _format_drafter_start(summary.drafter_start)))
    if summary.steps:
        lines += [
            (
                "exposed generation",
                f"{summary.exposed_generation_share:.0%} of wall time, {_format_seconds(summary.exposed_generation)} s",
            ),
            (
                "hidden generation",
                f"{_format_seconds(summary.hidden_generation)} s of {_format_seconds(summary.generation_under_way)} s "
                "under way",
            ),
            ("weight sync", f"{_format_seconds(summary.weight_sync_seconds)} s"),
            ("largest policy lag", f"{summary.policy_lag_max} steps"),
            ("unaccounted for", f"{summary.unaccounted_rollouts} rollouts"),
        ]
    paths = {"policy": summary.policy_path, "drafter": summary.drafter_path, "checkpoint": summary.checkpoint_path}
    return lines + [(name, path) for name, path in paths.items() if path]


def _format_reward_change(summary: RunSummary, last: float) -> str:
    """Return `0.200 -> 0.600 (+0.400), means of the first and of the last 5 steps`."""
    if summary.first_reward is None:
        return _format_change(None, last, 3)
    change = _format_change(summary.first_reward, last, 3)
    if summary.reward_steps == 1:
        return f"{change}, from the first step to the last"
    return f"{change}, means of the first and of the last {summary.reward_steps} steps"


def _format_drafter_start(start: DrafterInitReport) -> str:
    """Return what the fresh drafter reached, why its training ended, and the shares that are accepted by position."""
    shares = start.held_out_accepted_per_position or start.trained_accepted_per_position
    return f"{start.conclusion}; drafts accepted by position: {', '.join(f'{share:.2f}' for share in shares)}"


def make_printable(text: str) -> str:
    """Replace control characters with spaces. Text from others, such as a log line, must not move the cursor."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _format_change(first: float | None, last: float, digits: int, unit: str = "") -> str:
    """Return `0.120 -> 0.480 (+0.360)`, or `0.480 (measured once, so no comparison)` without a first value."""
    after = f" {unit}" if unit else ""
    if first is None:
        return f"{last:.{digits}f}{after} (measured once, so no comparison)"
    return f"{first:.{digits}f} -> {last:.{digits}f} ({last - first:+.{digits}f}){after}"
