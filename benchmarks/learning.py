"""Tests whether a policy learns the same with speculation as without it.

    python -m benchmarks.learning --policy runs/demo-policy --out runs/learning      about an hour of CPU a seed
    python -m benchmarks.learning --policy runs/demo-policy --out runs/learning --fault

Each run is `specrl run` on examples/demo/run.yaml for 12 steps. Runs differ in speculation (none, EAGLE-3, n-gram),
policy lag (0, 1) and seed. The accuracy of a run is its mean over the validations of versions 4, 8 and 12, of 512
problems each. A difference is that of two runs of one seed and one policy lag, with and without speculation.

Equivalence. Speculation is equivalent if the mean difference lies within 0.05 of zero, by two one-sided tests at 5 %
each (Schuirmann 1987): the 90 % interval of Student's t over the seeds must lie within the margin. All four
comparisons must pass. So the chance to pass although one of them is 0.05 off or more is at most 5 %, without a
correction for the number of comparisons (an intersection-union test; Berger 1982).

Power. Of the standard deviation of a difference, 0.018 is that of sampling alone: 2 runs, 3 validations, 512 problems
at an accuracy near 0.6. Runs of different seeds are taken to learn differently by 0.02. Together that is 0.027. With
six seeds, a comparison of two equal samplers then passes with a probability of 0.99, and all four with at least 0.95
(`compute_power`). The output has the power by the deviation that was measured, and the seeds that a power of 0.95
would take.

--fault trains with a sampler that is off by a little: it accepts drafts 1.5 times as often as their probability
allows. The exit code is 0 if the test refuses it.

Finished runs are kept in --out and in the results, and are not repeated. The same command goes on after Ctrl-C. Results
of another policy, drafter or run file are refused.
Exit code 1: not equivalent, or not known yet.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from statistics import NormalDist, fmean, stdev
from typing import Any, NamedTuple

from benchmarks.demo_runs import RUN_FILE, Failed, identify, make_drafter, read_kept, run, write_kept
from rich.console import Console
from rich.table import Table
from scipy.stats import t as student

from specrl.launcher.run_directory import RunDirectory
from specrl.report.reading import load_run
from specrl.spec.yaml_input import quote_yaml

MARGIN = 0.05  # of the mean accuracy
LEVEL = 0.05  # of each one-sided test
SEEDS = 6
WANTED_POWER = 0.95
STEPS = 12
PROBLEMS = 512
LAGS = (0, 1)
NONE = "none"
EAGLE3 = "EAGLE-3"
SPECULATIONS = {
    NONE: "{none: {}}",
    EAGLE3: "{eagle3: {numDraftTokens: 3, path: DRAFTER}}",
    "n-gram": "{ngram: {numDraftTokens: 3}}",
}
FAULTY = "EAGLE-3, faulty sampler"
RESULTS = Path(__file__).with_name("results") / "learning.json"
SERVICES = Path(__file__).resolve().parents[1] / "services"
CHECK = Path("specrl/generation/vllm_backend/extensions/sampling_check.py")
# Replaces the check of the sampler at the start, which would refuse it.
FAULT = (
    "def check_model_runner(model_runner: Any) -> None:\n",
    """def check_model_runner(model_runner: Any) -> None:
    from vllm.v1.sample import rejection_sampler

    draw = rejection_sampler.generate_uniform_probs
    rejection_sampler.generate_uniform_probs = lambda *args, **kwargs: draw(*args, **kwargs) / 1.5


