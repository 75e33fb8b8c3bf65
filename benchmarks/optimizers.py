"""Measures Muon beside AdamW: what a policy learns by reinforcement, seconds of a step, and memory of a rank.

    python benchmarks/optimizers.py --policy runs/demo-policy --out runs/optimizers     # all 18 runs; resumable
    python benchmarks/optimizers.py --policy ... --out ... --rates 1e-4,3e-4 --seeds 1  # fewer
    python benchmarks/optimizers.py --costs --out runs/optimizers                       # seconds and memory alone

Learning: `specrl run` on examples/demo/run.yaml without speculation and without policy lag, 6 prompts x 8 rollouts per
step, one update. Each optimizer is trained at each rate with each seed. Runs with the same seed have the same first
policy, prompts and sampling seeds. Printed is the accuracy of the last version on 128 problems, with its 95 % interval
over problems, each of which counts once for all seeds. Each optimizer's best rate is the one with the best last
accuracy over all seeds. There, Muon's accuracy less AdamW's has a 95 % interval over seeds (Student's t). The best of
three is too high for both.

Costs: training steps of a random Qwen3 with about 5.2 million weights at one rank and one CPU thread. Each optimizer is
measured in a process of its own, in turns. Printed: seconds, bytes of moments, and the largest resident size.
"""

from __future__ import annotations

import argparse
import multiprocessing
import resource
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import mean, median

from demo_runs import Failed, run
from loss_curves import Outcome, last_with_interval, mean_with_interval, render_rows
from losses import COMMON, outcome, progress_bar
from rich.console import Console

from specrl.spec.trainer import OptimizerKind
from specrl.spec.yaml_input import quote_yaml

RATES = {OptimizerKind.ADAMW: ("3e-5", "1e-4", "3e-4"), OptimizerKind.MUON: ("1e-4", "3e-4", "9e-4")}
"""Around the best rate of each optimizer: 9e-4 was tried for AdamW, too, and ruins the policy."""
COSTS_ROUNDS = 3
COSTS_STEPS = 6  # of each process; the first is not counted
MEGABYTE = 1e6


@dataclass(frozen=True, order=True)
class Kind:
    """An optimizer at a learning rate, which is the same for all its parameters."""

    optimizer: str
    rate: str

    @property
    def name(self) -> str:
        return f"{self.optimizer}-{self.rate}".lower()

    def fields(self, steps: int, seed: int) -> dict[str, str]:
        """Fields of the run file."""
        return COMMON | {
            "trainer.optimizer.kind": self.optimizer,
            "trainer.optimizer.learningRate": f'"{self.rate}"',
            "trainer.optimizer.updatesPerStep": "1",
            "schedule.maxPolicyLag": "0",
            "schedule.steps": str(steps),
            "schedule.seed": str(seed),
            "prompts.shuffleSeed": str(seed),
            "validation.everySteps": str(max(1, steps // 3)),
        }


Found = Mapping[Kind, Sequence[Outcome]]
"""Runs of each kind, one per seed, in the same order of seeds."""


def best_kind(found: Found, optimizer: str) -> Kind | None:
    """Return the kind of an optimizer whose last versions are the most accurate; None without runs."""
    of_optimizer = [kind for kind in found if kind.optimizer == optimizer]
    return max(of_optimizer, key=lambda kind: mean(run.last for run in found[kind]), default=None)


def learning_table(found: Found) -> str:
    """Render Markdown: a row per optimizer and rate."""
    rows = [("optimizer", "rate", "last accuracy", "mean accuracy", "reward of the last 3 steps", "runs")]
    for kind, runs in found.items():
        is_best = kind == best_kind(found, kind.optimizer)
        last = last_with_interval(runs)
        area = f"{mean(run.area for run in runs):.2f}"
        reward = f"{mean(mean(run.rewards[-3:]) for run in runs):.2f}"
        rows.append((kind.optimizer, kind.rate, f"**{last}**" if is_best else last, area, reward, str(len(runs))))
    return render_rows(rows, text_columns=1)


def comparison(found: Found) -> str:
    """Render a line: Muon less AdamW, each at its best rate, over pairs of runs with the same seed."""
    adamw, muon = (best_kind(found, kind.value) for kind in (OptimizerKind.ADAMW, OptimizerKind.MUON))
    if adamw is None or muon is None:
        return ""
    pairs = list(zip(found[muon], found[adamw], strict=False))
    last = mean_with_interval([ours.last - theirs.last for ours, theirs in pairs])
    area = mean_with_interval([ours.area - theirs.area for ours, theirs in pairs])
    return f"Muon at {muon.rate} less AdamW at {adamw.rate}: last accuracy {last}, mean accuracy {area}\n"


@dataclass(frozen=True)
class Costs:
    """What an optimizer costs on one rank. seconds: of each training step; the update is a part of it."""

    seconds: tuple[float, ...]
    moment_bytes: int
    weights: int
    resident_bytes: int


def measure_costs(kind: OptimizerKind) -> Costs:
    """Train some steps in this process."""
    import torch
    from trainer import Specrl, a_batch, a_spec, make_policy

    from specrl.trainer.megatron_backend.backend import MegatronBackend

    torch.set_num_threads(1)
    shape = argparse.Namespace(longest=256, dtype="float32", micro_batch_tokens=2048, threads=1, rollouts=16)
    with tempfile.TemporaryDirectory() as scratch:
        spec = a_spec(make_policy(Path(scratch) / "policy", hidden=256, layers=4), shape)
        optimizer = spec.trainer.optimizer.model_copy(update={"kind": kind})
        spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"optimizer": optimizer})})
        backend = MegatronBackend(spec)
        backend.load_model(None)
        contender = Specrl(backend, a_batch(shape.rollouts, shape.longest, backend.config.vocab_size))
        seconds = [contender.step()["train"] for _ in range(COSTS_STEPS)]
        policy = backend.models.policy
        parts = getattr(policy.optimizer, "chained_optimizers", None) or [policy.optimizer]
        moments = [
            value
            for part in parts
            for state in part.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.numel() > 1
        ]
        backend.close()
    return Costs(
        tuple(seconds[1:]),
        sum(value.nbytes for value in moments),
        backend.config.num_parameters,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    )


