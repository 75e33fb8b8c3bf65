"""The kinds of runs of benchmarks/losses.py, and the tables and pictures of their results. Pure: it starts no runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from itertools import product
from statistics import mean

from specrl.formats.statistics.mean_reward import student_interval
from specrl.formats.statistics.pass_rates import wilson_interval
from specrl.report import charts
from specrl.report.charts import ChartLine
from specrl.report.words import format_number

LAGS = (0, 1, 4)
LOSSES = {
    "GRPO": "advantages: GroupStandardised, normaliser: Sequences",
    "DAPO": 'advantages: GroupStandardised, clipHigh: "0.28", withoutSignal: LeaveOut',
    "GSPO": 'objective: Gspo, advantages: GroupStandardised, normaliser: Sequences, clipLow: "3e-4", clipHigh: "4e-4"',
    "CISPO": 'objective: Cispo, advantages: GroupStandardised, clipLow: "1", clipHigh: "4"',
}
"""Losses as in docs/losses.md, without GRPO's reference and DAPO's penalty for long answers."""
NOTHING = "none"
TRUNCATED = "TIS"
RATIO = "ratio"
CORRECTIONS = {
    NOTHING: "correction: {method: None}",
    TRUNCATED: 'correction: {method: Truncate, high: "2"}',
    RATIO: "ratioTo: Sampler, correction: {method: None}",
}
"""Corrections: none (weights of 1); trainer over sampler, at most 2; and the objective's own ratio to the sampler,
clipped as PPO does.
"""


@dataclass(frozen=True, order=True)
class Kind:
    """The settings of one run, or of the runs of several seeds."""

    data: str
    loss: str
    lag: int
    correction: str

    @property
    def name(self) -> str:
        return f"{self.data}-{self.loss}-lag{self.lag}-{self.correction}".lower()

    def fields(self) -> dict[str, str]:
        """Fields of the run file."""
        loss = f"{{{LOSSES[self.loss]}, {CORRECTIONS[self.correction]}}}"
        return {"trainer.loss": loss, "schedule.maxPolicyLag": str(self.lag)}


def kinds(data: str) -> list[Kind]:
    """Every loss at every lag with and without correction; at the greatest lag also with the ratio."""
    both = [Kind(data, *it) for it in product(LOSSES, LAGS, (NOTHING, TRUNCATED))]
    return both + [Kind(data, loss, max(LAGS), RATIO) for loss in LOSSES]


@dataclass(frozen=True)
class Outcome:
    """Result of one run. accuracies: of every validation, as (policy version, share of problems solved), ascending.

    rewards: mean reward of each step. lag: mean policy lag of all rollouts trained. effective: mean effective sample
    size of the steps; 1 if all weights are equal. clipped: mean share of tokens that a clip changed.
    """

    accuracies: tuple[tuple[int, float], ...]
    problems: int
    rewards: tuple[float, ...]
    lag: float
    effective: float
    clipped: float

    @property
    def last(self) -> float:
        return self.accuracies[-1][1]

    @property
    def area(self) -> float:
        """Mean accuracy of all validated versions after the first, which is the same in all runs."""
        return mean(accuracy for _, accuracy in self.accuracies[1:])


Found = Mapping[Kind, Sequence[Outcome]]
"""Runs of each kind, one per seed, in the same order of seeds."""


def last_with_interval(runs: Sequence[Outcome]) -> str:
    """Accuracy of the last version: mean over seeds, and its 95 % interval over problems, which all seeds share."""
    values = [run.last for run in runs]
    low, high = wilson_interval(mean(values), min(run.problems for run in runs))
    return f"{mean(values):.2f} ({low:.2f}-{high:.2f})"


def average_problems(by_seed: Sequence[Sequence[float]]) -> list[float]:
    """Average each problem's rewards over seeds: answers to one problem are no independent sample."""
    return [mean(rewards) for rewards in zip(*by_seed, strict=True)]


def average_seeds(by_seed: Sequence[Sequence[float]]) -> list[float]:
    """Average each seed's steps, without those that are not numbers: steps of one run are no independent sample.

    A seed without any number is left out.
    """
    numbers = [[value for value in steps if not math.isnan(value)] for steps in by_seed]
    return [mean(steps) for steps in numbers if steps]


def is_above_zero(differences: Sequence[float]) -> bool:
    """Whether the 95 % interval of the mean lies above 0. False for a single value."""
    ends = student_interval(differences)
    return ends is not None and ends[0] > 0


def mean_with_interval(differences: Sequence[float]) -> str:
    """Mean and its 95 % interval by Student's t. A single value has no interval."""
    middle = mean(differences)
    if len(differences) < 2:
        return f"{middle:+.2f}"
    low, high = student_interval(differences) or (middle, middle)  # equal values have no spread
    return f"{middle:+.2f} ({low:+.2f} to {high:+.2f})"


