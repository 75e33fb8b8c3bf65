"""Reproduces the paper's design on this machine: phases of an RL step with and without speculation.

    python benchmarks/paper_table.py --out runs/paper              # all rows, both workloads, two rounds
    python benchmarks/paper_table.py --out runs/paper --quick      # four rows of the base model

Every row is `specrl run` on examples/demo/run.yaml: real RL of a policy of 24 layers, for which a one-layer drafter is
cheap, with 4 rollouts per step. A coordinator, one replica on one core and one trainer rank share two cores.
Synchronous, the trainer uses both; at policy lag 1 it uses the other one. Phases come from the runs' metrics.jsonl; the
first step of a run warms up and is left out. All rows of a workload have the same first policy, prompts and seeds. Rows
take turns in rounds, each in another order and with other prompts, so that a noisy machine affects all rows equally.
Finished runs with the same settings are not repeated, so the same command continues after Ctrl-C.

Speeds are ratios to the row without speculation at the same policy lag: the ratio of the median steps, and in brackets
the middle half of the ratios of equal steps. At policy lag 1, steps that wait alternate with steps that do not, so
means are used, and of whole steps only. "a token" is the speed of generation in seconds per token: all rows sample from
one distribution, but not the same lengths. "exposed" is exposed generation: seconds of a step, and share of it. As in
the paper, no row has a canary.

Every row that the paper publishes (arXiv 2604.26779; Qwen3-8B-Base and Qwen3-8B on 32 GB200) has a line, with its
figures and our error, also if it was not measured here. Model and machine differ, so compare the direction and not the
size.

Policies and drafters are made once, below --out: two policies, and for each a drafter initialised on its own rollouts
of the run's prompts and one on its rollouts of another family's.
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
    PHASES,
    PUBLISHED,
    QUICK,
    WARM_UP_STEPS,
    WEAK,
    WORKLOADS,
    Configuration,
    Ratio,
    Row,
    Steps,
    Workload,
    eagle3,
    list_unmeasured,
    plan,
    published_shares,
    read_steps,
    relative_error,
    rows_of,
)
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

LAYERS = 24
WIDTH = 160  # columns of tables in a file
UNMEASURED = "not measured"

COMMON = {
    "validation": "null",
    "canary.everySteps": "0",
    "checkpoint.everySteps": "1000",
    "prompts.maxTokens": "56",
    # One process for each: they start sooner than several would.
    "generation.replicas": "1",
    "generation.kvCacheMib": "64",
    "trainer.parallelism.data": "1",
    # So few rollouts that a step mostly waits for its longest answer, as in the paper.
    "schedule.promptsPerStep": "1",
    "schedule.groupSize": "4",
    "generation.maxLiveRollouts": "4",
}
INITIALISATION = {
    "generation.maxLiveRollouts": "32",
    "generation.kvCacheMib": "256",
    "generation.speculation": f"{{{eagle3(5)}}}",
    "trainer.drafter.initialisation.prompts": "256",
    "trainer.drafter.initialisation.maxPrompts": "256",
    "trainer.drafter.initialisation.epochs": "10",
}
OTHER_FAMILY = {"prompts.source.generated.family": "ledger", "prompts.source.generated.difficulty": "0"}
DRAFTERS: dict[str, dict[str, str]] = {IN_DOMAIN: {}, WEAK: OTHER_FAMILY}


def prepare(workload: Workload, folder: Path, drafters: Sequence[str], console: Console) -> None:
    """Make the workload's policy and the named drafters unless they exist."""
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
    """Train one run of a row, or return what an earlier one with the same settings left. Raises Failed."""
    runs = folder / "runs" / f"{configuration.name.replace(':', '-')}-round{number}"
    fields = fields_of(workload, folder) | configuration.overrides(folder)
    fields |= {"schedule.steps": str(steps), "schedule.seed": str(number), "prompts.shuffleSeed": str(number)}
    metrics = run(fields, runs) / "metrics.jsonl"
    return read_steps(metrics.read_text(encoding="utf-8"), number)


