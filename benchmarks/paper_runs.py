"""Keeps the finished runs of benchmarks/paper_table.py in a file that another machine can go on with.

A run is known by its workload, row, round and settings. The settings are the whole run file, with the content of
policy, drafter and data in place of their paths. So folders may move, and another drafter or an edited run file makes
another run. The code is not part of it, but each line has the commit, the versions and the machine of its run.

A row is compared with its reference only in runs of one start: one boot of one machine, with one commit and the same
versions. A round that goes on elsewhere, or after an update, needs its reference again. Different rounds may be of
different starts.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from benchmarks.demo_runs import identify
from benchmarks.paper_rows import CONFIGURATIONS, Configuration, Steps, Workload

from specrl.coordinator.observe.origin import collect_origin
from specrl.files import SMALL_BYTES, read_text
from specrl.formats.reports import StepReport

BOOT_FILE = Path("/proc/sys/kernel/random/boot_id")
RunKey = tuple[str, str, int, str]
"""Workload, row, round and settings of a run."""


@dataclass(frozen=True)
class Task:
    """One run. number: its round."""

    number: int
    workload: Workload
    configuration: Configuration

    @property
    def reference(self) -> Task:
        """The run that this one is compared with; itself if nothing else is."""
        name = self.configuration.reference
        return Task(self.number, self.workload, next(it for it in CONFIGURATIONS if it.name == name))

    def make_key(self, settings: str) -> RunKey:
        return (self.workload.name, self.configuration.name, self.number, settings)


def describe_start() -> dict[str, str]:
    """Describe the versions and the machine of the runs that are made now. Equal descriptions are of one start."""
    found = collect_origin()
    # A line that is added to the file of kept runs is a change of the checkout, too.
    return found | {
        "specrl": found["specrl"].replace(", modified", ""),
        "boot": read_text(BOOT_FILE, SMALL_BYTES).strip(),
    }


class KeptRuns:
    """Finished runs in a JSON Lines file. start: what `describe_start` returned."""

    def __init__(self, file: Path, start: dict[str, str]) -> None:
        self._file = file
        self._start = start
        self.start = identify(start)
        self._runs = defaultdict[RunKey, dict[str, Steps]](dict)
        if file.exists():
            for line in read_whole_lines(file):
                kept = json.loads(line)
                if "start" not in kept:
                    continue  # of an older version, which did not keep where a run was made
                key = (kept["workload"], kept["row"], kept["round"], kept["settings"])
                start_of_run = identify(kept["start"])
                reports = [StepReport.model_validate(report) for report in kept["steps"]]
                self._runs[key][start_of_run] = {(start_of_run, kept["round"], it.step): it for it in reports}

    def has_run(self, key: RunKey) -> bool:
        """Whether this start has made a run."""
        return self.start in self._runs[key]

    def find_pair(self, own: RunKey, reference: RunKey) -> tuple[Steps, Steps] | None:
        """Return the steps of a run and of its reference that one start has made; None if no start has made both."""
        starts = self._runs[own].keys() & self._runs[reference].keys()
        if not starts:
            return None
        start = self.start if self.start in starts else min(starts)
        return self._runs[own][start], self._runs[reference][start]

    def keep_steps(self, key: RunKey, steps: Steps) -> None:
        """Append a run of this start at once, since the next one may be interrupted."""
        workload, row, number, settings = key
        content = {
            "workload": workload,
            "row": row,
            "round": number,
            "settings": settings,
            "start": self._start,
            "steps": [
                report.model_dump(mode="json", by_alias=True, exclude_defaults=True) for report in steps.values()
            ],
        }
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("ab", buffering=0) as file:  # so that a line is one write
            file.write(json.dumps(content).encode() + b"\n")
            os.fsync(file.fileno())
        self._runs[key][self.start] = steps


def read_whole_lines(file: Path) -> list[bytes]:
    """Return a file's lines. A last one that a kill cut off is removed, since the next would continue it."""
    content = file.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if whole != content:
        os.truncate(file, len(whole))
    return whole.splitlines()
