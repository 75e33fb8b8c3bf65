"""Measures how many rollouts per second one coordinator handles, at what cost, beside the same flow through Ray.

    python -m benchmarks.coordinator_scale                          # sizes that fit a laptop
    python -m benchmarks.coordinator_scale --full                   # 512 replicas, 100,000 rollouts in flight
    python -m benchmarks.coordinator_scale --ray-python RAY/bin/python   # an interpreter with ray, numpy and psutil

The real coordinator (loop, scheduler, registry, ledger, observer) runs in its own process. It talks gRPC over loopback
to replicas and a trainer that compute nothing (`scale_peers.py`). Every rollout has 8192 tokens with log-probabilities
and text. It is checked, graded (at once), stored, put into a group of 16, batched, stored with its batch, and sent to
the trainer. Every step is published to every replica. A step takes 16 rollouts per replica, so that rows differ in
scale alone.

Ray's rows have the same flow as NeMo-RL and verl (`scale_ray.py`): actors that generate, a controller that fills their
seats and collects groups, an actor that is the queue, and a trainer that takes batches from it. It stores nothing
durably, checks nothing and publishes nothing.

Cost is CPU time of all processes but those that stand in for replicas and trainer, because the machine's cores are
shared. Printed per row: rollouts per second under a closed load; CPU milliseconds per rollout, and the part of durable
writes (the thread that calls the store, and the Redis process); rollouts per second and core; cores used; peak memory;
and the latency from a free seat to the request that fills it, at half that load.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import structlog
from benchmarks.scale_peers import GROUP, Peers, Used
from rich.console import Console
from rich.table import Table
from tests.integration.coordinator.small_run import a_spec
from tests.redis_servers import RedisProcess, redis_settings

from specrl.spec import RunSpec, parse_spec
from specrl.spec.load import dump_spec

REPOSITORY = Path(__file__).parents[1]
PROMPT_TOKENS = 256
PACED_SHARE = 0.5
"""Share of the closed load's rate at which latency is measured, so that the coordinator keeps up."""


