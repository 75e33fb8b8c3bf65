"""The report's sections on learning: rewards and validations with their intervals, and the policy lag of rollouts."""

from __future__ import annotations

from collections.abc import Sequence

from specrl.formats.reports import StepReport, ValidationReport, list_reward_names, list_source_names
from specrl.formats.statistics.edges import EdgeMeans, compare_edges_by_name
from specrl.formats.statistics.pass_rates import NORMAL_95
from specrl.launcher.terminal.rows import format_failed_answers
from specrl.report import charts
from specrl.report.charts import ChartLine
from specrl.report.document import ReportChart, ReportSection, ReportTable
from specrl.report.figures import RunFigures, all_validations
from specrl.report.reading import LoadedRun
from specrl.report.words import NOTHING, format_interval, format_number, format_percent

REWARD_STYLES = ("train", "validation", "logprob", "prepare", "generation", "data")
"""Colours of named rewards, as classes of the style sheet. A seventh one has the first colour again."""

MAX_ROWS = 8
"""Most rows of the table of validations that is shown unfolded. A chart shows all of them."""


def rewards_section(run: LoadedRun) -> ReportSection:
    """Make the section on rewards and validations."""
    drawn: list[ReportChart] = []
    tables: list[ReportTable] = []
    has_rewards = run.figures.reward_edges.last is not None
    if has_rewards:
        drawn.append(_reward_chart(run))
    if any(report.rewards for report in run.steps):
        drawn.append(_named_rewards_chart(run))
        tables.append(_named_rewards_table(run))
    if names := list_source_names(run.steps):
        drawn.append(_sources_chart(run, names))
        tables.append(_sources_table(run))
    problems = _count_problems(run)
    validations = all_validations(run.steps, run.validations, problems)
    if validations:
        drawn.append(_validation_chart(validations))
        tables.append(_validation_table(validations))
    text = (
        "All intervals are 95 %. For a step's reward they are over the means of its prompts. For a validation's mean "
        "reward they are Student's t over the means of its problems, or Wilson's score if all rewards are 0 or 1. For "
        "pass@k they are Wilson's score."
    )
    texts = ([] if has_rewards else ["No rollout was graded."]) + ([text] if drawn else [])
    return ReportSection("Rewards and validations", texts, tables, drawn)


def format_reward_change(found: RunFigures) -> str:
    """Format the reward of the first and of the last steps: `0.20 → 0.60`. A single step has one number."""
    if found.reward_edges.first is None:
        return format_number(found.reward_edges.last, 2)
    return f"{format_number(found.reward_edges.first, 2)} → {format_number(found.reward_edges.last, 2)}"


def _reward_chart(run: LoadedRun) -> ReportChart:
    rewarded = [report for report in run.steps if report.reward is not None]
    points = [(float(report.step), report.reward or 0.0) for report in rewarded]
    known = [report.reward_error for report in rewarded if report.reward_error is not None]
    low: list[float] = []
    high: list[float] = []
    # A band needs an error at each point. A step with a single prompt has none.
    if len(known) == len(points):
        low = [y - NORMAL_95 * error for (_, y), error in zip(points, known, strict=True)]
        high = [y + NORMAL_95 * error for (_, y), error in zip(points, known, strict=True)]
    words = f"Mean reward of each step: {format_reward_change(run.figures)}"
    averaged = run.figures.reward_edges.steps
    if averaged > 1:
        words += f" (means of the first and of the last {averaged} steps)."
    else:
        words += " (first and last step)." if averaged else " (a single step)."
    caption = "Reward" + (", with 95 % interval" if low else "")
    return charts.draw_lines(caption, [ChartLine("reward", "train", points, low, high)], words)


def _named_rewards_chart(run: LoadedRun) -> ReportChart:
    lines = []
    for place, name in enumerate(list_reward_names(run.steps)):
        points = [(float(it.step), it.rewards[name]) for it in run.steps if name in it.rewards]
        lines.append(ChartLine(name, REWARD_STYLES[place % len(REWARD_STYLES)], points))
    words = (
        "Mean of each reward by name, before weighting. The table has the values of the first and of the last steps."
    )
    return charts.draw_lines("Rewards by name, before weighting", lines, words)


def _named_rewards_table(run: LoadedRun) -> ReportTable:
    weights = {term.name: term.weight for term in run.spec.rewards.sum.terms} if run.spec.rewards.sum else {}
    rows = []
    compared = compare_edges_by_name(list_reward_names(run.steps), [report.rewards for report in run.steps])
    for name, edges in compared.items():
        validated = [report.rewards[name] for report in run.validations if name in report.rewards]
        rows.append(
            (
                name,
                str(weights.get(name, NOTHING)),
                format_number(edges.first, 3),
                format_number(edges.last, 3),
                format_number(validated[0] if len(validated) > 1 else None, 3),
                format_number(validated[-1] if validated else None, 3),
            )
        )
    head = ("reward", "weight", "first steps", "last steps", "first validation", "last validation")
    return ReportTable("Rewards by name, before weighting", head, rows)


