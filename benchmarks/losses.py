"""Measures losses and corrections on lagging rollouts: GRPO, DAPO, GSPO and CISPO at policy lags 0, 1 and 4.

    python benchmarks/losses.py --policy runs/demo-policy --out runs/losses                # all 28 runs; resumable
python benchmarks/losses.py --policy ... --out ... --only lag4                         # runs with this in their name
python benchmarks/losses.py --policy runs/words-policy --data words --out runs/losses  # problems for another policy

Each run is `specrl run` on examples/demo/run.yaml without speculation: real RL of a tiny policy with 6 prompts x 8
rollouts per step. A step makes two updates, so that clips of the objectives take effect. The learning rate is several
times the demo's, so that the policy changes quickly. Runs of one table have the same first policy, prompts and seeds.

Corrections: `none` treats lagging rollouts as fresh. `TIS` weighs tokens by trainer over sampler, at most 2. `ratio`,
at the greatest lag, uses the objective's own ratio to the sampler. At lag 0 all weights are 1, so a difference between
"TIS" and "none" there is noise between equal runs.

Data: `wheels`, the demo's problems; `words`, word problems like GSM8K's, for a policy that has been warmed up on them;
`gsm8k`, for a policy of yours that solves some of it, with `--gsm8k FOLDER`: the folder has GSM8K's train.jsonl and
test.jsonl, which are not part of the project.

Printed: the accuracy of the last version with its 95 % interval over problems, and the gain of each correction over
pairs of runs with the same loss and seed, with a 95 % interval over the pairs. `--write FOLDER` writes the tables and a
picture of the curves. Finished runs stay in --out, so the same command continues after Ctrl-C.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import mean

from demo_runs import Failed, run
from loss_curves import Kind, Outcome, kinds, picture, table, worth
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from specrl.launcher.run_directory import RunDirectory
from specrl.report.reading import load_run
from specrl.spec.yaml_input import quote_yaml

COMMON = {
    "generation.speculation": "{none: {}}",
    "generation.replicas": "1",
    "generation.kvCacheMib": "64",
    "trainer.parallelism.data": "1",
    "trainer.optimizer.updatesPerStep": "2",
    "canary.everySteps": "0",
    "checkpoint.everySteps": "1000",
    "schedule.promptsPerStep": "6",
    "schedule.groupSize": "8",
}
WORDS = "{{generated: {{family: wordProblem, count: {count}, seed: {seed}}}}}"
DATA = ("wheels", "words", "gsm8k")


def data_fields(data: str, gsm8k: Path | None) -> dict[str, str]:
    """Fields of the run file that depend on the problems."""
    if data == "words":
        return {
            "prompts.source": WORDS.format(count=512, seed=1),
            "validation.source": WORDS.format(count=128, seed=2026),
            "prompts.maxTokens": "96",
            "model.maxLength": "256",
        }
    if data == "gsm8k":
        assert gsm8k is not None, "main has asked for it"
        sources = {
            section: f"{{jsonl: {{path: {quote_yaml(gsm8k.resolve() / file)}}}}}"
            for section, file in (("prompts.source", "train.jsonl"), ("validation.source", "test.jsonl"))
        }
        limits = {"validation.limit": "128", "prompts.maxTokens": "512", "model.maxLength": "1024"}
        return sources | limits | {"generation.sampling.maxTokens": "512", "rewards": "{math: {}}"}
    return {}


def outcome(folder: Path) -> Outcome:
    """Read the results of a finished run."""
    found = load_run(RunDirectory(folder))
    steps = found.steps
    validations = sorted(found.validations, key=lambda report: report.policy_version)
    return Outcome(
        accuracies=tuple((report.policy_version, report.reward) for report in validations),
        problems=validations[-1].problems,
        rewards=tuple(report.reward for report in steps if report.reward is not None),
        lag=mean(report.policy_lag_mean for report in steps),
        effective=mean(report.effective_sample_size for report in steps),
        clipped=mean(report.clip_fraction for report in steps),
    )


class Runs:
    """Folder and common fields of the runs."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._out: Path = arguments.out.resolve()
        self._fields = COMMON | data_fields(arguments.data, arguments.gsm8k)
        self._fields |= {
            "model.path": quote_yaml(arguments.policy.resolve()),
            "trainer.optimizer.learningRate": f'"{arguments.learning_rate}"',
            "schedule.steps": str(arguments.steps),
            "validation.everySteps": str(max(1, arguments.steps // 6)),
        }

    def made(self, kind: Kind, seed: int, progress: Progress) -> Outcome:
        """Train one run, or return what an earlier call left. Raises Failed."""
        fields = self._fields | kind.fields() | {"schedule.seed": str(seed), "prompts.shuffleSeed": str(seed)}
        (bar,) = progress.task_ids
        before = progress.tasks[bar].completed
        progress.update(bar, description=f"{kind.name}, seed {seed}")
        folder = run(
            fields, self._out / f"{kind.name}-{seed}", lambda steps: progress.update(bar, completed=before + steps)
        )
        progress.update(bar, completed=before + int(fields["schedule.steps"]))
        return outcome(folder)


@contextmanager
def progress_bar(steps: int, console: Console) -> Iterator[Progress]:
    """Mean over all steps of all runs."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.percentage:.0f} %"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        progress.add_task("", total=steps)
        yield progress


def main() -> None:
    """Train the chosen runs that are not finished, and show all results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs; finished ones are not repeated")
    parser.add_argument("--data", choices=DATA, default=DATA[0], help="problems (default: %(default)s)")
    parser.add_argument("--gsm8k", type=Path, help="folder with GSM8K's train.jsonl and test.jsonl, for --data gsm8k")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default: %(default)s)")
    parser.add_argument("--learning-rate", default="1.5e-4", help="learning rate of each run (default: %(default)s)")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1])
    parser.add_argument(
        "--only", default="", help="only runs whose names contain all of these words, such as grpo,lag4"
    )
    parser.add_argument("--write", type=Path, help="folder for losses-DATA.md and losses-DATA.svg")
    arguments = parser.parse_args()
    if arguments.data == "gsm8k" and arguments.gsm8k is None:
        parser.error("--data gsm8k must have --gsm8k FOLDER, which the project does not come with")
    chosen = [kind for kind in kinds(arguments.data) if all(word in kind.name for word in arguments.only.split(","))]
    if not chosen:
        names = "\n  ".join(kind.name for kind in kinds(arguments.data))
        parser.error(f"--only must leave runs, got {arguments.only}; they are\n  {names}")
    console = Console()
    runs = Runs(arguments)
    found: dict[Kind, list[Outcome]] = {}
    failures = 0
    with progress_bar(arguments.steps * len(chosen) * len(arguments.seeds), console) as progress:
        for kind in chosen:
            for seed in arguments.seeds:
                try:
                    found.setdefault(kind, []).append(runs.made(kind, seed, progress))
                except Failed as error:
                    failures += 1
                    console.print(f"{kind.name}, seed {seed} FAILED: {error}")
                except KeyboardInterrupt:
                    sys.exit("interrupted; the same command continues with the unfinished run")
    tables = f"{table(found)}\n{worth(found)}"
    console.print(tables, highlight=False, soft_wrap=True)
    if arguments.write is not None:
        arguments.write.mkdir(parents=True, exist_ok=True)
        (arguments.write / f"losses-{arguments.data}.md").write_text(tables, encoding="utf-8")
        (arguments.write / f"losses-{arguments.data}.svg").write_text(picture(found, arguments.data), encoding="utf-8")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
