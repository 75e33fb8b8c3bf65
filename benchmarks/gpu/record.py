"""The record of one run of the kit: one JSON file and one page of Markdown.

The kernels that passed on GPUs also go into a file of the package, which `trainer.kernels: Auto` reads
(docs/decisions/0060).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.gpu.runner import Outcome

KERNEL_RECORDS = (
    Path(__file__).parents[2] / "services" / "specrl" / "trainer" / "megatron_backend" / "kernels" / "records.json"
)


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


def list_passed_kernels(folder: Path) -> list[dict[str, str]]:
    """List what the records of a folder say of fast kernels: those that passed, by card and version of torch.

    Of records of the same kernel, card and version, the newest counts.
    """
    newest = {}
    for file in sorted(folder.glob("*.json"), key=lambda it: it.stem[-len("2026-11-27") :]):
        for part in json.loads(file.read_text(encoding="utf-8"))["parts"]:
            if "kernelDevice" in part["figures"]:
                place = {"device": part["figures"]["kernelDevice"], "torch": part["figures"]["kernelTorch"]}
                found = {"kernel": part["name"], **place, "record": file.stem}
                newest[part["name"], *place.values()] = found if part["state"] == "ok" else None
    return [found for _, found in sorted(newest.items()) if found]


def write_passed_kernels(folder: Path, target: Path = KERNEL_RECORDS) -> None:
    """Write the package's file of fast kernels from the records of a folder."""
    target.write_text(json.dumps({"passed": list_passed_kernels(folder)}, indent=1) + "\n", encoding="utf-8")


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