def costs_table(found: Mapping[OptimizerKind, Sequence[Costs]]) -> str:
    """Render Markdown: a row per optimizer."""
    rows = [
        ("optimizer", "seconds of a training step", "times AdamW's", "moments, MB", "bytes a weight", "resident, MB")
    ]
    base = [median(each.seconds) for each in found[OptimizerKind.ADAMW]]
    for kind, rounds in found.items():
        medians = [median(each.seconds) for each in rounds]
        ratios = [ours / theirs for ours, theirs in zip(medians, base, strict=True)]
        first = rounds[0]
        rows.append(
            (
                kind.value,
                f"{median(medians):.3f}",
                f"{median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})",
                f"{first.moment_bytes / MEGABYTE:.1f}",
                f"{first.moment_bytes / first.weights:.2f}",
                f"{median(each.resident_bytes for each in rounds) / MEGABYTE:.0f}",
            )
        )
    return render_rows(rows, text_columns=1)


def compare_costs(console: Console) -> str:
    """Measure both optimizers in turns, each time in a new process: Megatron's groups belong to the process."""
    found: dict[OptimizerKind, list[Costs]] = {kind: [] for kind in OptimizerKind}
    with console.status("measuring costs"):
        for _, kind in product(range(COSTS_ROUNDS), OptimizerKind):
            with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
                found[kind].append(pool.submit(measure_costs, kind).result())
    return costs_table(found)


def train_all(arguments: argparse.Namespace, console: Console) -> tuple[Found, int]:
    """Train the runs that are not finished. Returns all results, and the number of runs that failed."""
    chosen = arguments.rates.split(",") if arguments.rates else None
    kinds = [Kind(kind.value, rate) for kind in OptimizerKind for rate in chosen or RATES[kind]]
    found: dict[Kind, list[Outcome]] = {}
    failures = 0
    with progress_bar(arguments.steps * len(kinds) * len(arguments.seeds), console) as progress:
        (bar,) = progress.task_ids
        for seed, kind in product(arguments.seeds, kinds):
            policy = {"model.path": quote_yaml(arguments.policy.resolve())}
            progress.update(bar, description=f"{kind.name}, seed {seed}")
            try:
                folder = run(
                    policy | kind.fields(arguments.steps, seed), arguments.out.resolve() / f"{kind.name}-{seed}"
                )
                found.setdefault(kind, []).append(outcome(folder))
            except Failed as error:
                failures += 1
                console.print(f"{kind.name}, seed {seed} FAILED: {error}")
            except KeyboardInterrupt:
                sys.exit("interrupted; the same command continues with the unfinished run")
            progress.advance(bar, arguments.steps)
    return {kind: found[kind] for kind in kinds if kind in found}, failures


def main() -> None:
    """Train the chosen runs that are not finished, measure costs if asked, and show the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, help="base policy, as `specrl demo` leaves it; not for --costs")
    parser.add_argument("--out", type=Path, required=True, help="folder for runs and tables; runs are not repeated")
    parser.add_argument("--steps", type=int, default=12, help="steps of each run (default: %(default)s)")
    parser.add_argument("--rates", default="", help="learning rates of both (default: three for each)")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--costs", action="store_true", help="measure seconds and memory instead of learning")
    arguments = parser.parse_args()
    if not arguments.costs and arguments.policy is None:
        parser.error("--policy must name a policy folder; `specrl demo` leaves one in runs/demo-policy")
    console = Console()
    arguments.out.mkdir(parents=True, exist_ok=True)
    failures = 0
    if arguments.costs:
        tables = compare_costs(console)
    else:
        found, failures = train_all(arguments, console)
        tables = f"{learning_table(found)}\n{comparison(found)}"
    name = "costs.md" if arguments.costs else "learning.md"
    (arguments.out / name).write_text(tables, encoding="utf-8")
    console.print(tables, highlight=False, soft_wrap=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
