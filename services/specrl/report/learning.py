"""What a run learnt, with intervals, and how old the tokens were that it learnt from."""

from __future__ import annotations

from specrl.coordinator.pass_rates import NORMAL_95, wilson
from specrl.coordinator.report import ValidationReport
from specrl.report import charts
from specrl.report.charts import Line
from specrl.report.document import Chart, Section, Table
from specrl.report.figures import Figures, accuracies
from specrl.report.reading import Reading
from specrl.report.words import interval, number, percent

MOST_ROWS = 8
"""Of the table of validations, before it is folded: the chart shows the rest."""


def learning(run: Reading, found: Figures) -> Section:
    rewarded = [report for report in run.steps if report.reward is not None]
    points = [(float(report.step), report.reward or 0.0) for report in rewarded]
    errors = [report.reward_error for report in rewarded]
    low: list[float] = []
    high: list[float] = []
    if all(error is not None for error in errors):
        half = [NORMAL_95 * (error or 0.0) for error in errors]
        low = [y - wide for (_, y), wide in zip(points, half, strict=True)]
        high = [y + wide for (_, y), wide in zip(points, half, strict=True)]
    words = (
        f"Mean reward of each step: {number(found.first_reward, 2)} at first, {number(found.last_reward, 2)} at last."
    )
    drawn = [
        Chart(
            "Reward" + (", with its 95 % interval" if low else ""),
            charts.lines([Line("reward", "train", points, low, high)], words),
            words,
        )
    ]
    tables: tuple[Table, ...] = ()
    problems = min(run.spec.validation.limit, _problems(run)) if run.spec.validation is not None else 0
    validations = accuracies(run.steps, run.validations, problems)
    if validations:
        ranges = [_ends(report) for report in validations]
        line = Line(
            "accuracy",
            "validation",
            [(float(report.policy_version), report.accuracy) for report in validations],
            [low for low, _ in ranges],
            [high for _, high in ranges],
            is_dotted=True,
        )
        before, after = validations[0].accuracy, validations[-1].accuracy
        words = f"Validation accuracy: {number(before, 2)} at first, {number(after, 2)} at last."
        drawn.append(Chart("Validation accuracy, with its 95 % interval", charts.lines([line], words, top=1.0), words))
        rows = tuple(
            (f"version {r.policy_version}", number(r.accuracy, 3), interval(*ends), str(r.problems), _passes(r))
            for r, ends in zip(validations, ranges, strict=True)
        )
        head = ("policy", "accuracy", "95 % interval", "problems", "pass@k")
        tables = (Table("Validations", head, rows, is_folded=len(rows) > MOST_ROWS),)
    text = (
        "Intervals are 95 %: of the reward over the means of the step's prompts, of the accuracy and of pass@k over "
        "problems by Wilson's score."
    )
    return Section("What was learnt", (text,), tables, tuple(drawn))


def _ends(report: ValidationReport) -> tuple[float, float]:
    """Of the accuracy; of runs that kept no pass rates, as if each problem had been answered once."""
    first = report.pass_at[0] if report.pass_at else None
    return (first.low, first.high) if first is not None else wilson(report.accuracy, report.problems)


def _passes(report: ValidationReport) -> str:
    """pass@k beyond the first, each with its interval."""
    return ", ".join(f"{it.k}: {number(it.rate, 3)} ({interval(it.low, it.high)})" for it in report.pass_at[1:]) or "-"


def _problems(run: Reading) -> int:
    """How many problems the source of validations has, where the run file says so."""
    source = run.spec.validation.source if run.spec.validation is not None else None
    return source.generated.count if source is not None and source.generated is not None else 1 << 30


def policy_lag(run: Reading, found: Figures) -> Section:
    bound = run.spec.schedule.max_policy_lag
    text = (
        f"Policy lag of a rollout: steps between its oldest token and the step that trained it. Bound {bound}, largest "
        f"{found.policy_lag_max}, mean {number(found.policy_lag_mean, 2)}."
    )
    if not found.policy_lags:
        return Section("Policy lag", (text, "This run's reports have no distribution of it."))
    total = sum(found.policy_lags) or 1
    shares = [(f"{lag}", count / total * 100) for lag, count in enumerate(found.policy_lags)]
    words = "Rollouts by policy lag: " + ", ".join(f"{share:.0f} % of {lag}" for lag, share in shares)
    rows = tuple((f"lag {lag}", str(count), percent(count / total)) for lag, count in enumerate(found.policy_lags))
    drawn = (Chart("Rollouts by policy lag", charts.bars(shares, words, " %"), words),) if len(shares) <= 12 else ()
    return Section("Policy lag", (text,), (Table("Rollouts", ("", "rollouts", "share"), rows),), drawn)
