"""Measures the cost of metrics, spans, traces and an open live page, as a share of a step's time.

    python -m benchmarks.telemetry_overhead --run runs/demo-1     # a finished run of this machine, for example the demo

The real coordinator (loop, scheduler, registry, store, observer) runs in its own process. It talks gRPC over loopback
to replicas and a trainer that compute nothing (`scale_peers.py`), with as many replicas, prompts and rollouts per step,
and as long rollouts, as RUN. Blocks of steps at four levels take turns. Each level includes those before it:

    off       metrics are replaced by objects that do nothing, and spans have no listener
    metrics   as in a run, scraped once per block
    spans     kept in memory, from which the live page draws its timeline
    traces    exported over OTLP to a collector in another process, which parses them

The cost is CPU time of the coordinator's process, because wall time on a shared machine is too noisy, divided by the
median step's wall time in RUN. It is an upper bound of what telemetry adds to a step, because most of it is spent while
trainer and replicas compute. Replicas and trainer are not counted: a replica makes one span with its parts per rollout,
the coordinator two or more.

An open page costs by the second: it follows the stream, and requests the timeline every second and the curves with
every step. So it is measured after the steps, alternately with and without a page, relative to wall time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import httpx2
import numpy as np
import structlog
from benchmarks.scale_peers import Peers
from benchmarks.telemetry_coordinator import LEVELS
from rich.console import Console
from rich.table import Table

from specrl.spec import RunSpec, load_spec, parse_spec
from specrl.spec.load import dump_spec

REPOSITORY = Path(__file__).parents[1]
OUTSTANDING = 16
"""Free seats of the closed load: rollouts finish as fast as the coordinator takes them."""
LAG = 6
"""Large enough that the lag bound never keeps a seat free."""
LOOKED_ON_S = 8.0
"""Seconds of a turn with a page, and of one without."""
ASKED_S = {"/timeline?steps=4&points=240": 1.0, "/curves?first=1&points=240": 2.0}
"""Requests that a page repeats, and their shortest interval in seconds (web/assets/main.js)."""


@dataclass(frozen=True)
class Pattern:
    """The steps of RUN: median seconds, and mean tokens of a rollout."""

    spec: RunSpec
    step_s: float
    tokens: int

    @classmethod
    def of(cls, run: Path) -> Pattern:
        """Read the pattern of a finished run."""
        reports = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        step_s = statistics.median(sum(report["phases"].values()) for report in reports)
        return cls(load_spec(run / "run.yaml"), step_s, round(statistics.mean(r["meanLength"] for r in reports)))

    @property
    def rollouts(self) -> int:
        """Rollouts of a step."""
        return self.spec.schedule.prompts_per_step * self.spec.schedule.group_size

    def endless(self) -> RunSpec:
        """Make a run without an end, and without what the coordinator does rarely."""
        fields = self.spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        fields["schedule"] |= {"steps": 1_000_000, "maxPolicyLag": LAG}
        live = self.rollouts // self.spec.generation.replicas
        fields["generation"] |= {"speculation": {"none": {}}, "maxLiveRollouts": live}
        fields["trainer"].pop("drafter", None)
        fields |= {"canary": {"everySteps": 0}, "telemetry": {"heartbeatS": 10}, "store": {"sqlite": {}}}
        for name in ("validation", "tools"):
            fields.pop(name, None)
        return parse_spec(fields)


class Collector(BaseHTTPRequestHandler):
    """Parses what it is sent, and drops it."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None: ...


