"""Tests whether speculation changes what is learnt: the demo's run with and without it, two seeds each.

    python benchmarks/learning.py --policy runs/demo-policy --out runs/learning [--steps 12] [--seeds 1,2]

Each run is `specrl run` on examples/demo/run.yaml; only the speculation and the seed differ. Printed: the validation
accuracy by policy version of each run, and a test that both kinds of run learn alike. For every version the means of
both kinds may differ by at most `z` standard errors: z = 3, with Bonferroni's correction over the versions. The
standard error is that of a difference of means of independent accuracies over the same number of problems, p(1-p)/n,
plus the spread between seeds, which is estimated from the runs.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from statistics import mean, variance

from demo_runs import run
from rich.console import Console
from rich.table import Table

from specrl.launcher.run_directory import RunDirectory
from specrl.report.reading import load_run

KINDS = {"none": "{none: {}}", "eagle3": "{eagle3: {numDraftTokens: 3}}"}
Z = 3.0


def accuracies(kind: str, seed: int, arguments: argparse.Namespace) -> dict[int, tuple[float, int]]:
    """Train one run to its end. Returns accuracy and number of problems by policy version."""
    fields = {
        "model.path": json.dumps(str(arguments.policy.resolve())),
        "generation.speculation": KINDS[kind],
        "schedule.seed": str(seed),
        "schedule.steps": str(arguments.steps),
        "validation.everySteps": str(max(1, arguments.steps // 3)),
    }
    found = load_run(RunDirectory(run(fields, arguments.out.resolve() / f"{kind}-{seed}")))
    return {report.policy_version: (report.reward, report.problems) for report in found.validations}


def distance(first: list[float], second: list[float], problems: int) -> float:
    """Compute the difference of the two means in standard errors."""
    pooled = mean(first + second)
    sampling = pooled * (1 - pooled) / problems * (1 / len(first) + 1 / len(second))
    seeds = sum(variance(values) / len(values) for values in (first, second) if len(values) > 1)
    return abs(mean(first) - mean(second)) / math.sqrt(sampling + seeds) if sampling + seeds else 0.0


def main() -> None:
    """Train the four runs and compare them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; finished ones are not repeated")
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    arguments = parser.parse_args()
    console = Console()
    curves = {kind: [accuracies(kind, s, arguments) for s in arguments.seeds] for kind in KINDS}
    versions = sorted(set.intersection(*(set(curve) for kind in curves.values() for curve in kind)))
    table = Table("version", *(f"{kind} seed {seed}" for kind in KINDS for seed in arguments.seeds), "distance")
    limit = Z + math.sqrt(2 * math.log(len(versions)))
    worst = 0.0
    for version in versions:
        values = {kind: [curve[version][0] for curve in curves[kind]] for kind in KINDS}
        apart = distance(values["none"], values["eagle3"], curves["none"][0][version][1])
        worst = max(worst, apart)
        cells = [f"{value:.3f}" for kind in KINDS for value in values[kind]]
        table.add_row(str(version), *cells, f"{apart:.2f} s.e.")
    console.print(table)
    verdict = "overlap" if worst <= limit else "DIFFER"
    console.print(f"the curves {verdict}: largest distance {worst:.2f} standard errors, limit {limit:.2f}")
    sys.exit(0 if worst <= limit else 1)


if __name__ == "__main__":
    main()
