"""Charts as inline SVG: lines with bands, dots with whiskers, stacked bars, bars. Pure.

No plotting library: these four shapes are all that a report has, matplotlib would add 60 MB to the control plane, and
what JavaScript draws cannot be printed or read aloud. Colours are classes of the page's style sheet, so that one
drawing serves light, dark and paper; they differ in lightness, for readers who do not tell hues apart.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 480, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 12, 30
MOST_POINTS = 240
"""Two pixels each: more steps than this are drawn as means of neighbours."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Line:
    """style: a class of the style sheet. low, high: ends of each point's interval, as long as `points` or empty."""

    name: str
    style: str
    points: Sequence[Point]
    low: Sequence[float] = ()
    high: Sequence[float] = ()
    is_dotted: bool = False
    """Single measurements with whiskers rather than a curve with a band."""


@dataclass(frozen=True)
class Stack:
    """Bars of several parts. values: by part, then by bar."""

    names: Sequence[str]
    styles: Sequence[str]
    places: Sequence[float]
    values: Sequence[Sequence[float]]


class _Frame:
    """Axes, and where a point lies."""

    def __init__(self, x: Point, y: Point, unit: str) -> None:
        self._x, self._y = x, (y[0], y[1] if y[1] > y[0] else y[0] + 1)
        self.unit = unit

    def x(self, value: float) -> float:
        low, high = self._x
        return LEFT + (value - low) / ((high - low) or 1) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return HEIGHT - BOTTOM - (value - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    def axes(self, x_name: str, x_ticks: Sequence[tuple[float, str]]) -> str:
        low, high = self._y
        parts = []
        for value in _ticks(low, high):
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            text = f"{_short(value)}{self.unit}"
            parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{escape(text)}</text>')
        for value, text in x_ticks:
            parts.append(f'<text x="{self.x(value):.1f}" y="{HEIGHT - 12}" text-anchor="middle">{escape(text)}</text>')
        parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT}" text-anchor="end" class="axis">{escape(x_name)}</text>')
        return "".join(parts)


def lines(series: Sequence[Line], alternative: str, unit: str = "", top: float | None = None) -> str:
    """Curves over steps, or single versions over policy versions; from 0 up. top: end of the scale, if known.

    Without any point the axes alone are drawn.
    """
    xs = [x for line in series for x, _ in line.points] or [0.0]
    ys = [y for line in series for y in (*(y for _, y in line.points), *line.low, *line.high)]
    frame = _Frame((min(xs), max(xs)), (min([0.0, *ys]), top or max([0.0, *ys])), unit)
    is_dotted = any(line.is_dotted for line in series)
    drawn = frame.axes("policy version" if is_dotted else "step", _steps(min(xs), max(xs)))
    for line in series:
        drawn += _dots(line, frame) if line.is_dotted else _curve(line, frame)
    return _svg(drawn, alternative)


def stacked(stack: Stack, alternative: str, unit: str = "") -> str:
    """One bar a step, its parts from below in their order. At least one."""
    count = len(stack.places)
    totals = [sum(part[i] for part in stack.values) for i in range(count)]
    step = (stack.places[-1] - stack.places[0]) / (count - 1) if count > 1 else 1.0
    frame = _Frame((stack.places[0] - step / 2, stack.places[-1] + step / 2), (0.0, max(totals)), unit)
    drawn = frame.axes("step", _steps(stack.places[0], stack.places[-1]))
    width = max(0.8, (WIDTH - LEFT - RIGHT) / count * 0.82)
    below = [0.0] * count
    for style, values in zip(stack.styles, stack.values, strict=True):
        for i, value in enumerate(values):
            if value > 0:
                upper, lower = frame.y(below[i] + value), frame.y(below[i])
                drawn += (
                    f'<rect class="{style}" x="{frame.x(stack.places[i]) - width / 2:.1f}" y="{upper:.1f}" '
                    f'width="{width:.1f}" height="{max(lower - upper, 0.4):.1f}"/>'
                )
                below[i] += value
    return _svg(drawn, alternative)


def bars(values: Sequence[tuple[str, float]], alternative: str, unit: str = "") -> str:
    """Named bars, at most a dozen, with their values above them."""
    frame = _Frame((-0.5, len(values) - 0.5), (0.0, max(value for _, value in values) * 1.12), unit)
    drawn = frame.axes("", [(place, name) for place, (name, _) in enumerate(values)])
    width = min(56.0, (WIDTH - LEFT - RIGHT) / len(values) * 0.6)
    for place, (_, value) in enumerate(values):
        x, y = frame.x(place), frame.y(value)
        drawn += (
            f'<rect class="train" x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" '
            f'height="{frame.y(0) - y:.1f}"/><text x="{x:.1f}" y="{y - 5:.1f}" text-anchor="middle">'
            f"{escape(_short(value))}{escape(unit)}</text>"
        )
    return _svg(drawn, alternative)


def thinned(values: Sequence[float], most: int = MOST_POINTS) -> list[float]:
    """Means of neighbours, at most `most` of them."""
    size = math.ceil(len(values) / most) or 1
    return [sum(group) / len(group) for i in range(0, len(values), size) for group in [values[i : i + size]]]


def _curve(line: Line, frame: _Frame) -> str:
    xs, ys = thinned([x for x, _ in line.points]), thinned([y for _, y in line.points])
    drawn = ""
    if line.low:
        upper = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, thinned(line.high), strict=True)]
        lower = [f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, thinned(line.low), strict=True)]
        drawn = f'<polygon class="band {line.style}" points="{" ".join(upper + lower[::-1])}"/>'
    if len(xs) == 1:
        return drawn + f'<circle class="{line.style}" cx="{frame.x(xs[0]):.1f}" cy="{frame.y(ys[0]):.1f}" r="3"/>'
    points = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in zip(xs, ys, strict=True))
    return drawn + f'<polyline class="curve {line.style}" points="{points}"/>'


def _dots(line: Line, frame: _Frame) -> str:
    drawn = ""
    for i, (x, y) in enumerate(line.points):
        if line.low:
            ends = f'y1="{frame.y(line.low[i]):.1f}" y2="{frame.y(line.high[i]):.1f}"'
            drawn += f'<line class="curve {line.style}" x1="{frame.x(x):.1f}" x2="{frame.x(x):.1f}" {ends}/>'
        drawn += f'<circle class="{line.style}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="4"/>'
    return drawn


def _svg(drawn: str, alternative: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT + 4}" role="img" aria-label="{escape(alternative)}">'
        f"<title>{escape(alternative)}</title>{drawn}</svg>"
    )


def _steps(first: float, last: float) -> list[tuple[float, str]]:
    """First and last step, and round ones between that do not touch them."""
    room = (last - first) * 0.12
    between = [tick for tick in _ticks(first, last) if first + room <= tick <= last - room and tick == int(tick)]
    return [(value, f"{value:.0f}") for value in dict.fromkeys([first, *between, last])]


def _ticks(low: float, high: float) -> list[float]:
    """Four to six round numbers of [low, high]."""
    rough = (high - low) / 4 or 1.0
    unit = 10 ** math.floor(math.log10(rough))
    size = min((factor * unit for factor in (1, 2, 2.5, 5, 10)), key=lambda size: abs(size - rough))
    return [round(n * size, 10) for n in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _short(value: float) -> str:
    """As few digits as tell it: 0.25, 12, 3k."""
    for size, letter in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):g}{letter}"
    return f"{value:.3g}"