def measure(arguments: argparse.Namespace, console: Console) -> tuple[dict[str, dict[str, Steps]], int]:
    """Train the runs. Returns the steps by workload and row, and the number of failed runs."""
    workloads = [workload for workload in WORKLOADS if workload.name in arguments.only]
    orders = {w.name: plan(arguments.configs or w.rows, arguments.rounds) for w in workloads}
    for workload in workloads:
        drafters = {configuration.drafter for _, configuration in orders[workload.name]}
        prepare(workload, arguments.out / workload.name, [name for name in DRAFTERS if name in drafters], console)
    found: dict[str, dict[str, Steps]] = {workload.name: {} for workload in workloads}
    failures = 0
    # Rounds first, so that both workloads of a round meet the same state of the machine.
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


def speeds(workload: str, rows: Sequence[Row]) -> Table:
    """Make the table of ratios, beside the paper's with our error. Published rows without runs come last."""
    columns = ("generation", "paper", "a token", "step", "paper", "acceptance", "paper", "exposed", "paper")
    table = Table("row", *columns, box=SIMPLE_HEAD)
    for row in rows:
        paper = row.published
        table.add_row(
            *(row.name, _shown(row.generation), _compared(row.generation, paper.generation, "x")),
            _shown(row.per_token.value if row.per_token else None, "x"),
            *(_shown(row.step), _compared(row.step, paper.step, "x")),
            *(_shown(row.acceptance_length), _compared(row.acceptance_length, paper.acceptance_length)),
            # Seconds of another model on another machine have no error.
            *(f"{row.exposed_s:.2f} s, {row.exposed_share:.0%}", _shown(paper.exposed_s, " s")),
        )
    for configuration in list_unmeasured(workload, rows):
        paper = PUBLISHED[workload, configuration.name]
        table.add_row(
            *(configuration.name, UNMEASURED, _shown(paper.generation, "x"), UNMEASURED),
            *(UNMEASURED, _shown(paper.step, "x")),
            *(UNMEASURED, _shown(paper.acceptance_length), UNMEASURED, _shown(paper.exposed_s, " s")),
        )
    return table


def phases(workload: str, rows: Sequence[Row]) -> Table:
    """Make the table of phases, as in the paper's first table, in percent of a step without speculation at the same
    lag.
    """
    table = Table("% of a step of none", *PHASES, "total", "mean length", box=SIMPLE_HEAD)
    for row in rows:
        shares = (f"{100 * row.phases[phase]:.1f}" for phase in (*PHASES, "total"))
        table.add_row(row.name, *shares, f"{row.mean_length:.0f} tokens")
    for name, published in zip(("paper, none", "paper, eagle3:3"), published_shares(workload), strict=True):
        table.add_row(name, *(f"{100 * published[phase]:.1f}" for phase in (*PHASES, "total")), "")
    return table


def _shown(value: Ratio | float | None, unit: str = "") -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, Ratio) else f"{value:.2f}{unit}"


def _compared(ours: Ratio | float | None, published: float | None, unit: str = "") -> str:
    """Show a published figure, and by how much ours is above it."""
    if ours is None or published is None:
        return _shown(published, unit)
    value = ours.value if isinstance(ours, Ratio) else ours
    return f"{published:.2f}{unit}, {relative_error(value, published):+.0%}"


def main() -> None:
    """Parse the command line, measure, print, and write the rows if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for policies, drafters and runs")
    workloads = [workload.name for workload in WORKLOADS]
    parser.add_argument("--only", choices=workloads, help="one workload (default: both)")
    parser.add_argument("--configs", type=lambda text: text.split(","), default=(), help=f"rows, of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, default=2, help="runs of each row (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=10, help="steps of each run, warm-up included (default: %(default)s)"
    )
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
        sys.exit("interrupted; the same command continues with the unfinished run")
    result = {}
    for workload in WORKLOADS:
        rows = rows_of(workload.name, found.get(workload.name, {}))
        result[workload.name] = [row.to_json() for row in rows]
        if rows:
            console.print(f"\n{workload.name}: {workload.says}")
            console.print(speeds(workload.name, rows))
            for row in rows:
                console.print(f"  {row.name}: {row.says}", highlight=False)
            console.print(phases(workload.name, rows))
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