def _sources_chart(run: LoadedRun, names: Sequence[str]) -> ReportChart:
    lines = []
    for place, name in enumerate(names):
        points = [(float(it.step), it.sources[name].reward) for it in run.steps if name in it.sources]
        lines.append(ChartLine(name, REWARD_STYLES[place % len(REWARD_STYLES)], points))
    words = "Mean reward of each training source. The table has the values of the first and of the last steps."
    return charts.draw_lines("Reward by source", lines, words)


def _sources_table(run: LoadedRun) -> ReportTable:
    rows = []
    for name, edges in compare_sources(run.steps).items():
        parts = [report.sources[name] for report in run.steps if name in report.sources]
        silent = sum(part.groups_without_signal for part in parts)
        validated = [report.sources[name].reward for report in run.validations if name in report.sources]
        rows.append(
            (
                name,
                format_number(edges.first, 3),
                format_number(edges.last, 3),
                f"{silent} of {sum(part.groups for part in parts)}",
                format_number(validated[0] if len(validated) > 1 else None, 3),
                format_number(validated[-1] if validated else None, 3),
            )
        )
    head = ("source", "first steps", "last steps", "groups without signal", "first validation", "last validation")
    return ReportTable("Reward by source", head, rows)


def compare_sources(steps: Sequence[StepReport]) -> dict[str, EdgeMeans]:
    """Compare the mean reward of each training source in the first steps with that in the last."""
    rewards = [{name: part.reward for name, part in report.sources.items()} for report in steps]
    return compare_edges_by_name(list_source_names(steps), rewards)


def _validation_chart(validations: Sequence[ValidationReport]) -> ReportChart:
    ranges = [_interval_ends(report) for report in validations]
    line = ChartLine(
        "mean reward",
        "validation",
        [(float(report.policy_version), report.reward) for report in validations],
        [low for low, _ in ranges],
        [high for _, high in ranges],
        is_dotted=True,
    )
    first = validations[0].reward
    last = validations[-1].reward
    words = f"Mean reward of validations: {format_number(first, 2)}"
    words += f" at first, {format_number(last, 2)} at last." if len(validations) > 1 else " (a single validation)."
    # Rewards of 0 to 1 are drawn on the full scale, so that charts of different runs can be compared.
    top = 1.0 if max(high for _, high in ranges) <= 1.0 else None
    return charts.draw_lines("Mean reward of validations, with 95 % intervals", [line], words, top=top)


def _validation_table(validations: Sequence[ValidationReport]) -> ReportTable:
    rows = [
        (
            f"version {report.policy_version}{source and f', {source}'}",
            format_number(scores.reward, 3),
            _format_reward_interval(scores),
            str(scores.problems),
            format_failed_answers(scores) if scores.failed_count else NOTHING,
            _format_pass_rates(scores),
        )
        for report in validations
        for source, scores in (("", report), *report.sources.items())
    ]
    head = ("policy", "mean reward", "95 % interval", "problems", "not judged", "pass@k")
    return ReportTable("Validations", head, rows, is_folded=len(rows) > MAX_ROWS)


def _interval_ends(report: ValidationReport) -> tuple[float, float]:
    """Return the ends of the interval of the mean reward. Without an interval both are the reward."""
    if report.reward_low is None or report.reward_high is None:
        return report.reward, report.reward
    return report.reward_low, report.reward_high


def _format_reward_interval(report: ValidationReport) -> str:
    if report.reward_low is None or report.reward_high is None:
        return NOTHING
    return format_interval(report.reward_low, report.reward_high)


def _format_pass_rates(report: ValidationReport) -> str:
    """Format each pass@k with its interval; a dash without any."""
    rates = [f"{it.k}: {format_number(it.rate, 3)} ({format_interval(it.low, it.high)})" for it in report.pass_at]
    return ", ".join(rates) or NOTHING


def _count_problems(run: LoadedRun) -> int:
    """Return the number of problems of a validation, as far as the run file states it: files may have fewer."""
    if run.spec.validation is None:
        return 0
    counts = [
        (given.limit, given.source.generated.count if given.source.generated is not None else given.limit)
        for given in run.spec.validation.all_sets
    ]
    return sum(min(limit, count) for limit, count in counts)


def policy_lag_section(run: LoadedRun) -> ReportSection:
    """Make the section on the policy lag: bound, largest, mean and distribution over rollouts."""
    found = run.figures
    bound = run.spec.schedule.max_policy_lag
    text = (
        "The policy lag of a rollout is the number of steps between its oldest token and the step that trained it. "
        f"Bound: {bound}. Largest: {found.policy_lag_max}. Mean: {format_number(found.policy_lag_mean, 2)}."
    )
    lags = found.policy_lags
    if not lags:
        return ReportSection("Policy lag", [text, "No rollout was trained, so there is no distribution."])
    total = sum(lags) or 1
    shares = [(f"{lag}", count / total * 100) for lag, count in enumerate(lags)]
    words = "Rollouts by policy lag: " + ", ".join(f"lag {lag}: {share:.0f} %" for lag, share in shares)
    rows = [(f"lag {lag}", str(count), format_percent(count / total)) for lag, count in enumerate(lags)]
    # More than a dozen bars would be too narrow for their labels; the table has all of them.
    drawn = [charts.draw_bars("Rollouts by policy lag", shares, words, " %")] if len(lags) <= 12 else []
    return ReportSection("Policy lag", [text], [ReportTable("Rollouts", ("", "rollouts", "share"), rows)], drawn)
