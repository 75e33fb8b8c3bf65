"""The paper's design on this machine: stages of an RL step with speculation against none, beside the paper's ratios.

    python benchmarks/paper_table.py --out runs/paper              # all rows, both workloads, two rounds
    python benchmarks/paper_table.py --out runs/paper --quick      # four rows of the base model

Every row is `specrl run` on examples/demo/run.yaml, real RL of a policy of 24 layers, for which a one-layer drafter is
cheap: coordinator, one replica on one core, one trainer rank on both when it trains synchronously and on the other at
policy lag 1, 4 rollouts a step. The stages come from the runs' metrics.jsonl; the first step of a run warms it up and
is left out. All rows of a workload start from the same policy and have the same prompts and seeds. They take turns in
rounds, every round in another order and with other prompts, so that a noisy machine disturbs all alike. Runs that have
finished with the same settings are not repeated: after Ctrl-C the same command goes on.

Speeds are ratios to the row without speculation at the same policy lag: the median over steps of the one over that of
the other, and in brackets the middle half of the ratios of like steps. At policy lag 1, where steps that wait and steps
that do not alternate, they are of means, and of whole steps only. "a token" is the speed of generation in seconds a
token: what is sampled is of one distribution in all rows, but not of one length. "exposed" is the share of a step in
which the trainer waits for rollouts. No row has a canary, as the paper's have none.

Beside them stand the figures of arXiv 2604.26779 (Qwen3-8B-Base and Qwen3-8B on 32 GB200, synchronous), where it has
any. Another model on another machine: the direction is to be compared, not the size.

The policies and drafters are made once, under --out: two policies, and for each a drafter initialised on its own
rollouts of the run's prompts and one on its rollouts of another family's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from demo_runs import DEMO, Failed, begin, call, run
from paper_rows import (
    CONFIGURATIONS,
    IN_DOMAIN,
    NAMES,
    QUICK,
    STAGES,
    WARM_UP_STEPS,
    WEAK,
    WORKLOADS,
    Configuration,
    Ratio,
    Row,
    Steps,
    Workload,
    eagle3,
    plan,
    published_shares,
    read_steps,
    rows_of,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LAYERS = 24
WIDTH = 120  # of the tables in a file

COMMON = {
    "validation": "null",
    "canary.everySteps": "0",
    "checkpoint.everySteps": "1000",
    "prompts.maxTokens": "56",
    # One process for each of the two: they start sooner than more would.
    "generation.replicas": "1",
    "generation.kvCacheMib": "64",
    "trainer.parallelism.data": "1",
    # So few rollouts that a step is mostly waiting for the longest answer, as in the paper.
    "schedule.promptsPerStep": "1",
    "schedule.groupSize": "4",
    "generation.maxLiveRollouts": "4",
}
INITIALISATION = {
    "generation.maxLiveRollouts": "32",
    "generation.kvCacheMib": "256",
    "generation.speculation": f"{{{eagle3(5)}}}",
    "trainer.drafter.initialisation.prompts": "256",
    "trainer.drafter.initialisation.epochs": "10",
}
OTHER_FAMILY = {"prompts.source.generated.family": "ledger", "prompts.source.generated.difficulty": "0"}
DRAFTERS: dict[str, dict[str, str]] = {IN_DOMAIN: {}, WEAK: OTHER_FAMILY}


def prepare(workload: Workload, folder: Path, drafters: Sequence[str], console: Console) -> None:
    """Make the workload's policy and the drafters named, unless they are there."""
    policy = folder / "policy"
    if not policy.exists():
        console.print(f"{workload.name}: making the policy ...")
        script = [sys.executable, str(DEMO / "make_policy.py"), "--out", str(policy), "--layers", str(LAYERS)]
        call([*script, *workload.make_policy], folder / "policy.log")
    for name in drafters:
        if not (folder / name).exists():
            console.print(f"{workload.name}: initialising {name} ...")
            fields = fields_of(workload, folder) | INITIALISATION | DRAFTERS[name]
            runs = folder / f"{name}-run"
            shutil.rmtree(runs, ignore_errors=True)
            call(begin(fields, runs, "drafter", "init", "--out", str(folder / name)), folder / f"{name}.log")


def fields_of(workload: Workload, folder: Path) -> dict[str, str]:
    """Fields of the run file that all rows of a workload share. folder: the workload's."""
    return COMMON | workload.overrides | {"model.path": json.dumps(str(folder / "policy"))}


def run_once(workload: Workload, configuration: Configuration, number: int, folder: Path, steps: int) -> Steps:
    """One run of a row, or what an earlier one of the same settings left. Raises Failed."""
    runs = folder / "runs" / f"{configuration.name.replace(':', '-')}-round{number}"
    fields = fields_of(workload, folder) | configuration.overrides(folder)
    fields |= {"schedule.steps": str(steps), "schedule.seed": str(number), "prompts.shuffleSeed": str(number)}
    metrics = run(fields, runs) / "metrics.jsonl"
    return read_steps(metrics.read_text(encoding="utf-8"), number)


