"""Measures what online training of the drafter gains, and what it costs.

    python benchmarks/adaptation.py --policy runs/demo-policy --out runs/adaptation [--steps 16] [--turns 16]
    python benchmarks/adaptation.py --policy runs/demo-policy --out runs/draft-models --drafter draftModel --steps 40

Gain of an EAGLE-3 head: two drafters are initialised on the policy's own rollouts, `in-domain` on the run's prompts
and `weak` on those of another problem family. Four runs of examples/demo/run.yaml differ only in their first drafter
and in `trainer.drafter.online`. Printed for each: the acceptance length (tokens per verification, from the engine's
counters, at the run's temperature) at the first and the last steps. The benchmark passes if the adapted weak drafter
ends within 5 % of the adapted in-domain one, and the in-domain drafter that is not adapted ends below the adapted one.

Gain of `--drafter draftModel`: a draft model of one layer is distilled by `specrl drafter init`. Pairs of the demo's
run with half of its prompts, one for each seed, train it online or keep it frozen. The policy learns to write even
digits, which changes most of its tokens; with `--reward demo` it learns what the demo does, which changes few. Printed
for each step in tens: the acceptance length of both, their difference, and how far the policy has moved (K3's estimate
of the divergence from its first version, in nats per token). The benchmark passes if the difference over the last ten
steps is above 0 by its 95 % interval (Student's t over the means of the seeds).

Cost: one trainer takes the same steps alternately with and without adaptation, in one process. Printed: the ratio of
both times in each turn (log-probabilities and training), median and range. It must be at most 1.07, for batches as long
as late in the demo and as short as early in it. Finished parts in --out are not repeated.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median

import numpy as np
from demo_runs import RUN_FILE, Failed, initialise_drafter, overrides_of, run
from loss_curves import average_seeds, is_above_zero, mean_with_interval
from rich.console import Console
from rich.table import Table

from specrl.coordinator.ledger import SqliteStore
from specrl.files import write_folder
from specrl.records import Batch, FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec import RunSpec, load_spec
from specrl.spec.yaml_input import quote_yaml

HERE = Path(__file__).resolve().parent
OTHER_FAMILY = "{generated: {family: ledger, count: 512, seed: 1}}"
DRAFTERS: dict[str, dict[str, str]] = {
    "in-domain": {},
    "weak": {"prompts.source": OTHER_FAMILY, "prompts.maxTokens": "64"},
}
RUNS = {
    "weak, adapted": ("weak", True),
    "weak, fixed": ("weak", False),
    "in-domain, adapted": ("in-domain", True),
    "in-domain, fixed": ("in-domain", False),
}
TAIL = 3  # steps averaged for the first and the last acceptance length
LENGTHS = {"long completions": (60, 112), "short completions": (4, 30)}
ROLLOUTS = 64  # rollouts of one rank of the demo
GROUP = 8
LIMIT = 1.07
CLOSE = 0.95
SEEDS = (1, 2, 3)  # of the pairs; of two, the interval is three times as wide
TEN = 10  # steps of a row of the pairs' table
DRAFT_MODEL = "draftModel"
# No penalty worth the name: it only makes the run measure how far the policy has moved.
MEASURED_KL = {"trainer.loss.referenceKl": "{coefficient: 1e-9}"}
# Half of the demo, to save time.
HALF = {"generation.replicas": "1", "trainer.parallelism.data": "1", "schedule.promptsPerStep": "8"}
EVEN_DIGITS = f"{{function: 'even_digits:compute_reward', folder: {quote_yaml(HERE / 'even_digits')}}}"
# Fields of the pairs.
REWARDS: dict[str, dict[str, str]] = {
    "even-digits": {"rewards.exact": "null", "rewards.python": EVEN_DIGITS},
    "demo": {},
}
RATE = {"trainer.optimizer.learningRate": "5e-4"}  # of the policy in the pairs: at the demo's it hardly moves


@dataclass(frozen=True)
class Setting:
    """Options of the command line."""

    policy: Path
    out: Path
    steps: int
    turns: int
    drafter: str
    learning_rate: str
    reward: str

    def train(self, name: str, fields: dict[str, str]) -> Path:
        """Return the folder of the finished run of that name with these fields of the demo's run file."""
        return run(self._complete(fields), self.out.resolve() / name)

    def initialise(self, name: str, fields: dict[str, str]) -> Path:
        """Return the drafter of that name, initialised in a run with these fields. Exits if it cannot be made."""
        try:
            initialise_drafter(self._complete(fields), self.out.resolve() / name)
        except Failed as error:
            sys.exit(str(error))
        return self.out.resolve() / name

    def _complete(self, fields: dict[str, str]) -> dict[str, str]:
        return {"model.path": quote_yaml(self.policy.resolve()), "validation": "null", **fields}