@dataclass(frozen=True)
class Load:
    """Size of one row. live: rollouts in flight per replica. rollouts: how many are measured at least."""

    replicas: int
    live: int
    rollouts: int
    tokens: int
    prompts_per_step: int
    outstanding: int

    @property
    def steps(self) -> int:
        """Whole steps that have at least as many rollouts."""
        return -(-self.rollouts // (self.prompts_per_step * GROUP))

    @property
    def measured(self) -> int:
        """Rollouts of those steps."""
        return self.steps * self.prompts_per_step * GROUP


@dataclass(frozen=True)
class Outcome:
    """Result of one row. cpu_s: CPU seconds for `rollouts` rollouts. durable_s: the part of durable writes.

    latencies_ms: of dispatches at half the load.
    """

    kind: str
    load: Load
    rollouts: int
    seconds: float
    cpu_s: float
    durable_s: float
    peak_bytes: int
    latencies_ms: list[float]

    @property
    def per_core(self) -> float:
        """Rollouts per second if one core did nothing else."""
        return self.rollouts / self.cpu_s


# -- one row of ours -----------------------------------------------------------------------------------------------


def spec_of(load: Load, folder: Path, server: RedisProcess | None) -> RunSpec:
    """Make a run file whose lag bound allows all seats at once."""
    steps_in_flight = -(-load.replicas * load.live // (load.prompts_per_step * GROUP))
    base = a_spec(
        folder,
        steps=1_000_000,
        promptsPerStep=load.prompts_per_step,
        groupSize=GROUP,
        maxPolicyLag=2 * steps_in_flight + 4,
    )
    wanted = base.model_dump(by_alias=True, mode="json", exclude_none=True)
    wanted["model"]["maxLength"] = load.tokens + PROMPT_TOKENS + 1
    wanted["prompts"]["maxTokens"] = PROMPT_TOKENS
    wanted["generation"] |= {
        "replicas": load.replicas,
        "maxLiveRollouts": load.live,
        "sampling": {"maxTokens": load.tokens},
        "speculation": {"none": {}},
    }
    wanted["trainer"].pop("drafter", None)
    wanted["canary"] = {"everySteps": 0}
    wanted["telemetry"] = {"heartbeatS": 10}
    wanted["weights"] = {"timeoutS": 120}
    del wanted["validation"]
    if server is not None:
        wanted["store"] = {"redis": redis_settings(server, timeout_s=30).model_dump(by_alias=True, mode="json")}
    return parse_spec(wanted)


@contextmanager
def running(folder: Path) -> Iterator[tuple[psutil.Process, int, int]]:
    """Start the coordinator. Returns its process, its port, and the id of its thread that calls the store."""
    command = [sys.executable, "-m", "benchmarks.scale_coordinator", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=REPOSITORY) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()  # empty if the process ended; it has printed why
            if not line:
                raise RuntimeError("the coordinator ended at its start; its message is above")
            port, writer = map(int, line.split())
            yield psutil.Process(process.pid), port, writer
        finally:
            process.kill()


async def drive(load: Load, spec: RunSpec, folder: Path, port: int, used: Used) -> dict[str, Any]:
    """Fill all seats, then apply both loads. Returns fields of the outcome. Raises if the coordinator dies."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(used.watch())
        async with Peers(spec, folder, f"127.0.0.1:{port}", load.tokens) as peers:
            floor = peers.floor
            await floor.fill(load.replicas * load.live)
            await floor.saturate(peers.backend, 1, load.outstanding)  # fill caches, connections and buffers
            began = time.monotonic()
            cpu_s = used.cpu_s
            durable_s = used.durable_s
            await floor.saturate(peers.backend, load.steps, load.outstanding)
            seconds = time.monotonic() - began
            cpu_s = used.cpu_s - cpu_s
            durable_s = used.durable_s - durable_s
            floor.latencies_s.clear()
            await floor.pace(load.measured // 2, PACED_SHARE * load.measured / seconds)
            latencies_ms = [1000 * latency for latency in floor.latencies_s]
        watching.cancel()
    return {"seconds": seconds, "cpu_s": cpu_s, "durable_s": durable_s, "latencies_ms": latencies_ms}


def measure(load: Load, kind: str) -> Outcome:
    """Measure one row of the real coordinator, with the store `kind`."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        server = RedisProcess(folder / "redis", appendfsync="always") if kind == "redis" else None
        try:
            spec = spec_of(load, folder, server)
            (folder / "run.yaml").write_text(dump_spec(spec), encoding="utf-8")
            with running(folder) as (coordinator, port, writer):
                counted = [coordinator]
                if server is not None:
                    with server.client() as client:
                        counted.append(psutil.Process(int(client.info("server")["process_id"])))
                used = Used(counted, writer)
                found = asyncio.run(drive(load, spec, folder, port, used))
        finally:
            if server is not None:
                server.kill()
    return Outcome(kind, load, load.measured, peak_bytes=used.peak_bytes, **found)


# -- one row of Ray's ----------------------------------------------------------------------------------------------


def measure_ray(load: Load, python: Path) -> Outcome:
    """Measure the same flow through Ray, in its own interpreter."""
    script = Path(__file__).with_name("scale_ray.py")
    given = asdict(load) | {"group": GROUP, "prompt_tokens": PROMPT_TOKENS, "paced_share": PACED_SHARE}
    command = [str(python), str(script), json.dumps(given)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=3600)
    return Outcome("ray", load, durable_s=0.0, **json.loads(done.stdout.splitlines()[-1]))


def has_ray(python: Path) -> bool:
    """Whether this interpreter has Ray and the packages that `scale_ray.py` needs."""
    command = [str(python), "-c", "import numpy, psutil, ray"]
    try:
        return subprocess.run(command, check=False, capture_output=True, timeout=120).returncode == 0
    except OSError:
        return False


# -- the table -----------------------------------------------------------------------------------------------------


def show(outcomes: list[Outcome], console: Console) -> None:
    table = Table(
        *(
            "row",
            "replicas",
            "in flight",
            "rollouts/s",
            "CPU ms a rollout",
            "of it durable",
            "rollouts/s a core",
            "cores",
            "memory",
        ),
        *("dispatch p50", "p99"),
    )
    for row in outcomes:
        p50, p99 = np.percentile(row.latencies_ms, [50, 99])
        table.add_row(
            row.kind,
            str(row.load.replicas),
            f"{row.load.replicas * row.load.live:,}",
            f"{row.rollouts / row.seconds:,.0f}",
            f"{1000 * row.cpu_s / row.rollouts:.2f}",
            f"{1000 * row.durable_s / row.rollouts:.2f}",
            f"{row.per_core:,.0f}",
            f"{row.cpu_s / row.seconds:.2f}",
            f"{row.peak_bytes / 2**20:,.0f} MiB",
            f"{p50:.1f} ms",
            f"{p99:.1f} ms",
        )
    console.print(table)
    rays = [row.per_core for row in outcomes if row.kind == "ray"]
    for row in outcomes:
        if row.kind == "ray":
            continue
        few = next(other for other in outcomes if other.kind == row.kind)
        line = (
            f"{row.kind}, {row.load.replicas} replicas: cost of a rollout {few.per_core / row.per_core:.2f}x that of "
        )
        line += f"{few.load.replicas} replicas"
        if rays:
            undurable = row.rollouts / (row.cpu_s - row.durable_s)
            line += f"; rollouts/s a core {row.per_core / max(rays):.2f}x Ray's best, "
            line += f"{undurable / max(rays):.2f}x without its durable writes"
        console.print(line)


def quieten() -> None:
    """Log only errors. A killed coordinator is none."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    os.environ["GRPC_VERBOSITY"] = "NONE"


def main() -> None:
    """Measure all rows and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, nargs="+", default=[8, 64], help="one row each (default: 8 64)")
    parser.add_argument("--live", type=int, default=16, help="rollouts in flight at each replica (default: 16)")
    parser.add_argument(
        "--rollouts", type=int, default=4000, help="rollouts measured per row, at least (default: 4000)"
    )
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of a rollout (default: 8192)")
    parser.add_argument("--outstanding", type=int, default=64, help="free seats of the closed load (default: 64)")
    parser.add_argument("--stores", nargs="+", default=["sqlite", "redis"], choices=["sqlite", "redis"])
    parser.add_argument("--full", action="store_true", help="8 and 512 replicas with 196 rollouts in flight each")
    parser.add_argument("--ray-python", type=Path, default=Path(sys.executable), help="an interpreter that has Ray")
    parser.add_argument("--ray-replicas", type=int, nargs="+", default=[8], help="each is a process (default: 8)")
    parser.add_argument("--json", type=Path, help="file for the figures of all rows")
    arguments = parser.parse_args()
    if arguments.full:
        arguments.replicas = [8, 512]  # 100,352 in flight
        arguments.live = 196
    quieten()
    console = Console(width=170)
    outcomes = []

    def load_of(replicas: int) -> Load:
        return Load(
            replicas,
            arguments.live,
            arguments.rollouts,
            arguments.tokens,
            replicas,
            arguments.outstanding,
        )

    for kind in arguments.stores:
        for replicas in arguments.replicas:
            console.print(f"{kind}, {replicas} replicas ...")
            outcomes.append(measure(load_of(replicas), kind))
    if has_ray(arguments.ray_python):
        for replicas in arguments.ray_replicas:
            console.print(f"ray, {replicas} replicas ...")
            outcomes.append(measure_ray(load_of(replicas), arguments.ray_python))
    else:
        console.print(
            f"skipping Ray's rows: {arguments.ray_python} cannot import ray, numpy and psutil; install them into "
            "an environment of their own (python -m venv) and name its interpreter with --ray-python"
        )
    show(outcomes, console)
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in outcomes], indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
