"""Figures as SVG text: heatmaps with a number in every cell, and a timeline of a run. No library, no script."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from specrl.simulator.pipeline import STAGES, Trace

CELL = (64, 26)
LEFT, TOP = 130, 58
TITLE = (14, "#222")
COLOURS = {"data": "#9aa0a6", "prepare": "#f2a900", "generation": "#c5221f", "logprob": "#7baaf7", "train": "#1a56b0"}


@dataclass(frozen=True)
class Heatmap:
    """Values by row, then column; None is drawn empty. axes: what columns and rows are."""

    title: str
    axes: tuple[str, str]
    columns: Sequence[str]
    rows: Sequence[str]
    values: Sequence[Sequence[float | None]]


def heatmap(of: Heatmap) -> str:
    """More is darker."""
    axes, columns, rows, values = of.axes, of.columns, of.rows, of.values
    known = [value for row in values for value in row if value is not None]
    low, high = min(known, default=0.0), max(known, default=1.0)
    width, height = LEFT + CELL[0] * len(columns) + 20, TOP + CELL[1] * len(rows) + 16
    parts = [
        _text(10, 20, of.title, look=TITLE),
        _text(LEFT + CELL[0] * len(columns) / 2, 38, axes[0], "middle"),
    ]
    parts += [_text(LEFT + CELL[0] * (place + 0.5), 52, name, "middle") for place, name in enumerate(columns)]
    parts.append(_text(10, 52, axes[1], "start"))
    for line, (name, row) in enumerate(zip(rows, values, strict=True)):
        y = TOP + CELL[1] * line
        parts.append(_text(LEFT - 8, y + 17, name, "end"))
        for place, value in enumerate(row):
            x = LEFT + CELL[0] * place
            share = 0.0 if value is None or high == low else (value - low) / (high - low)
            red, green, blue = (round(a + share * (b - a)) for a, b in ((247, 8), (251, 81), (255, 156)))
            fill = "none" if value is None else f"rgb({red},{green},{blue})"
            parts.append(f'<rect x="{x}" y="{y}" width="{CELL[0]}" height="{CELL[1]}" fill="{fill}" stroke="#fff"/>')
            if value is not None:
                colour = "#fff" if share > 0.55 else "#222"
                parts.append(_text(x + CELL[0] / 2, y + 17, f"{value:.3g}", "middle", (11, colour)))
    return _svg(width, height, parts)


def timeline(trace: Trace, replicas: int, last_steps: int = 4) -> str:
    """The trainer's stages, and below them the live rollouts of all replicas, over the last steps of a run."""
    steps = trace.steps[-last_steps:]
    begin, end = steps[0].began_s, steps[-1].began_s + steps[-1].seconds
    width, scale = 900, 860 / max(1e-9, end - begin)
    parts = [_text(10, 18, f"Trainer, {end - begin:.3g} s, and live rollouts of {replicas} replicas", look=TITLE)]
    for step in steps:
        x = 20 + (step.began_s - begin) * scale
        for stage in ("generation", "data", "logprob", "train", "prepare"):
            wide = step.stages[stage] * scale
            title = f"<title>step {step.step}, {stage}: {step.stages[stage]:.3g} s</title>"
            parts.append(
                f'<rect x="{x:.1f}" y="30" width="{wide:.1f}" height="24" fill="{COLOURS[stage]}">{title}</rect>'
            )
            x += wide
    for place, stage in enumerate(STAGES):
        parts.append(f'<rect x="{20 + 120 * place}" y="148" width="12" height="12" fill="{COLOURS[stage]}"/>')
        label = "generation, exposed" if stage == "generation" else stage
        parts.append(_text(36 + 120 * place, 158, label, "start"))
    parts.append(_live(trace, begin, end, scale))
    return _svg(width, 168, parts)


def _live(trace: Trace, begin: float, end: float, scale: float) -> str:
    """The sum of live rollouts as a line, 70 high."""
    live: dict[int, int] = {}
    points: list[tuple[float, int]] = []
    for second, replica, count in trace.live:
        live[replica] = count
        if begin <= second <= end:
            points.append((second, sum(live.values())))
    most = max((count for _, count in points), default=1) or 1
    every = max(1, len(points) // 800)
    path = " ".join(
        f"{20 + (second - begin) * scale:.1f},{136 - 70 * count / most:.1f}" for second, count in points[::every]
    )
    line = f'<polyline points="{path}" fill="none" stroke="#188038"/>'
    return line + _text(880, 72, f"at most {most} live", "end")


def _text(x: float, y: float, text: str, anchor: str = "start", look: tuple[int, str] = (11, "#222")) -> str:
    style = f'font-family="sans-serif" font-size="{look[0]}" fill="{look[1]}" text-anchor="{anchor}"'
    return f'<text x="{x:.1f}" y="{y:.1f}" {style}>{escape(text)}</text>'


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    view = f'viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}"'
    ground = '<rect width="100%" height="100%" fill="#fff"/>'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {view}>{ground}{"".join(parts)}</svg>'
