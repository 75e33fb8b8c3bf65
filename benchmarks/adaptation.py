"""What does keeping the drafter in step bring, and what does it cost? Runs of the demo, and trainer steps side by side.

    python benchmarks/adaptation.py --policy runs/demo-policy --out runs/adaptation [--steps 16] [--turns 16]

Two drafters are initialised on the policy's own rollouts: `in-domain` on the run's prompts, `weak` on those of another
problem family. Three runs of examples/demo/run.yaml differ in the drafter that they start from and in
`trainer.drafter.online` alone: weak adapted, in-domain adapted, in-domain as it was. Printed for each: acceptance
length (tokens per verification, the engine's own counts at the run's temperature) at the first and the last steps. To
be shown: the adapted weak drafter ends within 5 % of the adapted in-domain one; the one that is not adapted loses.

Then one trainer takes the same steps in turn with and without adaptation, in one process. Printed: the ratio of the two
times of each turn (log-probabilities and training), median and range; it is to be 1.07 at most, for batches as long as
the demo's are late in a run and as short as they are early. Finished parts in --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from rich.console import Console
from rich.table import Table

from specrl.coordinator.store import SqliteStore
from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, load_spec

RUN_FILE = Path(__file__).resolve().parents[1] / "examples" / "demo" / "run.yaml"
SPECRL = Path(sys.executable).with_name("specrl")
OTHER_FAMILY = "{generated: {family: ledger, count: 512, seed: 1}}"
DRAFTERS = {"in-domain": [], "weak": [f"prompts.source={OTHER_FAMILY}", "prompts.maxTokens=64"]}
RUNS = {
    "weak, adapted": ("weak", True),
    "in-domain, adapted": ("in-domain", True),
    "in-domain, fixed": ("in-domain", False),
}
TAIL = 3  # steps that the first and the last acceptance are means of
LENGTHS = {"long completions": (60, 112), "short completions": (4, 30)}
ROLLOUTS, GROUP = 64, 8  # of one rank of the demo
LIMIT, CLOSE = 1.07, 0.95


@dataclass(frozen=True)
class Setting:
    """What the command line says."""

    policy: Path
    out: Path
    steps: int
    turns: int

    def command(self, *arguments: str | Path, overrides: list[str]) -> None:
        """One specrl command on the demo's run file, its output beside ours."""
        policy = f"model.path={json.dumps(str(self.policy.resolve()))}"
        settings = [part for item in [policy, "validation=null", *overrides] for part in ("--set", item)]
        subprocess.run([SPECRL, *arguments, "-f", RUN_FILE, "--plain", *settings], check=True)


def drafter(setting: Setting, name: str) -> Path:
    """The initialised drafter of that name."""
    folder = setting.out / f"drafter-{name}"
    if not folder.exists():
        setting.command(
            *("drafter", "init", "--out", folder, "--runs", setting.out / "runs"),
            overrides=[f"name=drafter-{name}", *DRAFTERS[name]],
        )
    return folder


def acceptance(setting: Setting, start: str, *, is_adapted: bool) -> list[float]:
    """Acceptance length of the steps of one run; those in whose time nothing was drafted are left out."""
    runs = setting.out / f"run-{start}-{'adapted' if is_adapted else 'fixed'}-{setting.steps}"
    if not list(runs.glob("*/export")):
        head = drafter(setting, start).resolve()
        setting.command(
            *("run", "--runs", runs),
            overrides=[
                f"generation.speculation.eagle3.path={json.dumps(str(head))}",
                f"trainer.drafter.online={str(is_adapted).lower()}",
                f"schedule.steps={setting.steps}",
            ],
        )
    store = SqliteStore(next(iter(runs.glob("*/export"))).parent / "store.db")
    found = [report["acceptanceLength"] for report in store.reports() if report["acceptanceLength"] is not None]
    store.close()
    return found