def table(found: Found) -> str:
    """Render Markdown: a row per data, lag and correction, a column per loss; then the gain of the correction."""
    present = [correction for correction in CORRECTIONS if any(kind.correction == correction for kind in found)]
    rows = [("", "lag", "correction", *LOSSES, "mean lag", "effective sample size", "clipped")]
    for data, lag, correction in product(_data(found), LAGS, present):
        of = {loss: found.get(Kind(data, loss, lag, correction), ()) for loss in LOSSES}
        runs = [run for some in of.values() for run in some]
        if runs:
            cells = [last_with_interval(some) if some else "-" for some in of.values()]
            means = [mean(getattr(run, name) for run in runs) for name in ("lag", "effective", "clipped")]
            rows.append((data, str(lag), correction, *cells, *(format_number(value, 2) for value in means)))
    return render_rows(rows, text_columns=1)


def worth(found: Found) -> str:
    """Render Markdown: accuracy with minus accuracy without correction, over losses and seeds, by data and lag."""
    rows = [("", "lag", "correction", "last accuracy, less that without", "mean accuracy, less that without", "runs")]
    for data, lag, correction in product(_data(found), LAGS, (TRUNCATED, RATIO)):
        pairs = [pair for loss in LOSSES for pair in _pairs(found, Kind(data, loss, lag, correction))]
        if pairs:
            last = mean_with_interval([a.last - b.last for a, b in pairs])
            area = mean_with_interval([a.area - b.area for a, b in pairs])
            rows.append((data, str(lag), correction, last, area, f"2 x {len(pairs)}"))
    return render_rows(rows, text_columns=1)


def _pairs(found: Found, kind: Kind) -> list[tuple[Outcome, Outcome]]:
    """Pair the runs with this correction with those without, by seed."""
    without = found.get(replace(kind, correction=NOTHING), ())
    return list(zip(found.get(kind, ()), without, strict=False))


def _data(found: Found) -> list[str]:
    return list(dict.fromkeys(kind.data for kind in found))


def render_rows(rows: Sequence[Sequence[str]], text_columns: int) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    rule = "|" + "--|" * text_columns + "--:|" * (len(rows[0]) - text_columns)
    return "\n".join([lines[0], rule, *lines[1:]]) + "\n"


# -- the picture -------------------------------------------------------------------------------------------------------

STYLES = dict(zip(LOSSES, ("first", "second", "third", "fourth"), strict=True))
SHEET = """
text { font: 12.5px ui-sans-serif, system-ui, Arial, sans-serif; fill: #63676f }
.title { font-size: 14px; font-weight: 600; fill: #1d1f23 }
.paper { fill: #fdfcfa } .grid { stroke: #dedbd3 } .axis { font-size: 11.5px }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round }
.curve.first { stroke: #274b70 } .curve.second { stroke: #c8501e }
.curve.third { stroke: #8a74bd } .curve.fourth { stroke: #4f9a94 }
"""
HEAD = 26
GAP = 16
"""Pixels above each chart for its title, and between charts."""


def picture(found: Found, data: str) -> str:
    """Render a standalone SVG: validation accuracy by version, a chart per lag and correction, a curve per loss.

    Curves are means over seeds.
    """
    places = [
        (lag, correction)
        for correction in CORRECTIONS
        for lag in LAGS
        if any(Kind(data, loss, lag, correction) in found for loss in LOSSES)
    ]
    columns = sorted({lag for lag, _ in places})
    parts = [_key(data)]
    height = HEAD
    for correction in CORRECTIONS:
        row = [lag for lag, it in places if it == correction]
        for lag in row:
            x = (GAP + charts.WIDTH) * columns.index(lag)
            parts.append(_panel(found, Kind(data, "", lag, correction), x, height))
        height += (HEAD + charts.HEIGHT + GAP) * bool(row)
    width = (GAP + charts.WIDTH) * max(2, len(columns))  # the legend stands above the second chart
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">'
        f"<style>{SHEET}</style>"
        f'<rect class="paper" width="{width}" height="{height}"/>{"".join(parts)}</svg>\n'
    )


def _key(data: str) -> str:
    names = f'<text class="title" x="{charts.LEFT}" y="18">{escape(data)}: validation accuracy by policy version</text>'
    for place, (loss, style) in enumerate(STYLES.items()):
        x = charts.WIDTH + GAP + charts.LEFT + 90 * place
        names += f'<path class="curve {style}" d="M{x} 14h22"/><text x="{x + 28}" y="18">{escape(loss)}</text>'
    return names


def _panel(found: Found, kind: Kind, x: int, y: int) -> str:
    title = f"lag {kind.lag}, " + {NOTHING: "no correction", TRUNCATED: "truncated weights (TIS)"}.get(
        kind.correction, "the ratio is to the sampler"
    )
    series = []
    for loss, style in STYLES.items():
        runs = found.get(Kind(kind.data, loss, kind.lag, kind.correction), ())
        if runs:
            by_version = zip(*(run.accuracies for run in runs), strict=True)
            series.append(ChartLine(loss, style, [(float(at[0][0]), mean(a for _, a in at)) for at in by_version]))
    drawn = charts.draw_lines(title, series, f"{kind.data}, {title}", top=1.0)
    return f'<text class="title" x="{x + charts.LEFT}" y="{y + 18}">{escape(title)}</text>' + drawn.svg.replace(
        "<svg ", f'<svg x="{x}" y="{y + HEAD}" width="{charts.WIDTH}" height="{charts.HEIGHT + 4}" ', 1
    )
