"""Draws the report's charts as inline SVG: lines with bands, dots with whiskers, stacked bars, bars. Pure.

No plotting library is used, because a report has only these four shapes. matplotlib would add 60 MB to the control
plane. Charts drawn by JavaScript cannot be printed or read by a screen reader. Colours are classes of the page's style
sheet, so the same SVG works in light and dark mode and on paper. They differ in lightness, for colour-blind readers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specrl.report.document import ReportChart

# Size of a chart and of its margins, in SVG units, which are pixels at the page's normal size.
WIDTH = 480
HEIGHT = 220
LEFT = 46
RIGHT = 12
TOP = 12
BOTTOM = 30
MAX_POINTS = 240
"""Most points of a curve, each two pixels wide. In longer runs a point is the mean of consecutive steps."""

Point = tuple[float, float]


@dataclass(frozen=True)
class ChartLine:
    """A curve or a series of dots.

    style: a class of the style sheet. low, high: ends of each point's interval, as long as `points`; empty without.
    """

    name: str
    style: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_dotted: bool = False
    """Whether to draw single measurements with whiskers instead of a curve with a band."""


@dataclass(frozen=True)
class BarStack:
    """Stacked bars. styles: of each part, which is also its name. places: the step of each bar.

    values: by part, then by bar.
    """

    styles: Sequence[str]
    places: Sequence[float]
    values: Sequence[Sequence[float]]


class _ChartFrame:
    """Maps values to SVG coordinates, and draws the axes. x, y: ranges of the values."""

    def __init__(self, x: Point, y: Point, unit: str) -> None:
        self._x = x
        # An empty range would divide by 0 below.
        self._y = (y[0], y[1] if y[1] > y[0] else y[0] + 1)
        self.unit = unit

    def x_position(self, value: float) -> float:
        low, high = self._x
        # A single place has an empty range, and is drawn at the left end.
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y_position(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def list_points(self, xs: Sequence[float], ys: Sequence[float]) -> list[str]:
        return [f"{self.x_position(x):.1f},{self.y_position(y):.1f}" for x, y in zip(xs, ys, strict=True)]

    def draw_axes(self, x_name: str, x_ticks: Sequence[tuple[float, str]]) -> str:
        low, high = self._y
        parts = []
        for value in _choose_ticks(low, high):
            y = self.y_position(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f"{_format_tick(value)}{self.unit}"
            # 4 units below the line: SVG places a text by its baseline, and digits are about 9 units high.
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        for value, text in x_ticks:
            parts.append(
                f'<text x="{self.x_position(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(text)}</text>'
            )
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT}" text-anchor="end" class="axis">{escape(x_name)}</text>')
        return "".join(parts)


def draw_lines(
    caption: str, series: Sequence[ChartLine], alternative: str, unit: str = "", top: float | None = None
) -> ReportChart:
    """Draw curves over steps, or dots over policy versions.

    The vertical axis includes 0. top: its upper end; None fits the data. Without any point only the axes are drawn.
    alternative: the text for screen readers.
    """
    xs = [x for line in series for x, _ in line.points] or [0.0]
    ys = [y for line in series for y in (*(y for _, y in line.points), *line.low, *line.high)]
    frame = _ChartFrame((min(xs), max(xs)), (min([0.0, *ys]), top or max([0.0, *ys])), unit)
    is_dotted = any(line.is_dotted for line in series)
    drawn = frame.draw_axes("policy version" if is_dotted else "step", _choose_step_ticks(min(xs), max(xs)))
    names: dict[str, str] = {}
    for line in series:
        drawn += _draw_dots(line, frame) if line.is_dotted else _draw_curve(line, frame)
        names.setdefault(line.style, line.name)  # of lines that look the same, the first stands for all
    # The caption names a single line.
    return ReportChart(caption, _wrap_svg(drawn, alternative), alternative, [*names.items()] if len(series) > 1 else [])


def draw_stacked_bars(caption: str, stack: BarStack, alternative: str, unit: str = "") -> ReportChart:
    """Draw one stacked bar per step, at least one. The parts are stacked from the bottom in their order."""
    count = len(stack.places)
    totals = [sum(part[i] for part in stack.values) for i in range(count)]
    step = (stack.places[-1] - stack.places[0]) / (count - 1) if count > 1 else 1.0
    # Half a step more at both ends, so that the outer bars are drawn in full.
    frame = _ChartFrame((stack.places[0] - step / 2, stack.places[-1] + step / 2), (0.0, max(totals)), unit)
    drawn = frame.draw_axes("step", _choose_step_ticks(stack.places[0], stack.places[-1]))
    # 18 % of each place is the gap to the next bar. Below 0.8 units a bar would be hard to see.
    width = max(0.8, (WIDTH - LEFT - RIGHT) / count * 0.82)
    below = [0.0] * count
    for style, values in zip(stack.styles, stack.values, strict=True):
        for i, value in enumerate(values):
            if value > 0:
                upper = frame.y_position(below[i] + value)
                lower = frame.y_position(below[i])
                # At least 0.4 units high, so that a small part stays visible.
                drawn += (
                    f'<rect class="{style}" x="{frame.x_position(stack.places[i]) - width / 2:.1f}" y="{upper:.1f}" '
                    f'width="{width:.1f}" height="{max(lower - upper, 0.4):.1f}"/>'
                )
                below[i] += value
    # In the order in which the parts are seen, from the top down.
    key = [(style, style) for style in reversed(stack.styles)]
    return ReportChart(caption, _wrap_svg(drawn, alternative), alternative, key)


def draw_bars(caption: str, values: Sequence[tuple[str, float]], alternative: str, unit: str = "") -> ReportChart:
    """Draw up to a dozen named bars with their values above them."""
    # 12 % above the highest bar, as room for its value.
    frame = _ChartFrame((-0.5, len(values) - 0.5), (0.0, max(value for _, value in values) * 1.12), unit)
    drawn = frame.draw_axes("", [(place, name) for place, (name, _) in enumerate(values)])
    width = min(56.0, (WIDTH - LEFT - RIGHT) / len(values) * 0.6)
    for place, (_, value) in enumerate(values):
        x = frame.x_position(place)
        y = frame.y_position(value)
        drawn += (
            f'<rect class="train" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{frame.y_position(0) - y:.1f}"/><text x="{x:.1f}" y="{y - 5:.1f}" text-anchor="middle">'
            f"{escape(_format_tick(value))}{escape(unit)}</text>"
        )
    return ReportChart(caption, _wrap_svg(drawn, alternative), alternative)


def average_neighbours(values: Sequence[float], most: int = MAX_POINTS) -> list[float]:
    """Average consecutive values, so that at most `most` remain."""
    size = math.ceil(len(values) / most) or 1
    return [sum(group) / len(group) for i in range(0, len(values), size) for group in [values[i : i + size]]]


def _draw_curve(line: ChartLine, frame: _ChartFrame) -> str:
    xs = average_neighbours([x for x, _ in line.points])
    ys = average_neighbours([y for _, y in line.points])
    drawn = ""
    if line.low:
        # The band's outline: along the upper ends, and back along the lower ones.
        upper = frame.list_points(xs, average_neighbours(line.high))
        lower = frame.list_points(xs, average_neighbours(line.low))
        drawn = f'<polygon class="band {line.style}" points="{" ".join(upper + lower[::-1])}"/>'
    if len(xs) == 1:  # a polyline with one point is invisible
        return drawn + _draw_circle(line, frame.x_position(xs[0]), frame.y_position(ys[0]), radius=3)
    return drawn + f'<polyline class="curve {line.style}" points="{" ".join(frame.list_points(xs, ys))}"/>'


def _draw_dots(line: ChartLine, frame: _ChartFrame) -> str:
    drawn = ""
    for i, (value, y) in enumerate(line.points):
        x = frame.x_position(value)
        if line.low:
            ends = f'y1="{frame.y_position(line.low[i]):.1f}" y2="{frame.y_position(line.high[i]):.1f}"'
            drawn += f'<line class="curve {line.style}" x1="{x:.1f}" x2="{x:.1f}" {ends}/>'
        drawn += _draw_circle(line, x, frame.y_position(y), radius=4)
    return drawn


def _draw_circle(line: ChartLine, x: float, y: float, radius: int) -> str:
    return f'<circle class="{line.style}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>'


def _wrap_svg(drawn: str, alternative: str) -> str:
    # 4 more units for letters of the axis name that reach below its baseline at HEIGHT.
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 4}" role="img" aria-label="{escape(alternative)}">'
        f"<title>{escape(alternative)}</title>{drawn}</svg>"
    )


def _choose_step_ticks(first: float, last: float) -> list[tuple[float, str]]:
    """Return tick marks: the first and the last step, and round steps between them that do not overlap their labels."""
    room = (last - first) * 0.12  # about the width of a label
    between = [tick for tick in _choose_ticks(first, last) if first + room <= tick <= last - room and tick == int(tick)]
    return [(value, f"{value:.0f}") for value in dict.fromkeys([first, *between, last])]


def _choose_ticks(low: float, high: float) -> list[float]:
    """Return four to six round numbers within [low, high]."""
    rough = (high - low) / 4 or 1.0
    unit = 10 ** math.floor(math.log10(rough))
    size = min((factor * unit for factor in (1, 2, 2.5, 5, 10)), key=lambda size: abs(size - rough))
    # 1e-9 keeps ticks at the ends of the range that floating-point division would lose.
    return [round(n * size, 10) for n in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _format_tick(value: float) -> str:
    """Format a tick with few digits: 0.25, 12, 30k."""
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if abs(value) >= 1e4 else f"{value:.3g}"