def _check_model_runner(model_runner: Any) -> None:
""",
)


class Arm(NamedTuple):
    """Runs that differ in their seed alone."""

    speculation: str
    lag: int


class Comparison(NamedTuple):
    """Two arms of one policy lag, with and without speculation."""

    arm: Arm
    seeds: int
    difference: float
    """Mean accuracy with speculation, minus that without."""
    deviation: float
    """Standard deviation of the difference, over seeds."""
    low: float
    """Lower end of the 90 % interval of the difference."""
    high: float

    @property
    def is_equivalent(self) -> bool:
        """Whether both one-sided tests reject a difference of MARGIN."""
        return self.low > -MARGIN and self.high < MARGIN


def compare_arms(arm: Arm, differences: Sequence[float]) -> Comparison:
    """Compute the interval of the mean of at least two differences."""
    mean = fmean(differences)
    deviation = stdev(differences)
    half = float(student.ppf(1 - LEVEL, len(differences) - 1)) * deviation / math.sqrt(len(differences))
    return Comparison(arm, len(differences), mean, deviation, mean - half, mean + half)


def compute_power(deviation: float, seeds: int) -> float:
    """Return the probability that two equal samplers pass. deviation: of a difference, over seeds.

    The sample's deviation is taken to be the true one.
    """
    error = deviation / math.sqrt(seeds)
    if error == 0:
        return 1.0
    slack = MARGIN / error - float(student.ppf(1 - LEVEL, seeds - 1))
    return max(0.0, 2 * NormalDist().cdf(slack) - 1)


def count_seeds(deviation: float) -> int:
    """Return the fewest seeds with WANTED_POWER."""
    return next(seeds for seeds in range(2, 10_000) if compute_power(deviation, seeds) >= WANTED_POWER)


class Results:
    """The accuracies of finished runs, in a file."""

    def __init__(self, file: Path, policy: Path, drafter: Path) -> None:
        """Read the file of an earlier call. Raises Failed if it is of another policy, drafter or run file."""
        self._file = file
        self._policy = policy.name
        self._settings = identify([RUN_FILE, policy, drafter, STEPS, PROBLEMS, SPECULATIONS])
        self._rows: list[dict[str, Any]] = (read_kept(file, self._settings) or {"runs": []})["runs"]

    def find_accuracy(self, arm: Arm, seed: int) -> float | None:
        """Return the mean accuracy of a run; None if it is missing."""
        for row in self._rows:
            if (row["speculation"], row["lag"], row["seed"]) == (arm.speculation, arm.lag, seed):
                return fmean(row["accuracy"])
        return None

    def add_run(self, arm: Arm, seed: int, accuracy: Sequence[float]) -> None:
        """Add a run, and write the file."""
        row = {"speculation": arm.speculation, "lag": arm.lag, "seed": seed}
        self._rows.append(row | {"accuracy": [round(value, 4) for value in accuracy]})
        self._rows.sort(key=lambda it: (it["speculation"], it["lag"], it["seed"]))
        content = {"policy": self._policy, "steps": STEPS, "problems": PROBLEMS, "runs": self._rows}
        write_kept(self._file, self._settings, content)

    def compare_with_none(self, arm: Arm) -> Comparison | None:
        """Compare an arm with the one without speculation, by the seeds that both have. None if these are too few."""
        seeds = sorted({row["seed"] for row in self._rows})
        pairs = [(self.find_accuracy(arm, seed), self.find_accuracy(Arm(NONE, arm.lag), seed)) for seed in seeds]
        differences = [first - second for first, second in pairs if first is not None and second is not None]
        return compare_arms(arm, differences) if len(differences) > 1 else None


def train_arm(arm: Arm, seed: int, policy: Path, out: Path) -> list[float]:
    """Train one run to its end. Returns the accuracy of each validated version but the first."""
    name = EAGLE3 if arm.speculation == FAULTY else arm.speculation
    speculation = SPECULATIONS[name].replace("DRAFTER", quote_yaml(out / "drafter"))
    fields = {
        "model.path": quote_yaml(policy),
        "generation.speculation": speculation,
        "schedule.maxPolicyLag": str(arm.lag),
        "schedule.seed": str(seed),
        "schedule.steps": str(STEPS),
        "validation.everySteps": str(STEPS // 3),
        "validation.source.generated.count": str(PROBLEMS),
    }
    with use_fault(out) if arm.speculation == FAULTY else nullcontext():
        folder = run(fields, out / f"{arm.speculation}-lag{arm.lag}-seed{seed}".replace(", ", "-").replace(" ", "-"))
    validations = load_run(RunDirectory(folder)).validations
    return [report.reward for report in validations if report.policy_version > 0]


@contextmanager
def use_fault(out: Path) -> Iterator[None]:
    """Train with a copy of the sources, the sampler of which is off. Raises ValueError if that cannot be made."""
    sources = out / "faulty"
    shutil.rmtree(sources, ignore_errors=True)
    shutil.copytree(SERVICES, sources, ignore=shutil.ignore_patterns("__pycache__"))
    text = (sources / CHECK).read_text(encoding="utf-8")
    before, after = FAULT
    if before not in text:
        raise ValueError(f"{CHECK} must have the line {before!r}; correct FAULT")
    (sources / CHECK).write_text(text.replace(before, after), encoding="utf-8")
    known = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(sources), *([known] if known else [])])
    try:
        yield
    finally:
        if known is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = known


def print_comparisons(comparisons: Sequence[Comparison], console: Console) -> None:
    """Print one line for each comparison."""
    table = Table("speculation", "policy lag", "seeds", "difference", "90 % interval", "deviation", "power", "result")
    for it in comparisons:
        power = compute_power(it.deviation, it.seeds)
        needed = "" if power >= WANTED_POWER else f" ({count_seeds(it.deviation)} seeds for {WANTED_POWER})"
        table.add_row(
            it.arm.speculation,
            str(it.arm.lag),
            str(it.seeds),
            f"{it.difference:+.3f}",
            f"{it.low:+.3f} to {it.high:+.3f}",
            f"{it.deviation:.3f}",
            f"{power:.2f}{needed}",
            "equivalent" if it.is_equivalent else "not shown to be equivalent",
        )
    console.print(table)


def main() -> None:
    """Train the missing runs, and test."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file (default: %(default)s)")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="default: %(default)s")
    parser.add_argument("--fault", action="store_true", help="test that a faulty sampler is refused")
    given = parser.parse_args()
    if given.seeds < 2:
        parser.error(f"--seeds must be at least 2, got {given.seeds}")
    console = Console()
    policy = given.policy.resolve()
    out = given.out.resolve()
    try:
        results = Results(given.results, policy, make_drafter(policy, out))
    except Failed as error:
        sys.exit(str(error))
    if given.fault:
        tested = [Arm(FAULTY, 0)]
    else:
        tested = [Arm(speculation, lag) for speculation in SPECULATIONS if speculation != NONE for lag in LAGS]
    arms = [*(Arm(NONE, lag) for lag in LAGS if any(arm.lag == lag for arm in tested)), *tested]
    # Seed by seed, so that an interrupted benchmark has whole pairs.
    for seed in range(1, given.seeds + 1):
        for arm in arms:
            if results.find_accuracy(arm, seed) is None:
                console.print(f"seed {seed}: {arm.speculation}, policy lag {arm.lag} ...")
                results.add_run(arm, seed, train_arm(arm, seed, policy, out))
    found = [comparison for arm in tested if (comparison := results.compare_with_none(arm)) is not None]
    print_comparisons(found, console)
    are_equivalent = all(comparison.is_equivalent for comparison in found)
    if given.fault:
        console.print("the faulty sampler passes" if are_equivalent else "the faulty sampler is refused")
    sys.exit(0 if are_equivalent != given.fault else 1)


if __name__ == "__main__":
    main()
