"""The record of one run of the kit: one JSON file and one page of Markdown."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.runner import Outcome


def name_record(outcomes: Sequence[Outcome], date: str) -> str:
    """Name a record by card and date: `nvidia-h100-80gb-hbm3-2026-11-27`; `cpu-...` without a card."""
    cards = next((it.figures.get("cards") for it in outcomes if it.name == "versions"), None) or ["cpu"]
    return f"{re.sub(r'[^a-z0-9]+', '-', cards[0].lower()).strip('-')}-{date}"


def write_record(folder: Path, name: str, outcomes: Sequence[Outcome]) -> Path:
    """Write NAME.json and NAME.md. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"name": name, "parts": [asdict(outcome) for outcome in outcomes]}
    (folder / f"{name}.json").write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    page = folder / f"{name}.md"
    page.write_text(render_page(name, outcomes), encoding="utf-8")
    return page


def render_page(name: str, outcomes: Sequence[Outcome]) -> str:
    """Render a table of states, and one of the figures of each part."""
    lines = [f"# {name}", "", "| part | state | seconds | reason |", "|---|---|--:|---|"]
    lines += [f"| {it.name} | {it.state} | {it.seconds:.1f} | {_escape(it.reason)} |" for it in outcomes]
    for outcome in outcomes:
        if outcome.figures:
            lines += ["", f"## {outcome.name}", "", "| figure | value |", "|---|---|"]
            lines += [f"| {key} | {_escape(_format_value(value))} |" for key, value in outcome.figures.items()]
    return "\n".join(lines) + "\n"


def _format_value(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
