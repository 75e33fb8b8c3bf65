"""Measures a run from the command to the end of its first step, by part.

    python -m benchmarks.start_up --policy runs/demo-policy
    python -m benchmarks.start_up --policy runs/demo-policy --other ../before --runs 5

Each run is `specrl run` on the demo's run file with one step, without validation, with one replica and one trainer
rank. The runs of a second checkout (`--other`) alternate with ours, so that other load affects both alike.

A part is the time between two moments: the start of a process, a log event, or the line in `metrics.jsonl` that ends
the step. Coordinator, trainer and replica start side by side, so their parts overlap.

Printed: wall seconds of each part, and CPU seconds of each process until the end of the step: medians and ranges.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from statistics import median

import psutil
from rich.console import Console
from rich.table import Table

from specrl.spec.yaml_input import quote_yaml

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.05
LIMIT_S = 300.0

PARTS = (
    ("launcher: command to first process", "command", "coordinator"),
    ("trainer: start to its registration", "trainer", "trainer registered"),
    ("replica: start to the engine core's process", "replica", "engine core"),
    ("replica: start to a running engine", "replica", "gen-0 engine_started"),
    ("replica: registration", "gen-0 engine_started", "gen-0 registered"),
    ("rendezvous", "gen-0 registered", "coordinator weight_group_formed"),
    ("first version", "coordinator weight_group_formed", "gen-0 weights_loaded"),
    ("canary", "gen-0 weights_loaded", "coordinator canary_agreed"),
    ("first step", "coordinator canary_agreed", "step"),
    ("all: command to the end of the first step", "command", "step"),
)
"""Name, first moment, last moment. "PROCESS EVENT" is an event in a log, another name the start of a process."""

PROGRAMS = ("coordinator", "trainer", "replica")
_OF_COMMAND_LINES = {"coordinator": "coordinator", "trainer": "trainer", "replica": "generation"}
FIELDS = {
    "name": "start",
    "prompts.maxTokens": 64,  # for other tokenizers than the demo's
    "generation.replicas": 1,
    "generation.speculation": "{none: {}}",
    "trainer.parallelism.data": 1,
    "schedule.steps": 1,
    "schedule.maxPolicyLag": 0,
    "schedule.promptsPerStep": 4,
    "schedule.groupSize": 4,
    "validation": "null",
}


@dataclass(frozen=True)
class Start:
    """One run. moments: seconds after the command. cpu_s: CPU seconds until the end of the step, by process."""

    moments: Mapping[str, float]
    cpu_s: Mapping[str, float]

    def part_s(self, first: str, last: str) -> float | None:
        """Return the length of a part, or None if the run did not have it."""
        if first not in self.moments or last not in self.moments:
            return None
        return self.moments[last] - self.moments[first]


def measure_start(tree: Path, policy: Path, overrides: Sequence[str]) -> Start:
    """Run a first step with the sources of `tree`. Raises SystemExit if the run fails."""
    settings = [f"{key}={value}" for key, value in ({"model.path": quote_yaml(policy)} | FIELDS).items()]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "specrl.cli", "run", str(tree / "examples" / "demo" / "run.yaml"), "--plain"]
        command += ["--runs", folder]
        command += [word for setting in (*settings, *overrides) for word in ("--set", setting)]
        began = time.time()
        with subprocess.Popen(
            command,
            env=os.environ | {"PYTHONPATH": str(tree / "services")},
            cwd=tree,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        ) as launcher:
            follower = _Follower(psutil.Process(launcher.pid), Path(folder) / "start-1")
            while launcher.poll() is None and not follower.note_processes():
                if time.time() - began > LIMIT_S:
                    launcher.kill()
                time.sleep(POLL_S)
            said, _ = launcher.communicate()
        if launcher.returncode:
            raise SystemExit(f"the run failed with exit code {launcher.returncode}:\n{said[-3000:]}")
        moments = {"command": began} | follower.starts | read_events(Path(folder) / "start-1" / "logs")
        return Start({name: at - began for name, at in moments.items()}, follower.cpu_s)


class _Follower:
    """Looks at the processes of a launcher. starts: Unix times; cpu_s: by process."""

    def __init__(self, launcher: psutil.Process, directory: Path) -> None:
        self._launcher = launcher
        self._metrics = directory / "metrics.jsonl"
        self.starts: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}

    def note_processes(self) -> bool:
        """Note processes and CPU times. Returns whether the step has ended."""
        is_over = self._metrics.exists() and self._metrics.stat().st_size > 0
        if is_over:
            self.starts["step"] = self._metrics.stat().st_mtime
        try:
            found = {"launcher": self._launcher}
            for child in self._launcher.children():
                words = " ".join(child.cmdline()[:4])
                for name in PROGRAMS:
                    if _OF_COMMAND_LINES[name] in words:
                        found[name] = child
                        self.starts.setdefault(name, child.create_time())
            if "replica" in found:
                for core in found["replica"].children():
                    if "tracker" not in " ".join(core.cmdline()):
                        self.starts.setdefault("engine core", core.create_time())
                        found["engine core"] = core
            for name, process in found.items():
                deep = name in ("coordinator", "trainer")
                each = [process, *(process.children(recursive=True) if deep else ())]
                self.cpu_s[name] = sum(sum(one.cpu_times()[:2]) for one in each)
        except psutil.Error:
            pass  # a process ended meanwhile
        return is_over


def read_events(logs: Path) -> dict[str, float]:
    """Return the Unix time of the first line of each event in each process's log, as "PROCESS EVENT"."""
    found: dict[str, float] = {}
    for file in logs.glob("*.log"):
        for line in file.read_text(encoding="utf-8").splitlines():
            if line.startswith("{"):
                fields = json.loads(line)
                at = datetime.fromisoformat(fields["timestamp"]).timestamp()
                found.setdefault(f"{file.stem} {fields['event']}", at)
    return found


def format_starts(found: Mapping[str, Sequence[Start]]) -> Table:
    """Make a table of parts and CPU seconds. found: the runs of each checkout."""
    table = Table("seconds", *found)
    for name, first, last in PARTS:
        table.add_row(name, *(_format_spread([run.part_s(first, last) for run in runs]) for runs in found.values()))
    for name in ("launcher", *PROGRAMS, "engine core"):
        spreads = [_format_spread([run.cpu_s.get(name) for run in runs]) for runs in found.values()]
        table.add_row(f"CPU: {name}", *spreads)
    table.add_row("CPU: all", *(_format_spread([sum(run.cpu_s.values()) for run in runs]) for runs in found.values()))
    return table


def _format_spread(values: Sequence[float | None]) -> str:
    present = [value for value in values if value is not None]
    if not present:
        return "none"
    return f"{median(present):.1f} ({min(present):.1f}-{max(present):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="model folder of the policy")
    parser.add_argument("--other", type=Path, help="another checkout, measured in turns with this one")
    parser.add_argument("--runs", type=int, default=3, help="runs of each checkout that count")
    parser.add_argument("--set", action="append", default=[], metavar="PATH=VALUE", help="fields of the run file")
    arguments = parser.parse_args()
    trees = {"this": ROOT} | ({"other": arguments.other.resolve()} if arguments.other else {})
    console = Console()
    found: dict[str, list[Start]] = {name: [] for name in trees}
    for number in range(arguments.runs + 1):
        for name, tree in trees.items():
            start = measure_start(tree, arguments.policy.resolve(), arguments.set)
            console.print(f"{name}: {start.part_s('command', 'step'):.1f} s" + ("" if number else ", not counted"))
            if number:
                found[name].append(start)
    console.print(format_starts(found))


if __name__ == "__main__":
    main()
