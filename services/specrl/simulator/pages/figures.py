"""Draws figures as SVG text: heatmaps with a number in every cell, and a timeline of a run.

Uses no library, and no script in the SVG, so that a page is one self-contained file. Called by `specrl simulate --out`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specrl.simulator.pipeline import PHASES, SimulationTrace

# Pixels: width and height of a cell, and the margins for row names and for title with column names.
CELL = (64, 26)
LEFT = 130
TOP = 58

TITLE = (14, "#222")  # font size and color
COLOURS = {"data": "#9aa0a6", "prepare": "#f2a900", "generation": "#c5221f", "logprob": "#7baaf7", "train": "#1a56b0"}


@dataclass(frozen=True)
class Heatmap:
    """Values by row, then column; a None is drawn as an empty cell. axes: titles of the columns and of the rows."""

    title: str
    axes: tuple[str, str]
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


def draw_heatmap(of: Heatmap) -> str:
    """Draw a heatmap. Larger values are darker."""
    known = [value for row in of.values for value in row if value is not None]
    low = min(known, default=0.0)
    high = max(known, default=1.0)
    width = LEFT + CELL[0] * len(of.columns) + 20
    height = TOP + CELL[1] * len(of.rows) + 16
    parts = [
        _svg_text(10, 20, of.title, look=TITLE),
        _svg_text(LEFT + CELL[0] * len(of.columns) / 2, 38, of.axes[0], "middle"),
        *(_svg_text(LEFT + CELL[0] * (place + 0.5), 52, name, "middle") for place, name in enumerate(of.columns)),
        _svg_text(10, 52, of.axes[1]),
    ]
    for line, (name, row) in enumerate(zip(of.rows, of.values, strict=True)):
        y = TOP + CELL[1] * line
        parts.append(_svg_text(LEFT - 8, y + 17, name, "end"))
        for place, value in enumerate(row):
            x = LEFT + CELL[0] * place
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            # From almost white to dark blue.
            red, green, blue = (round(a + share * (b - a)) for a, b in ((247, 8), (251, 81), (255, 156)))
            fill = "none" if value is None else f"rgb({red},{green},{blue})"
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL[0]}" height="{CELL[1]}" fill="{fill}" stroke="#fff"/>')
            if value is not None:
                colour = "#fff" if share > 0.55 else "#222"  # readable on its background
                parts.append(_svg_text(x + CELL[0] / 2, y + 17, f"{value:.3g}", "middle", (11, colour)))
    return _svg_document(width, height, parts)


def draw_timeline(trace: SimulationTrace, replicas: int, last_steps: int = 4) -> str:
    """Draw the trainer's phases and, below them, the live rollouts of all replicas over the last steps of a run."""
    steps = trace.steps[-last_steps:]
    begin = steps[0].began_s
    end = steps[-1].began_s + steps[-1].wall_s
    width = 900
    scale = 860 / max(1e-9, end - begin)
    parts = [_svg_text(10, 18, f"Trainer, {end - begin:.3g} s, and live rollouts of {replicas} replicas", look=TITLE)]
    for step in steps:
        x = 20 + (step.began_s - begin) * scale
        for phase in ("generation", "data", "logprob", "train", "prepare"):
            wide = step.phases[phase] * scale
            title = f"<title>step {step.step}, {phase}: {step.phases[phase]:.3g} s</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="30" width="{wide:.1f}" height="24" fill="{COLOURS[phase]}">{title}</rect>'
            )
            x += wide
    for place, phase in enumerate(PHASES):
        parts.append(f'<rect x="{20 + 120 * place}" y="148" width="12" height="12" fill="{COLOURS[phase]}"/>')
        label = "generation, exposed" if phase == "generation" else phase
        parts.append(_svg_text(36 + 120 * place, 158, label, "start"))
    parts.append(_draw_live_rollouts(trace, begin, end, scale))
    return _svg_document(width, 168, parts)


def _draw_live_rollouts(trace: SimulationTrace, begin: float, end: float, scale: float) -> str:
    """Draw the sum of live rollouts as a line, 70 pixels high."""
    live: dict[int, int] = {}
    points: list[tuple[float, int]] = []
    for second, replica, count in trace.live:
        live[replica] = count
        if begin <= second <= end:
            points.append((second, sum(live.values())))
    most = max((count for _, count in points), default=1) or 1
    every = max(1, len(points) // 800)  # about one point per pixel of width is enough
    path = " ".join(
        f"{20 + (second - begin) * scale:.1f},{136 - 70 * count / most:.1f}" for second, count in points[::every]
    )
    line = f'<polyline points="{path}" fill="none" stroke="#188038"/>'
    return line + _svg_text(880, 72, f"at most {most} live rollouts", "end")


def _svg_text(x: float, y: float, text: str, anchor: str = "start", look: tuple[int, str] = (11, "#222")) -> str:
    style = f'font-family="sans-serif" font-size="{look[0]}" fill="{look[1]}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _svg_document(width: float, height: float, parts: Sequence[str]) -> str:
    view = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{ground}{"".join(parts)}</svg>'