def acceptance(setting: Setting, start: str, *, is_adapted: bool) -> list[float]:
    """Return the acceptance length of each step of a run. Steps without drafts are left out."""
    head = setting.initialise(f"drafter-{start}", DRAFTERS[start])
    run_folder = setting.train(
        f"run-{start}-{'adapted' if is_adapted else 'fixed'}-{setting.steps}",
        {
            "generation.speculation.eagle3.path": quote_yaml(head),
            "trainer.drafter.online": str(is_adapted).lower(),
            "schedule.steps": str(setting.steps),
        },
    )
    store = SqliteStore(run_folder / "store.db")
    found = [report["acceptanceLength"] for report in store.read_reports() if report["acceptanceLength"] is not None]
    store.close()
    return found


def small_model(setting: Setting) -> Path:
    """Return a draft model, distilled on the policy's rollouts: one layer, half as wide, with the same tokenizer."""
    fresh = setting.out / "fresh"
    if not fresh.exists():
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(setting.policy)
        config.update(
            {"num_hidden_layers": 1, "layer_types": ["full_attention"], "hidden_size": config.hidden_size // 2}
        )
        config.update({"intermediate_size": config.intermediate_size // 2, "num_attention_heads": 2})
        torch.manual_seed(0)
        with write_folder(fresh) as scratch:
            AutoModelForCausalLM.from_config(config).save_pretrained(scratch)
            for file in setting.policy.iterdir():
                if file.suffix != ".safetensors" and not (scratch / file.name).exists():
                    shutil.copy(file, scratch / file.name)
    return setting.initialise("draft-model", {**speculate(fresh), "trainer.drafter.learningRate": "3e-3"})


def speculate(draft_model: Path) -> dict[str, str]:
    """Return the field that drafts with a draft model."""
    path = quote_yaml(draft_model.resolve())
    return {"generation.speculation": f"{{draftModel: {{numDraftTokens: 3, path: {path}}}}}"}


def read_pair(setting: Setting, seed: int, *, is_online: bool) -> list[tuple[float, float]]:
    """Return the acceptance length and the divergence from the first policy of each step of one run of a pair.

    The acceptance length of a step without drafts is not a number.
    """
    run_folder = setting.train(
        f"pair-{setting.reward}-{seed}-{'online' if is_online else 'frozen'}-{setting.steps}",
        {
            **speculate(small_model(setting)),
            **HALF,
            **RATE,
            **MEASURED_KL,
            **REWARDS[setting.reward],
            "trainer.drafter.online": str(is_online).lower(),
            "trainer.drafter.learningRate": setting.learning_rate,
            "schedule.steps": str(setting.steps),
            "schedule.seed": str(seed),
        },
    )
    store = SqliteStore(run_folder / "store.db")
    found = [(report["acceptanceLength"] or np.nan, report["referenceKl"]) for report in store.read_reports()]
    store.close()
    return found


def compare_frozen(setting: Setting, console: Console) -> bool:
    """Compare online training with a frozen draft model. Returns whether it gains in the last ten steps."""
    pairs = [[read_pair(setting, seed, is_online=is_online) for is_online in (True, False)] for seed in SEEDS]
    table = Table("steps", "online", "frozen", "difference (95 %)", "divergence of the policy")
    gains: list[float] = []
    for first in range(0, setting.steps, TEN):
        cut = slice(first, first + TEN)
        online, frozen = (np.array([[length for length, _ in pair[i][cut]] for pair in pairs]) for i in (0, 1))
        moved = mean(kl for pair in pairs for _, kl in pair[1][cut])
        gains = average_seeds((online - frozen).tolist())
        table.add_row(
            f"{first + 1}-{first + online.shape[1]}",
            f"{np.nanmean(online):.2f}",
            f"{np.nanmean(frozen):.2f}",
            mean_with_interval(gains),
            f"{moved:.3f}",
        )
    console.print(table)
    return is_above_zero(gains)


def a_batch(step: int, turn: int, lengths: tuple[int, int], vocabulary: int) -> Batch:
    """Make batches of random tokens, as long as the demo's rollouts: the cost of a step does not depend on its tokens.

    All batches of a turn are equal.
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
    """Return the same run with adaptation on or off."""
    training = spec.trainer.drafter.model_copy(update={"online": is_adapted})
    return spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"drafter": training})})


def time_ratios(setting: Setting, lengths: tuple[int, int], console: Console) -> list[float]:
    """Measure trainer time with adaptation divided by the time without, per turn. The order alternates."""
    from specrl.trainer.megatron_backend import MegatronBackend

    fields = {"model.path": quote_yaml(setting.policy.resolve()), "trainer.parallelism.data": "1"}
    if setting.drafter == DRAFT_MODEL:
        fields |= speculate(small_model(setting))
    spec = load_spec(RUN_FILE, overrides_of(fields))
    backend = MegatronBackend(spec)
    backend.load_model(None)
    ratios = []
    for turn in range(setting.turns + 1):
        seconds = {}
        for is_adapted in (True, False) if turn % 2 else (False, True):
            backend.models.spec = adapting(spec, is_adapted=is_adapted)
            batch = a_batch(backend.get_status().step + 1, turn, lengths, backend.config.vocab_size)
            started = time.process_time()  # CPU time of this process: other processes may be busy on the machine
            backend.train_step(batch)
            seconds[is_adapted] = time.process_time() - started
        if turn:  # the first turn only warms up
            ratios.append(seconds[True] / seconds[False])
            console.print(f"  turn {turn}: {seconds[False]:.2f} s without, {seconds[True]:.2f} s with adaptation")
    backend.close()
    return ratios


def main() -> None:
    """Run the benchmark. Exits with 1 if a limit is exceeded."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for drafters and runs")
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--turns", type=int, default=16)
    parser.add_argument("--drafter", choices=["eagle3", DRAFT_MODEL], default="eagle3")
    parser.add_argument(
        "--learning-rate", default="1e-3", help="of the draft model in the pairs (default: %(default)s)"
    )
    parser.add_argument(
        "--reward", choices=list(REWARDS), default="even-digits", help="of the pairs (default: %(default)s)"
    )
    setting = Setting(**vars(parser.parse_args()))
    setting.out.mkdir(parents=True, exist_ok=True)
    console = Console()

    console.print("[bold]trainer time with adaptation over without, medians of turns[/]")
    ratios = {}
    for name, lengths in LENGTHS.items():
        console.print(name)
        ratios[name] = time_ratios(setting, lengths, console)

    is_cheap = all(median(values) <= LIMIT for values in ratios.values())
    if setting.drafter == DRAFT_MODEL:
        is_better = compare_frozen(setting, console)
        print_ratios(ratios, console)
        sys.exit(0 if is_better and is_cheap else 1)

    table = Table("drafter", f"first {TAIL} steps", f"last {TAIL} steps", "change")
    last = {}
    for number, (name, (start, is_adapted)) in enumerate(RUNS.items(), 1):
        console.print(f"[bold]run {number} of {len(RUNS)}: {name}[/]")
        lengths_of_steps = acceptance(setting, start, is_adapted=is_adapted)
        first = mean(lengths_of_steps[:TAIL])
        last[name] = mean(lengths_of_steps[-TAIL:])
        table.add_row(name, f"{first:.2f}", f"{last[name]:.2f}", f"{last[name] - first:+.2f}")
    console.print(table)
    closeness = last["weak, adapted"] / last["in-domain, adapted"]
    kept = last["in-domain, fixed"] / last["in-domain, adapted"]
    console.print(f"weak over in-domain at the end: {closeness:.3f} (at least {CLOSE})")
    console.print(f"not adapted over adapted at the end: {kept:.3f} (below 1)")
    print_ratios(ratios, console)
    sys.exit(0 if closeness >= CLOSE and kept < 1 and is_cheap else 1)


def print_ratios(ratios: dict[str, list[float]], console: Console) -> None:
    """Print the median and the range of trainer time with adaptation over without."""
    for name, values in ratios.items():
        low = min(values)
        high = max(values)
        console.print(f"trainer time, {name}: {median(values):.3f} ({low:.3f}-{high:.3f}), at most {LIMIT}")


if __name__ == "__main__":
    main()
