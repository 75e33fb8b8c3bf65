"""The record of a run on the cluster: what happened when, under which load. `docs/cluster-log.md` is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

PROGRESS_S = 10.0
POLL_S = 0.5


class StoryLog:
    """Collects lines. Each has the seconds since the start and the machine's load."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: shows a line at once."""
        self.lines: list[str] = []
        self._say = say
        self._began = time.monotonic()
        self._date = datetime.now(UTC)

    def add(self, event: str) -> None:
        """Record an event, and show it."""
        self.lines.append(self._stamp(event))
        self._say(self.lines[-1])

    def wait_until(self, claim: Callable[[], Any], event: str, timeout_s: float, state: Callable[[], str]) -> Any:
        """Poll until `claim` returns something true, record the event, and return that. Shows the state meanwhile."""
        deadline = time.monotonic() + timeout_s
        told = time.monotonic()
        while not (found := claim()):
            assert time.monotonic() < deadline, f"not within {timeout_s:.0f} s: {event}\n{state()}"
            if time.monotonic() > told + PROGRESS_S:
                told = time.monotonic()
                self._say(self._stamp(f"  {state()}"))
            time.sleep(POLL_S)
        self.add(event)
        return found

    def write(self, file: Path, commit: str, digests: Mapping[str, str], assertions: Sequence[str]) -> None:
        """Write the record as a page.

        commit, digests: of the images. assertions: names of the tests that passed.
        """
        images = [f"- {role}: `{digest}`" for role, digest in digests.items()]
        tests = [f"- {name.removeprefix('test_').replace('_', ' ')}" for name in assertions]
        page = [
            "# A run on the cluster tier",
            "",
            "`tests/cluster/test_story.py` has written this page: the local example with four steps, from the images,",
            "on a real kubelet ([cluster tier](cluster-tier.md)). Another run overwrites it:",
            "",
            '    SPECRL_CLUSTER_LOG=docs/cluster-log.md make test-cluster ARGS="-k story"',
            "",
            f"It began at {self._date:%Y-%m-%d %H:%M} UTC, with images of commit `{commit}`, on {os.cpu_count()} cores",
            "that other work shared.",
            "",
            "## Images",
            "",
            *images,
            "",
            "## What was asserted",
            "",
            *tests,
            "",
            "## What happened",
            "",
            "Seconds since the start, load of the machine, event:",
            "",
            *(f"    {line}" for line in self.lines),
            "",
        ]
        file.write_text("\n".join(page), encoding="utf-8")

    def _stamp(self, event: str) -> str:
        return f"{time.monotonic() - self._began:5.0f} s  {os.getloadavg()[0]:5.1f}  {event}"