def collect(port: Connection) -> None:
    """Run a collector in this process: report its port, and serve until killed."""
    server = HTTPServer(("127.0.0.1", 0), Collector)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def collector() -> Iterator[str]:
    """Start a collector in another process. Yields its address."""
    context = get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=collect, args=(there,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{here.recv()}"
    finally:
        process.kill()
        process.join()


class Coordinator:
    """The process that is measured."""

    def __init__(self, folder: Path, address: str) -> None:
        command = [sys.executable, "-m", "benchmarks.telemetry_coordinator", str(folder), address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY
        )
        self.port, self.http_port = map(int, self._line().split())

    def switch(self, level: str) -> float:
        """Switch to a level. Returns the CPU seconds used before."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{level}\n")
        self._process.stdin.flush()
        return float(self._line())

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the coordinator ended early; its message is above")
        return line


async def look_on(port: int, step_s: float) -> None:
    """Do what an open page does in a run with steps of `step_s` seconds, until cancelled."""
    async with (
        httpx2.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30) as client,
        asyncio.TaskGroup() as group,
    ):

        async def follow() -> None:
            async with client.stream("GET", "/stream") as answer:
                async for _ in answer.aiter_bytes():
                    pass

        async def ask(path: str, every_s: float) -> None:
            while True:
                (await client.get(path)).raise_for_status()
                await asyncio.sleep(every_s)

        group.create_task(follow())
        for path, least_s in ASKED_S.items():
            group.create_task(ask(path, max(least_s, step_s) if path.startswith("/curves") else least_s))


async def page_share(coordinator: Coordinator, step_s: float) -> float:
    """CPU of a page over wall time: a turn with one minus a turn without."""
    used = []
    for is_open in (False, True):
        page = asyncio.create_task(look_on(coordinator.http_port, step_s)) if is_open else None
        await asyncio.sleep(1)  # opening the page is not part of the cost
        began_s = time.monotonic()
        began = await asyncio.to_thread(coordinator.switch, "spans")
        await asyncio.sleep(LOOKED_ON_S)
        ended = await asyncio.to_thread(coordinator.switch, "spans")
        used.append((ended - began) / (time.monotonic() - began_s))
        if page is not None:
            page.cancel()
            await asyncio.wait([page])
    return used[1] - used[0]


async def measure(pattern: Pattern, rounds: int, steps: int) -> tuple[list[dict[str, float]], list[float]]:
    """CPU seconds per step at each level, for each round; and of a page, as shares of wall time."""
    with tempfile.TemporaryDirectory() as scratch, collector() as address:
        folder = Path(scratch)
        spec = pattern.endless()
        (folder / "run.yaml").write_text(dump_spec(spec), encoding="utf-8")
        coordinator = Coordinator(folder, address)
        try:
            async with Peers(spec, folder, f"127.0.0.1:{coordinator.port}", pattern.tokens) as peers:
                await peers.floor.fill(pattern.rollouts // spec.generation.replicas * spec.generation.replicas)
                found = []
                for number in range(rounds + 1):
                    order = LEVELS if number % 2 else LEVELS[::-1]
                    costs = {}
                    for level in order:
                        began = await asyncio.to_thread(coordinator.switch, level)
                        await peers.floor.saturate(peers.backend, steps, OUTSTANDING)
                        ended = await asyncio.to_thread(coordinator.switch, level)
                        costs[level] = (ended - began) / steps
                    found.append(costs)
                pages = [await page_share(coordinator, pattern.step_s) for _ in range(min(rounds, 5))]
                return found[1:], pages  # the first round fills caches, connections and buffers
        finally:
            coordinator.kill()


def show(pattern: Pattern, found: list[dict[str, float]], pages: list[float], console: Console) -> None:
    """Print medians and ranges over the rounds."""
    table = Table("level", "CPU of the coordinator, over off", "share of a step's time", "range over rounds")
    for level in LEVELS[1:]:
        over = np.array([costs[level] / costs["off"] for costs in found])
        shares = np.array([(costs[level] - costs["off"]) / pattern.step_s for costs in found])
        table.add_row(
            level,
            f"{np.median(over):.2f} ({over.min():.2f}-{over.max():.2f})",
            f"{np.median(shares):.3%}",
            f"{shares.min():.3%} to {shares.max():.3%}",
        )
    table.add_row("a page that is open", "", f"{np.median(pages):.3%}", f"{min(pages):.3%} to {max(pages):.3%}")
    console.print(table)
    off = np.median([costs["off"] for costs in found]) / pattern.step_s
    console.print(f"{pattern.rollouts} rollouts a step, {len(found)} rounds; the coordinator itself takes {off:.2%}")


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished run of this machine")
    parser.add_argument("--rounds", type=int, default=10, help="turns of every level (default: 10)")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn (default: 20)")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    os.environ["GRPC_VERBOSITY"] = "NONE"
    pattern = Pattern.of(arguments.run)
    show(pattern, *asyncio.run(measure(pattern, arguments.rounds, arguments.steps)), Console(width=150))


if __name__ == "__main__":
    main()
