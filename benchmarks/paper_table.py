"""Reproduces the paper's design on this machine: phases of an RL step with and without speculation.

    python -m benchmarks.paper_table --out runs/paper              # all rows of the toy policy, both workloads
    python -m benchmarks.paper_table --out runs/paper --quick      # four rows of one
    python -m benchmarks.paper_table --out runs/smollm2 --policy smollm2 --kept benchmarks/results/paper_smollm2.jsonl

Every row is `specrl run`: real RL, with 4 rollouts per step (32 in the workload `crowd`). A coordinator, one replica on
one core and one trainer rank share two cores. Synchronous, the trainer uses both; at policy lag 1 it uses the other
one. Phases come from the runs' metrics.jsonl; the first step of a run warms up and is left out. All rows of a workload
have the same first policy, prompts and seeds. Rows take turns in rounds, each in another order and with other prompts,
so that a noisy machine affects all rows equally; only the reference of a row comes before it. Every run starts without
the step costs that earlier runs left in the cache, so a chosen draft length learns them anew in its first steps.

`--policy toy` is made here: 24 layers, for which a one-layer drafter is cheap. `--policy smollm2` is
SmolLM2-135M-Instruct, from the package registry. It needs GSM8K (--gsm8k), about ten hours of CPU, and for its row
`suffix` the package of `make suffix`. Policies and drafters are made once, below --out, before the first run. If one
cannot be made, its rows are left out, and the exit code is 1. There is a drafter initialised on the policy's own
answers to the run's prompts, and one on those to another task. Smollm2 also has one on general chat text, and a draft
model of its first layers.

Finished runs are kept in a file and not repeated, so the same command continues after Ctrl-C or SIGTERM. Another
machine goes on with that file and with --out without its folders `runs`: a run is known by the content of policy,
drafter, data and run file, so other drafters make other runs. --gsm8k FILE and the data set of the hub do not count as
the same data, so give the same one everywhere. A row and its reference are always of one boot of one machine, with one
commit and the same versions. So whoever goes on elsewhere makes the reference of the round again.

All figures of a row are of the steps that its reference, the row without speculation at the same policy lag, has, too;
"steps" is their number. Speeds are ratios to that row: the median of the ratios of equal steps, and in brackets their
middle half. At policy lag 1, steps that wait alternate with steps that do not, so the ratio of the means is used, and
of whole steps only. "a token" is the speed of generation in seconds per token: all rows sample from one distribution,
but not the same lengths. "exposed" is exposed generation: seconds of a step, and share of it. As in the paper, no row
has a canary.

Every row that the paper publishes (arXiv 2604.26779; Qwen3-8B-Base and Qwen3-8B on 32 GB200) has a line, with its
figures and our error, also if it was not measured here. Model and machine differ, so compare the direction and not the
size.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from benchmarks.demo_runs import Failed, identify_run, make_own_cache, run
from benchmarks.paper_policies import Fields, Policy, RealPolicy, Say, ToyPolicy
from benchmarks.paper_rows import (
    CONFIGURATIONS,
    NAMES,
    PHASES,
    QUICK,
    WARM_UP_STEPS,
    Published,
    Ratio,
    Row,
    Steps,
    Workload,
    list_unmeasured,
    plan,
    published_shares,
    read_steps,
    relative_error,
    rows_of,
)
from benchmarks.paper_runs import KeptRuns, RunKey, Task, describe_start
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

WIDTH = 170  # columns of tables in a file
UNMEASURED = "not measured"


class Runs:
    """Trains what is not kept yet."""

    def __init__(self, policy: Policy, given: argparse.Namespace, kept: KeptRuns) -> None:
        self._policy = policy
        self._given = given
        self._kept = kept
        self._failed = set[RunKey]()

    def find_pair(self, task: Task, say: Say) -> tuple[Steps, Steps]:
        """Return the steps of a run and of its reference, both of one start. Trains what is missing. Raises Failed."""
        own, reference = (self._make_key(it) for it in (task, task.reference))
        found = self._kept.find_pair(own, reference)
        if found is None:
            # The reference first: without it, the run would be worth nothing to whoever goes on elsewhere.
            self._train(task.reference, reference, say)
            self._train(task, own, say)
            found = self._kept.find_pair(own, reference)
            assert found is not None
        return found

    def _make_key(self, task: Task) -> RunKey:
        return task.make_key(identify_run(self._list_fields(task), self._policy.find_run_file(task.workload)))

    def _list_fields(self, task: Task) -> Fields:
        fields = self._policy.list_fields(task.workload)
        fields |= task.configuration.overrides(self._policy.find_drafters(task.workload))
        fields |= {"schedule.steps": str(self._given.steps), "schedule.seed": str(task.number)}
        return fields | {"prompts.shuffleSeed": str(task.number)}

    def _train(self, task: Task, key: RunKey, say: Say) -> None:
        """Train a run and keep its steps, unless this start has done so."""
        if self._kept.has_run(key):
            return
        name = f"{task.configuration.name.replace(':', '-')}-round{task.number}"
        if key in self._failed:
            raise Failed(f"{name} has failed before")
        say(f"  training {name}")
        self._failed.add(key)
        runs = self._given.out / task.workload.name / "runs" / f"{name}-{self._kept.start}"
        run_file = self._policy.find_run_file(task.workload)
        environment = make_own_cache(self._given.out / "cache")
        metrics = run(self._list_fields(task), runs, run_file=run_file, environment=environment) / "metrics.jsonl"
        self._kept.keep_steps(key, read_steps(metrics.read_text(encoding="utf-8"), self._kept.start, task.number))
        self._failed.remove(key)


def list_tasks(policy: Policy, given: argparse.Namespace) -> list[Task]:
    """List the runs in their order: rounds first, so that all workloads of one meet the same state of the machine."""
    tasks = [
        Task(number, workload, configuration)
        for workload in policy.workloads
        if workload.name in given.only
        for number, configuration in plan(given.configs or workload.rows, given.rounds, workload.once)
        if configuration.name in workload.rows
    ]
    return sorted(tasks, key=lambda task: task.number)


def make_models(policy: Policy, tasks: Sequence[Task], say: Say) -> list[Task]:
    """Make all policies and drafters before the first run: runs have the machine to themselves, and are known by these.

    Returns the tasks that have theirs. The others are left out, and the reason is said.
    """
    made = dict[str, bool]()

    def is_made(name: str, make: Callable[[], None]) -> bool:
        if name not in made:
            try:
                make()
                made[name] = True
            except Failed as error:
                say(f"FAILED: {name}: {error}")
                made[name] = False
        return made[name]

    ready = list[Task]()
    for task in tasks:
        workload = task.workload
        kind = task.configuration.drafter
        has_models = is_made(f"policy of {workload.name}", partial(policy.make_policy, workload, say))
        if has_models and kind is not None:
            drafter = str(policy.find_drafters(workload)[kind])
            has_models = is_made(drafter, partial(policy.make_drafter, workload, kind, say))
        if has_models:
            ready.append(task)
        else:
            say(f"left out: {workload.name} {task.configuration.name}, round {task.number}")
    return ready


def measure(policy: Policy, given: argparse.Namespace, console: Console) -> tuple[dict[str, dict[str, Steps]], int]:
    """Train the runs. Returns the steps by workload and row, and the number of failures."""
    runs = Runs(policy, given, KeptRuns(given.kept, describe_start()))
    every = list_tasks(policy, given)
    tasks = make_models(policy, every, console.print)
    found = {workload.name: defaultdict[str, Steps](dict) for workload in policy.workloads}
    failures = len(every) - len(tasks)
    for done, task in enumerate(tasks, 1):
        began = time.monotonic()
        name = task.configuration.name
        console.print(f"[{done}/{len(tasks)}] {task.workload.name} {name}, round {task.number} ...")
        try:
            own, reference = runs.find_pair(task, console.print)
        except Failed as error:
            failures += 1
            console.print(f"FAILED: {error}")
            continue
        found[task.workload.name][name].update(own)
        found[task.workload.name][task.configuration.reference].update(reference)
        console.print(f"  {time.monotonic() - began:.0f} s")
    return {name: dict(rows) for name, rows in found.items()}, failures


def speeds(workload: Workload, rows: Sequence[Row]) -> Table:
    """Make the table of ratios, beside the paper's with our error. Published rows without runs come last."""
    columns = ("steps", "generation", "paper", "a token", "step", "paper", "acceptance", "paper", "exposed", "paper")
    table = Table("row", *columns, box=MARKDOWN)
    for row in rows:
        paper = row.published
        table.add_row(
            *(row.name, str(row.steps), _shown(row.generation), _compared(row.generation, paper.generation, "x")),
            _shown(row.per_token.value if row.per_token else None, "x"),
            *(_shown(row.step), _compared(row.step, paper.step, "x")),
            *(_shown(row.acceptance_length), _compared(row.acceptance_length, paper.acceptance_length)),
            # Seconds of another model on another machine have no error.
            *(f"{row.exposed_s:.2f} s, {row.exposed_share:.0%}", _shown(paper.exposed_s, " s")),
        )
    for configuration in list_unmeasured(workload, rows):
        paper = workload.find_published(configuration.name) or Published()
        table.add_row(
            *(configuration.name, "0", UNMEASURED, _shown(paper.generation, "x"), UNMEASURED),
            *(UNMEASURED, _shown(paper.step, "x")),
            *(UNMEASURED, _shown(paper.acceptance_length), UNMEASURED, _shown(paper.exposed_s, " s")),
        )
    return table


