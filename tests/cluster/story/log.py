"""The record of runs on the cluster: what happened when, under which load. `docs/cluster-log.md` is one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.cluster.story.freshness import HASH_LINE

PROGRESS_S = 10.0
POLL_S = 0.5
FULL = bool(os.environ.get("SPECRL_CLUSTER_FULL"))
"""Whether the example runs unchanged and all faults are tried: `make test-cluster FULL=1`."""
FILE = os.environ.get("SPECRL_CLUSTER_LOG")
"""Where the record is written; None: nowhere."""


@dataclass(frozen=True)
class Product:
    """The images that ran. commit: of their sources. sources: hash of the tree that the chart is from."""

    commit: str
    digests: Mapping[str, str]
    sources: str


class StoryLog:
    """Collects lines. Each has the seconds since the start and the machine's load."""

    def __init__(self, say: Callable[[str], None]) -> None:
        """say: shows a line at once."""
        self.lines: list[str] = []
        self.product: Product | None = None
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

    def write(self, file: Path, assertions: Sequence[str]) -> None:
        """Write the record as a page. assertions: names of the tests that passed."""
        assert self.product is not None
        what = "the local example unchanged, with 24 steps" if FULL else "the local example with four steps"
        page = [
            "# A run on the cluster tier",
            "",
            f"This page was written by a run of {what}, and of faults, from the images, on a real",
            "kubelet ([cluster tier](cluster-tier.md)). Another run overwrites it:",
            "",
            "    make images ENGINES=cpu",
            "    make test-cluster FULL=1",
            "",
            f"It began at {self._date:%Y-%m-%d %H:%M} UTC, with images of commit `{self.product.commit}`, on"
            f" {os.cpu_count()} cores",
            "that other work shared. Nothing that the images are made of differed from that commit.",
            "",
            HASH_LINE.format(hash=self.product.sources),
            "",
            "A test fails when the tree has another hash. Then run it again, or add a line here, with the new hash as",
            "`python -m tests.cluster.story.freshness` prints it, and why a run would tell the same:",
            "",
            "    - waived: `HASH`: REASON",
            "",
            "## Images",
            "",
            *(f"- {role}: `{digest}`" for role, digest in self.product.digests.items()),
            "",
            "## What was asserted",
            "",
            *(f"- {name.removeprefix('test_').replace('_', ' ')}" for name in assertions),
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
