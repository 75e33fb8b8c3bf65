"""What hostile clients cost a run: the time of its steps with and without them, in pairs within one run.

    python -m benchmarks.hostile_clients --pairs 10 --clients 64

A run on stand-ins (real coordinator, servers and protocol; engine and trainer compute nothing) goes on all the time. In
each pair of windows, one window has the clients of tests/hostile_clients.py, which attack every gRPC and HTTP port of
the run, and one has none. Their order alternates. A window's figure is the median wall time of its steps. Reported: the
medians over the windows, the median ratio of the pairs with its 95 % bootstrap interval, and the processor seconds per
second of each process.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from statistics import median
from typing import Any

import psutil
from tests.hostile_clients import start_attack
from tests.integration.elastic.cluster import Cluster
from tests.integration.elastic.test_hostile_clients import list_targets

RUN: dict[str, Any] = {
    "schedule": {"steps": 1_000_000, "promptsPerStep": 8, "groupSize": 4, "maxPolicyLag": 1},
    "generation": {"replicas": 2, "maxLiveRollouts": 32, "sampling": {"maxTokens": 40}},
    "weights": {"timeoutS": 60},
    "telemetry": {"heartbeatS": 10},
}
SETTLE_S = 3.0
"""Seconds between the begin of an attack and its window, in which the clients start."""

DRAWS = 5000
"""Bootstrap samples of the pairs."""


def main() -> None:
    """Run the pairs and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0, help="length of a window")
    parser.add_argument("--token-seconds", type=float, default=0.005, help="seconds of a rollout's token")
    parser.add_argument("--json", type=Path, help="write the figures into this file, too")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        Cluster(Path(folder), RUN, token_seconds=options.token_seconds) as cluster,
    ):
        cluster.start("coordinator", "trainer", "gen-0", "gen-1")
        cluster.until(lambda: cluster.status().get("step", 0) >= 5)
        targets: dict[str, list[str]] = {"hostile": list_targets(cluster), "quiet": []}
        pairs = []
        busy: dict[str, list[dict[str, float]]] = {arm: [] for arm in targets}
        for number in range(options.pairs):
            order = ("quiet", "hostile") if number % 2 else ("hostile", "quiet")
            found = {arm: measure_steps(cluster, options, targets[arm], busy[arm]) for arm in order}
            pairs.append((found["quiet"], found["hostile"]))
            print(f"pair {number + 1}: {found['quiet']:.3f} s quiet, {found['hostile']:.3f} s hostile", flush=True)
    figures = summarise_pairs(pairs) | {
        f"{arm}Cores": {name: round(median(window[name] for window in windows), 3) for name in windows[0]}
        for arm, windows in busy.items()
    }
    print(json.dumps(figures, indent=1))
    if options.json is not None:
        options.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def measure_steps(
    cluster: Cluster, options: argparse.Namespace, targets: Sequence[str], busy: list[dict[str, float]]
) -> float:
    """Attack `targets` for one window; without targets, nobody attacks. Returns the median wall seconds of its steps.

    busy: gets the processor seconds per second of each process of the run.
    """
    with start_attack(options.clients, *targets) if targets else nullcontext():
        time.sleep(SETTLE_S)
        before = len(read_steps(cluster))
        used = read_processor_seconds(cluster)
        time.sleep(options.seconds)
        after = read_processor_seconds(cluster)
        busy.append({name: (after[name] - used[name]) / options.seconds for name in used})
        return median(read_steps(cluster)[before:])


def read_processor_seconds(cluster: Cluster) -> dict[str, float]:
    """Read the processor seconds that each process of the run has used."""
    times = {name: psutil.Process(process.pid).cpu_times() for name, process in cluster.processes.items()}
    return {name: found.user + found.system for name, found in times.items()}


def read_steps(cluster: Cluster) -> list[float]:
    """Read the wall seconds of all steps so far from the run's folder: no request competes with the clients."""
    lines = cluster.directory.metrics_file.read_text(encoding="utf-8").splitlines()
    return [sum(json.loads(line)["phases"].values()) for line in lines if line.endswith("}")]


def summarise_pairs(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Compute the medians, and the median ratio hostile to quiet with its 95 % interval."""
    ratios = [hostile / quiet for quiet, hostile in pairs]
    chance = random.Random(0)  # noqa: S311 - a bootstrap
    drawn = sorted(median(chance.choices(ratios, k=len(ratios))) for _ in range(DRAWS))
    return {
        "pairs": len(pairs),
        "quietSeconds": round(median(quiet for quiet, _ in pairs), 4),
        "hostileSeconds": round(median(hostile for _, hostile in pairs), 4),
        "ratio": round(median(ratios), 3),
        "interval": [round(drawn[int(DRAWS * 0.025)], 3), round(drawn[int(DRAWS * 0.975)], 3)],
    }


if __name__ == "__main__":
    main()