def phases(workload: Workload, rows: Sequence[Row]) -> Table:
    """Make the table of phases, as in the paper's first table, in percent of a step without speculation at the same
    lag, in the same rounds.
    """
    table = Table("% of a step of none", "steps", *PHASES, "total", "mean length", box=MARKDOWN)
    for row in rows:
        shares = (f"{100 * row.phases[phase]:.1f}" for phase in (*PHASES, "total"))
        table.add_row(row.name, str(row.steps), *shares, f"{row.mean_length:.0f} tokens")
    for name, published in zip(("paper, none", "paper, eagle3:3"), published_shares(workload), strict=True):
        table.add_row(name, "", *(f"{100 * published[phase]:.1f}" for phase in (*PHASES, "total")), "")
    return table


def seconds(rows: Sequence[Row]) -> Table:
    """Make the table of seconds of a step: means. The phase that takes longest binds."""
    table = Table("row", "steps", "step", "exposed generation", "hidden generation", "what binds", box=MARKDOWN)
    for row in rows:
        binding = max(PHASES, key=lambda phase: row.phases[phase])
        table.add_row(
            row.name,
            str(row.steps),
            *(f"{value:.2f} s" for value in (row.step_s, row.exposed_s, row.hidden_s)),
            binding,
        )
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


def choose_policy(given: argparse.Namespace) -> Policy:
    if given.policy == "toy":
        return ToyPolicy(given.out)
    return RealPolicy(given.out, None if given.gsm8k is None else given.gsm8k.resolve())