def a_batch(step: int, turn: int, lengths: tuple[int, int], vocabulary: int) -> Batch:
    """Random tokens, as long as rollouts of the demo are: what a step costs does not depend on what they say.

    All batches of a turn are the same.
    """
    rng = np.random.default_rng([5, turn])
    rollouts = []
    for i in range(ROLLOUTS):
        length = int(rng.integers(*lengths))
        rollout = Rollout(
            rollout_id=f"r{i}",
            group_id=f"g{i // GROUP}",
            sample_index=i % GROUP,
            token_ids_T=rng.integers(4, vocabulary, length).astype(np.int32),
            sampler_logprobs_T=np.full(length, -3.0, dtype=np.float32),
            versions=(VersionSpan(step - 1, 0, length),),
            finish_reason=FinishReason.LENGTH,
            replica_id="",
            text="",
            seconds=0.0,
        )
        prompt = tuple(int(token) for token in rng.integers(4, vocabulary, int(rng.integers(18, 32))))
        rollouts.append(TrainRollout(prompt, rollout, float(rng.normal())))
    return Batch(step, tuple(rollouts))


def adapting(spec: RunSpec, *, is_adapted: bool) -> RunSpec:
    """The same run with adaptation on or off."""
    training = spec.trainer.drafter.model_copy(update={"online": is_adapted})
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"drafter": training})})


def time_ratios(setting: Setting, lengths: tuple[int, int], console: Console) -> list[float]:
    """Trainer time with adaptation over without, of each turn. The order within a turn alternates."""
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = load_spec(
        RUN_FILE, [f"model.path={json.dumps(str(setting.policy.resolve()))}", "trainer.parallelism.data=1"]
    )
    backend = MegatronBackend(spec)
    backend.load(None)
    ratios = []
    for turn in range(setting.turns + 1):
        seconds = {}
        for is_adapted in (True, False) if turn % 2 else (False, True):
            backend.spec = adapting(spec, is_adapted=is_adapted)
            batch = a_batch(backend.status().step + 1, turn, lengths, backend.config.vocab_size)
            started = time.process_time()  # of this process: others may be busy on the machine
            backend.train_step(batch)
            seconds[is_adapted] = time.process_time() - started
        if turn:  # the first one warms up
            ratios.append(seconds[True] / seconds[False])
            console.print(f"  turn {turn}: {seconds[False]:.2f} s without, {seconds[True]:.2f} s with adaptation")
    backend.close()
    return ratios


def main() -> None:
    """Initialise, train, compare, time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for drafters and runs")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=16)
    setting = Setting(**vars(parser.parse_args()))
    setting.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    console.print("[bold]trainer time with adaptation over without, medians of turns[/]")
    ratios = {}
    for name, lengths in LENGTHS.items():
        console.print(name)
        ratios[name] = time_ratios(setting, lengths, console)

    table = Table("drafter", f"first {TAIL} steps", f"last {TAIL} steps", "change")
    last = {}
    for number, (name, (start, is_adapted)) in enumerate(RUNS.items(), 1):
        console.print(f"[bold]run {number} of {len(RUNS)}: {name}[/]")
        lengths_of_steps = acceptance(setting, start, is_adapted=is_adapted)
        first, last[name] = mean(lengths_of_steps[:TAIL]), mean(lengths_of_steps[-TAIL:])
        table.add_row(name, f"{first:.2f}", f"{last[name]:.2f}", f"{last[name] - first:+.2f}")
    console.print(table)
    closeness = last["weak, adapted"] / last["in-domain, adapted"]
    kept = last["in-domain, fixed"] / last["in-domain, adapted"]
    console.print(f"weak over in-domain at the end: {closeness:.3f} (at least {CLOSE})")
    console.print(f"not adapted over adapted at the end: {kept:.3f} (below 1)")
    for name, values in ratios.items():
        low, high = min(values), max(values)
        console.print(f"trainer time, {name}: {median(values):.3f} ({low:.3f}-{high:.3f}), at most {LIMIT}")
    is_good = closeness >= CLOSE and kept < 1 and all(median(values) <= LIMIT for values in ratios.values())
    sys.exit(0 if is_good else 1)


if __name__ == "__main__":
    main()
