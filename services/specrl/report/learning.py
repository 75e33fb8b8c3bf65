"""What a run learnt, with intervals, and how old the tokens were that it learnt from."""

from __future__ import annotations

from collections.abc import Sequence

from specrl.coordinator.pass_rates import NORMAL_95
from specrl.coordinator.report import ValidationReport
from specrl.launcher.rows import failed_answers
from specrl.report import charts
from specrl.report.charts import Line
from specrl.report.document import Chart, Section, Table
from specrl.report.figures import Figures, all_validations
from specrl.report.reading import Reading
from specrl.report.words import NOTHING, interval, number, percent

MOST_ROWS = 8
"""Of the table of validations, before it is folded: the chart shows the rest."""


def learning(run: Reading, found: Figures | None) -> Section:
    """Rewards by step and by validated version. found: None of a run that trained no step."""
    drawn: list[Chart] = []
    tables: list[Table] = []
    has_rewards = found is not None and found.last_reward is not None
    if found is not None and has_rewards:
        drawn.append(_reward_chart(run, found))
    problems = min(run.spec.validation.limit, _problems(run)) if run.spec.validation is not None else 0
    validations = all_validations(run.steps, run.validations, problems)
    if validations:
        drawn.append(_validation_chart(validations))
        tables.append(_validation_table(validations))
    text = (
        "Intervals are 95 %: of a step's reward over the means of its prompts; of a validation's mean reward by "
        "Student's t over the means of its problems or, where all rewards are 0 or 1, by Wilson's score, as that of "
        "pass@k."
    )
    said = ([] if has_rewards else ["No rollout was graded."]) + ([text] if drawn else [])
    return Section("What was learnt", tuple(said), tuple(tables), tuple(drawn))


def reward_change(found: Figures) -> str:
    """`0.20 → 0.60` from the first steps to the last; of a single step its reward alone."""
    if found.first_reward is None:
        return number(found.last_reward, 2)
    return f"{number(found.first_reward, 2)} → {number(found.last_reward, 2)}"


def _reward_chart(run: Reading, found: Figures) -> Chart:
    rewarded = [(report, report.reward) for report in run.steps if report.reward is not None]
    points = [(float(report.step), reward) for report, reward in rewarded]
    errors = [report.reward_error for report, _ in rewarded]
    known = [error for error in errors if error is not None]
    low: list[float] = []
    high: list[float] = []
    if len(known) == len(points):
        low = [y - NORMAL_95 * error for (_, y), error in zip(points, known, strict=True)]
        high = [y + NORMAL_95 * error for (_, y), error in zip(points, known, strict=True)]
    words = f"Mean reward of each step: {reward_change(found)}"
    if found.reward_steps > 1:
        words += f", means of the first and of the last {found.reward_steps} steps."
    else:
        words += ", from the first step to the last." if found.reward_steps else "; one step is too few to compare."
    caption = "Reward" + (", with its 95 % interval" if low else "")
    return Chart(caption, charts.lines([Line("reward", "train", points, low, high)], words), words)


def _validation_chart(validations: Sequence[ValidationReport]) -> Chart:
    ranges = [_ends(report) for report in validations]
    line = Line(
        "mean reward",
        "validation",
        [(float(report.policy_version), report.reward) for report in validations],
        [low for low, _ in ranges],
        [high for _, high in ranges],
        is_dotted=True,
    )
    first, last = validations[0].reward, validations[-1].reward
    words = f"Mean reward of validations: {number(first, 2)}"
    words += f" at first, {number(last, 2)} at last." if len(validations) > 1 else "; one is too few to compare."
    top = 1.0 if max(high for _, high in ranges) <= 1.0 else None
    caption = "Mean reward of validations, with its 95 % interval"
    return Chart(caption, charts.lines([line], words, top=top), words)


def _validation_table(validations: Sequence[ValidationReport]) -> Table:
    rows = tuple(
        (
            f"version {report.policy_version}",
            number(report.reward, 3),
            _known_interval(report),
            str(report.problems),
            failed_answers(report) if report.failed else NOTHING,
            _passes(report),
        )
        for report in validations
    )
    head = ("policy", "mean reward", "95 % interval", "problems", "not judged", "pass@k")
    return Table("Validations", head, rows, is_folded=len(rows) > MOST_ROWS)


def _ends(report: ValidationReport) -> tuple[float, float]:
    """Of the mean reward; the point itself where there is no interval."""
    if report.reward_low is None or report.reward_high is None:
        return report.reward, report.reward
    return report.reward_low, report.reward_high


def _known_interval(report: ValidationReport) -> str:
    if report.reward_low is None or report.reward_high is None:
        return NOTHING
    return interval(report.reward_low, report.reward_high)


def _passes(report: ValidationReport) -> str:
    """Each pass@k with its interval; none where rewards are not 0 or 1."""
    return ", ".join(f"{it.k}: {number(it.rate, 3)} ({interval(it.low, it.high)})" for it in report.pass_at) or NOTHING


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