def parse_arguments() -> tuple[argparse.Namespace, Policy]:
    """Parse the command line. Returns also the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for policies, drafters and runs")
    parser.add_argument("--policy", choices=("toy", "smollm2"), default="toy", help="default: %(default)s")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        metavar="FILE",
        help="train.jsonl of GSM8K (default: fetched from the hub); for smollm2; the same in all calls with one --kept",
    )
    parser.add_argument("--only", metavar="WORKLOAD", help="one workload (default: all)")
    parser.add_argument("--configs", type=lambda text: text.split(","), default=(), help=f"rows, of {', '.join(NAMES)}")
    parser.add_argument("--rounds", type=int, help="runs of each row (default: 2; 3 of smollm2's most important rows)")
    parser.add_argument("--steps", type=int, help="steps of each run, warm-up included (default: 10; 9 of smollm2)")
    parser.add_argument("--quick", action="store_true", help=f"--only base --configs {','.join(QUICK)}")
    parser.add_argument(
        "--kept", type=Path, metavar="FILE", help="file of finished runs (default: kept.jsonl in --out)"
    )
    parser.add_argument("--json", type=Path, help="also write the rows here")
    given = parser.parse_args()
    given.out = given.out.resolve()
    given.kept = given.kept or given.out / "kept.jsonl"
    is_toy = given.policy == "toy"
    policy = choose_policy(given)
    given.rounds = given.rounds or (2 if is_toy else 3)
    given.steps = given.steps or (10 if is_toy else 9)
    if given.quick:
        given.configs = QUICK
        given.only = "base"
    workloads = [workload.name for workload in policy.workloads]
    if given.only is not None and given.only not in workloads:
        parser.error(f"--only must be one of {', '.join(workloads)}, got {given.only}")
    given.only = workloads if given.only is None else [given.only]
    unknown = sorted(set(given.configs) - set(NAMES))
    if unknown:
        parser.error(f"--configs must be of {', '.join(NAMES)}, got {', '.join(unknown)}")
    missing = {c.reference for c in CONFIGURATIONS if c.name in given.configs} - set(given.configs)
    if missing:
        parser.error(f"--configs must hold what its rows are relative to, got no {', '.join(sorted(missing))}; add it")
    if given.steps < WARM_UP_STEPS + 2:
        parser.error(f"--steps must be >= {WARM_UP_STEPS + 2}, got {given.steps}; the first only warm up")
    return given, policy


def main() -> None:
    """Measure, print, and write the rows if asked."""
    given, policy = parse_arguments()
    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    try:
        found, failures = measure(policy, given, console)
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues with the unfinished run")
    result = {}
    for workload in policy.workloads:
        rows = rows_of(workload, found[workload.name])
        result[workload.name] = [row.to_json() for row in rows]
        if rows:
            console.print(f"\n{workload.name}: {workload.says}")
            console.print(speeds(workload, rows))
            for row in rows:
                console.print(f"  {row.name}: {row.says}", highlight=False)
            console.print(phases(workload, rows))
            console.print(seconds(rows))
    if given.json:
        given.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