def measure(arguments: argparse.Namespace, console: Console) -> tuple[dict[str, dict[str, Steps]], int]:
    """Do the runs; returns the steps by workload and row, and how many runs failed."""
    workloads = [workload for workload in WORKLOADS if workload.name in arguments.only]
    orders = {w.name: plan(arguments.configs or w.rows, arguments.rounds) for w in workloads}
    for workload in workloads:
        drafters = {configuration.drafter for _, configuration in orders[workload.name]}
        prepare(workload, arguments.out / workload.name, [name for name in DRAFTERS if name in drafters], console)
    found: dict[str, dict[str, Steps]] = {workload.name: {} for workload in workloads}
    failures = 0
    # By rounds first: the two workloads of a round are measured in the same state of the machine.
    tasks = [
        (number, workload, configuration)
        for at in range(1, arguments.rounds + 1)
        for workload in workloads
        for number, configuration in orders[workload.name]
        if number == at
    ]
    for done, (number, workload, configuration) in enumerate(tasks, 1):
        began = time.monotonic()
        console.print(f"[{done}/{len(tasks)}] {workload.name} {configuration.name}, round {number} ...", end=" ")
        try:
            steps = run_once(workload, configuration, number, arguments.out / workload.name, arguments.steps)
        except Failed as error:
            failures += 1
            console.print(f"FAILED: {error}")
            continue
        found[workload.name].setdefault(configuration.name, {}).update(steps)
        console.print(f"{time.monotonic() - began:.0f} s")
    return found, failures


def speeds(rows: Sequence[Row]) -> Table:
    """Ratios, each beside the paper's."""
    columns = ("generation", "paper", "a token", "step", "paper", "acceptance", "paper", "exposed")
    table = Table("row", *columns, box=SIMPLE_HEAD)
    for row in rows:
        paper = row.published
        table.add_row(
            *(row.name, _shown(row.generation), _shown(paper.generation, "x")),
            _shown(row.per_token.value if row.per_token else None, "x"),
            *(_shown(row.step), _shown(paper.step, "x")),
            *(_shown(row.acceptance_length), _shown(paper.acceptance_length), f"{row.exposed_share:.0%}"),
        )
    return table


def stages(workload: str, rows: Sequence[Row]) -> Table:
    """Stages as in the paper's first table, in per cent of a step without speculation at the same lag."""
    table = Table("% of a step of none", *STAGES, "total", "mean length", box=SIMPLE_HEAD)
    for row in rows:
        shares = (f"{100 * row.stages[stage]:.1f}" for stage in (*STAGES, "total"))
        table.add_row(row.name, *shares, f"{row.mean_length:.0f} tokens")
    for name, published in zip(("paper, none", "paper, eagle3:3"), published_shares(workload), strict=True):
        table.add_row(name, *(f"{100 * published[stage]:.1f}" for stage in (*STAGES, "total")), "")
    return table


def _shown(value: Ratio | float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, Ratio) else f"{value:.2f}{unit}"


def main() -> None:
    """Parse the command line, measure, print, and write the rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for policies, drafters and runs")
    workloads = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", choices=workloads, help="one workload (default: both)")
    parser.add_argument("--configs", type=lambda text: text.split(","), default=(), help=f"rows, of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10, help="of each run, warm-up included (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help=f"--only base --configs {','.join(QUICK)}")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    arguments.out = arguments.out.resolve()
    if arguments.quick:
        arguments.configs = QUICK
    arguments.only = ["base"] if arguments.quick else [arguments.only] if arguments.only else workloads
    unknown = sorted(set(arguments.configs) - set(NAMES))
    if unknown:
        parser.error(f"--configs must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
    missing = {c.reference for c in CONFIGURATIONS if c.name in arguments.configs} - set(arguments.configs)
    if missing:
        parser.error(f"--configs must hold what its rows are relative to, got no {', '.join(sorted(missing))}; add it")
    if arguments.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be >= {WARM_UP_STEPS + 2}, got {arguments.steps}; the first only warm up")
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    try:
        found, failures = measure(arguments, console)
    except Failed as error:
        sys.exit(f"policies and drafters must be made first: {error}")
    except KeyboardInterrupt:
        sys.exit("stopped; the same command goes on with the run that was under way")
    result = {}
    for workload in WORKLOADS:
        rows = rows_of(workload.name, found.get(workload.name, {}))
        result[workload.name] = [row.to_json() for row in rows]
        if rows:
            console.print(f"\n{workload.name}: {workload.says}")
            console.print(speeds(rows))
            for row in rows:
                console.print(f"  {row.name}: {row.says}", highlight=False)
            console.print(stages(workload.name, rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
