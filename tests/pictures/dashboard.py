"""Draws the panels of a Grafana dashboard from a Prometheus, as one HTML page. Pure.

Grafana itself is in no package registry that this project installs from. The panels, their queries, legends and order
are the dashboard's own (`tools/dashboards`); only the drawing is ours. Heatmaps and bars are left out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from tools.dashboards.model import Dashboard, Panel, PanelKind

WIDTH = 560
HEIGHT = 170
LEFT = 50
RIGHT = 10
TOP = 8
BOTTOM = 22
COLOURS = ("#73bf69", "#f2cc0c", "#8ab8ff", "#ff780a", "#f2495c", "#5794f2", "#b877d9", "#9fa7b3")  # as Grafana's, dark
RATE_INTERVAL = (
    "20s"  # Grafana's rule: four times the scrape interval, here with more smoothing, since steps take seconds
)
STYLE = """
body { margin: 0; padding: 12px; background: #111217; color: #ccccdc; font: 12px/1.4 sans-serif }
h1 { margin: 0 0 10px; font-size: 16px; font-weight: 500 }
main { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 8px }
section { padding: 8px; background: #181b1f; border: 1px solid #25282d; border-radius: 2px }
h2 { margin: 0 0 4px; font-size: 13px; font-weight: 500 }
text { fill: #9fa1ac; font-size: 10.5px }
.grid { stroke: #2a2d33 }
p { display: flex; flex-wrap: wrap; gap: 0 12px; margin: 2px 0 0 } i { font-style: normal }
"""


@dataclass(frozen=True)
class Series:
    """One curve. points: pairs of seconds since the picture's first moment and a value."""

    name: str
    points: Sequence[tuple[float, float]]


Ask = Callable[[str], list[tuple[dict[str, str], list[tuple[float, float]]]]]
"""Answers a PromQL expression with labels and points of each series."""


def draw_dashboard(dashboard: Dashboard, ask: Ask, seconds: float, most: int) -> str:
    """Draw the first `most` panels of lines that have data. seconds: the span of the time axis."""
    drawn: list[str] = []
    for panel in dashboard.panels:
        series = [] if panel.kind is not PanelKind.LINES else _ask_panel(panel, ask)
        if series and len(drawn) < most:
            drawn.append(_draw_panel(panel, series, seconds))
    title = escape(f"specrl / {dashboard.title.rpartition('/')[2].strip()}")
    return f"<!doctype html><meta charset=utf-8><style>{STYLE}</style><h1>{title}</h1><main>{''.join(drawn)}</main>"


def _ask_panel(panel: Panel, ask: Ask) -> list[Series]:
    found = []
    for expression, legend in panel.queries:
        query = (
            expression.replace("$__rate_interval", RATE_INTERVAL).replace("$namespace", ".*").replace("$rljob", ".*")
        )
        for labels, points in ask(query):
            name = re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), legend)  # noqa: B023 - used at once
            found.append(Series(name, points))
    return [series for series in found if series.points]


def _draw_panel(panel: Panel, series: Sequence[Series], seconds: float) -> str:
    stacks = _stack(series) if panel.stacked else [item.points for item in series]
    highest = max(value for points in stacks for _, value in points)
    top = panel.maximum or highest * 1.05 or 1.0
    bottom = min(panel.minimum or 0.0, 0.0)

    def place(second: float, value: float) -> str:
        x = LEFT + second / seconds * (WIDTH - LEFT - RIGHT)
        y = HEIGHT - BOTTOM - (min(value, top) - bottom) / (top - bottom) * (HEIGHT - TOP - BOTTOM)
        return f"{x:.1f},{y:.1f}"

    parts = [_draw_axes(panel, bottom, top, seconds, place)]
    for number in reversed(range(len(series))):  # the upper layers of a stack first, so that the lower ones cover them
        line = " ".join(place(*point) for point in stacks[number])
        colour = COLOURS[number % len(COLOURS)]
        if panel.stacked:
            ends = stacks[number][0][0], stacks[number][-1][0]
            area = f"{place(ends[0], bottom)} {line} {place(ends[1], bottom)}"
            parts.append(f'<polygon points="{area}" fill="#181b1f"/><polygon points="{area}" fill="{colour}66"/>')
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.3"/>')
    legend = "".join(
        f'<span><i style="color: {COLOURS[number % len(COLOURS)]}">&#9644;</i> {escape(item.name)}</span>'
        for number, item in enumerate(series)
    )
    chart = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}">{"".join(parts)}</svg>'
    return f"<section><h2>{escape(panel.title)}</h2>{chart}<p>{legend}</p></section>"


def _draw_axes(panel: Panel, bottom: float, top: float, seconds: float, place: Callable[[float, float], str]) -> str:
    parts = []
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        value = bottom + share * (top - bottom)
        y = float(place(0, value).partition(",")[2])
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{LEFT - 5}" y="{y + 4}" text-anchor="end">{_format(value, panel.unit)}</text>')
    every = max(20, round(seconds / 6 / 20) * 20)
    for second in range(0, int(seconds), every):
        x = place(second, bottom).partition(",")[0]
        moment = f"{second // 60}:{second % 60:02}"
        parts.append(f'<text x="{x}" y="{HEIGHT - 6}" text-anchor="middle">{moment}</text>')
    return "".join(parts)


def _stack(series: Sequence[Series]) -> list[list[tuple[float, float]]]:
    """Add to each series those before it, at each moment that it has a value."""
    sums: dict[float, float] = {}
    stacks = []
    for item in series:
        for second, value in item.points:
            sums[second] = sums.get(second, 0.0) + value
        stacks.append([(second, sums[second]) for second, _ in item.points])
    return stacks


def _format(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    number = f"{value / 1000:.1f}k" if value >= 1000 else f"{value:.3g}"
    return f"{number} s" if unit == "s" else number
