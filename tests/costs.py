"""Measures what the tests cost: wall time, CPU seconds of pytest and all its children, and the processes started.

`make test` ends with one line of it. `--costs FILE` writes a row per module as JSON. CPU seconds are comparable; wall
time depends on what else the machine does.

The CPU seconds of the living processes and of all children that these have waited for are summed, after each long phase
of a test. What they add to the last sum is charged. A process that nobody waits for, such as the engine of a killed
replica, takes its seconds out of the sum, so what it used after the last look is not charged. `time` of a shell lacks
all of its seconds.
"""

from __future__ import annotations

import json
import os
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
import pytest

LONG_S = 0.5
"""All processes are looked at after each phase of a test that took longer than this.

A process that ended before is not counted, but its CPU time is. A thread would see more processes. But it would hold
files of /proc open, and tests that count descriptors would fail.
"""
LOOKS = 3  # at the processes at most, until none ends meanwhile

KINDS = (
    ("engine", ("VLLM::EngineCore", "'vllm.v1.engine.core'")),  # second pattern: tests/engine_fork.py
    ("replica", ("specrl-generation", "specrl.generation")),
    ("trainer", ("specrl-trainer", "specrl.trainer", "tests.integration.trainer")),
    ("coordinator", ("specrl-coordinator", "specrl.coordinator")),
    ("store", ("redis-server", "valkey-server")),
)
"""Kinds of processes, by words of their command lines. The first match counts."""


@dataclass
class Cost:
    """Costs of one module. processes: number started, by kind."""

    tests: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    processes: dict[str, int] = field(default_factory=dict)


class Costs:
    """The pytest plugin that measures and reports costs."""

    def __init__(self, file: Path | None) -> None:
        self.modules: dict[str, Cost] = defaultdict(Cost)
        self._file = file
        self._module = ""
        self._seen: set[tuple[int, float]] = set()
        self._began_s = self._switched_s = time.monotonic()
        self._cpu_s = 0.0

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Charge what was spent since the last change of modules to the previous module."""
        module = nodeid.partition("::")[0]
        if module != self._module:
            self._charge()
            self._module = module
        self.modules[module].tests += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Charge what a long phase used."""
        if report.duration > LONG_S:
            self._charge()

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print one line, and write the file of `--costs`."""
        self._charge()
        wall_s = time.monotonic() - self._began_s
        cpu_s = sum(cost.cpu_s for cost in self.modules.values())
        load = os.getloadavg()[2]
        terminalreporter.write_line(
            f"{wall_s / 60:.1f} minutes of wall time, {cpu_s / 60:.1f} of CPU with all children, "
            f"load {load:.1f} on {os.cpu_count()} cores"
        )
        if self._file is not None:
            rows = {module: asdict(cost) for module, cost in sorted(self.modules.items())}
            passed = len(terminalreporter.stats.get("passed", []))
            content = {"wall_s": wall_s, "cpu_s": cpu_s, "load": load, "passed": passed, "modules": rows}
            self._file.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")

    def _charge(self) -> None:
        """Charge what was used since the last call to the present module."""
        cpu_s = self._measure()
        now_s = time.monotonic()
        cost = self.modules[self._module]
        cost.cpu_s += max(0.0, cpu_s - self._cpu_s)
        cost.wall_s += now_s - self._switched_s
        self._cpu_s = cpu_s
        self._switched_s = now_s

    def _measure(self) -> float:
        """Count new processes. Returns the CPU seconds of all living ones and of those that they waited for."""
        for _ in range(LOOKS):
            spent_s, is_complete = self._look()
            if is_complete:
                break
        return spent_s

    def _look(self) -> tuple[float, bool]:
        """Look at every process once. The sum is too small if one ends after its parent was looked at."""
        spent_s = 0.0
        is_complete = True
        for process in _tree():
            try:
                with process.oneshot():
                    times = process.cpu_times()
                    identity = (process.pid, process.create_time())
                    spent_s += times.user + times.system + times.children_user + times.children_system
                    if identity not in self._seen and process.pid != os.getpid():
                        self._seen.add(identity)
                        started = self.modules[self._module].processes
                        kind = _kind(process)
                        started[kind] = started.get(kind, 0) + 1
            except psutil.Error:
                is_complete = False
        return spent_s, is_complete


def _tree() -> Iterator[psutil.Process]:
    own = psutil.Process()
    yield own
    yield from own.children(recursive=True)


def _kind(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for kind, words in KINDS if any(word in line for word in words)), "other")
