"""Keeps the finished runs of benchmarks/paper_table.py in a file that another machine can go on with."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from benchmarks.paper_rows import Configuration, Steps, Workload

from specrl.formats.reports import StepReport


@dataclass(frozen=True)
class Task:
    """One run. number: its round."""

    number: int
    workload: Workload
    configuration: Configuration


class KeptRuns:
    """Finished runs in a JSON Lines file, by workload, row and round. A run of other settings is another run.

    Without a file, nothing is kept here; the runs' folders are, below --out.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._runs: dict[tuple[str, str, int, str], Steps] = {}
        if file is not None and file.exists():
            for line in read_whole_lines(file):
                kept = json.loads(line)
                reports = [StepReport.model_validate(report) for report in kept["steps"]]
                key = (kept["workload"], kept["row"], kept["round"], kept["settings"])
                self._runs[key] = {(kept["round"], report.step): report for report in reports}

    def find_steps(self, task: Task, settings: str) -> Steps | None:
        return self._runs.get((task.workload.name, task.configuration.name, task.number, settings))

    def keep_steps(self, task: Task, settings: str, steps: Steps) -> None:
        """Append a run at once, since the next one may be interrupted."""
        if self._file is None:
            return
        content = {
            "workload": task.workload.name,
            "row": task.configuration.name,
            "round": task.number,
            "settings": settings,
            "steps": [
                report.model_dump(mode="json", by_alias=True, exclude_defaults=True) for report in steps.values()
            ],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab", buffering=0) as file:  # so that a line is one write
            file.write(json.dumps(content).encode() + b"\n")
            os.fsync(file.fileno())


def read_whole_lines(file: Path) -> list[bytes]:
    """Return a file's lines. A last one that a kill cut off is removed, since the next would continue it."""
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(file, len(whole))
    return whole.splitlines()


def digest_settings(fields: Mapping[str, str], out: Path) -> str:
    """Return a digest of a run's fields that does not depend on where --out is."""
    text = json.dumps(sorted(fields.items())).replace(str(out), "OUT")
    return hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
