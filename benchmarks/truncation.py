"""Measures what the sampling sets of top-p are for: training with them, without them, and without top-p.

    python benchmarks/truncation.py --policy runs/demo-policy [--steps 30] [--seeds 1,2] [--top-p 0.9] [--temperature 1]

One engine and one trainer in turn: real RL of the demo's policy, without policy lag, as examples/demo/run.yaml has it
but for fewer prompts and a higher learning rate. The three ways share first policy, prompts and seeds:

    sets       top-p; log-probabilities of sampler and trainer are over the tokens that top-p left
    no sets    top-p; the trainer normalises over the whole vocabulary, as if it did not know of top-p
    whole      no top-p

Printed, as means over steps and seeds: mismatch between sampler and trainer, effective sample size, size of the sets,
mean reward of the first and last steps. Then mean reward on the demo's validation problems before and after, sampled as
in training, with its 95 % interval over problems, each averaged over seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory

from loss_curves import average_problems
from rich.console import Console
from rich.progress import track

from specrl.batching import assemble_batch
from specrl.coordinator.rollouts.sampling import derive_seed, make_training_sampling
from specrl.formats.statistics.mean_reward import student_interval
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.prompts import PromptStream, load_prompts, load_validation, open_sources
from specrl.records import Group, Prompt, Reward, Rollout, RolloutRequest, TrainMetrics, VersionSpan, WeightGroup
from specrl.rewards.choice import verifier_for
from specrl.spec import RunSpec, load_spec
from specrl.spec.yaml_input import quote_yaml
from specrl.trainer.megatron_backend import MegatronBackend

RUN_FILE = Path(__file__).resolve().parents[1] / "examples" / "demo" / "run.yaml"
SETS = "sets"
NO_SETS = "no sets"
WHOLE = "whole"
WAYS = (SETS, NO_SETS, WHOLE)
ENDS = 5  # steps averaged for the first and the last rewards


@dataclass(frozen=True)
class TrainedSteps:
    """The result of one way with one seed. before, after: rewards of the validation's answers, by problem."""

    metrics: list[TrainMetrics]
    rewards: list[float]
    before: list[float]
    after: list[float]


def make_spec(arguments: argparse.Namespace, seed: int, top_p: str) -> RunSpec:
    """Read the demo's run file with the benchmark's changes."""
    fields = {
        "model.path": quote_yaml(arguments.policy.resolve()),
        "generation.sampling.topP": f'"{top_p}"',
        "generation.sampling.temperature": f'"{arguments.temperature}"',
        "generation.speculation": "{none: {}}",
        "generation.replicas": "1",
        "generation.kvCacheMib": "64",
        "trainer.parallelism.data": "1",
        "trainer.optimizer.learningRate": f'"{arguments.learning_rate}"',
        "schedule.promptsPerStep": "8",
        "schedule.maxPolicyLag": "0",
        "schedule.steps": str(arguments.steps),
        "schedule.seed": str(seed),
        "prompts.shuffleSeed": str(seed),
    }
    return load_spec(RUN_FILE, [f"{name}={value}" for name, value in fields.items()])


class Trial:
    """One way of training: an engine, a trainer, and the versions between them."""

    def __init__(self, way: str, spec: RunSpec, spec_of_trainer: RunSpec, scratch: Path) -> None:
        self._way = way
        self._spec = spec
        self._scratch = scratch
        self._engine = VllmEngine(spec, "gen-0")
        self._trainer = MegatronBackend(spec_of_trainer)
        self._verifier = verifier_for(spec.rewards)

    async def train(self, steps: int, name: str) -> TrainedSteps:
        """Train, and validate the first and the last version."""
        prompts = load_prompts(self._spec)
        validation = load_validation(self._spec, open_sources(self._spec).validation)
        await self._engine.start()
        try:
            self._trainer.load_model(None)
            await self._publish(0)
            before = await self._validate(validation)
            metrics = []
            rewards = []
            for step in track(range(1, steps + 1), description=name):
                groups = await self._sample_groups(prompts, step)
                rewards.append(mean(float(group.rewards_G.mean()) for group in groups))
                batch = assemble_batch(step, groups, self._spec)
                metrics.append(await asyncio.to_thread(self._trainer.train_step, batch))
                await self._publish(step)
            return TrainedSteps(metrics, rewards, before, await self._validate(validation))
        finally:
            await self._engine.close()
            self._trainer.close()

    async def _publish(self, version: int) -> None:
        """Send the trainer's version to the engine, through a folder."""
        folder = self._scratch / f"{self._way.replace(' ', '-')}-{version}"
        sent = self._trainer.write_weights(folder)
        group = WeightGroup("files", "", 0, 1, 2, 60.0, "checkpoint", str(folder))
        await self._engine.receive_weights(group, self._trainer.describe_weights(), version)
        await self._engine.load_weights(sent)
        shutil.rmtree(folder)

    async def _sample(self, name: str, prompts: Sequence[Prompt], samples: int) -> list[list[Rollout]]:
        """Sample completions of each prompt, at seeds that depend on their name alone."""
        requests = [
            RolloutRequest(
                f"{name}-{prompt.position}-{sample}",
                f"{name}-{prompt.position}",
                sample,
                prompt.token_ids,
                make_training_sampling(
                    self._spec, derive_seed(self._spec.schedule.seed, name, prompt.position, sample)
                ),
            )
            for prompt in prompts
            for sample in range(samples)
        ]
        found = {item.rollout_id: item async for item in self._engine.generate(requests, admit_together=True)}
        ordered = [found[request.rollout_id] for request in requests]
        return [ordered[first : first + samples] for first in range(0, len(ordered), samples)]

    def _grade(self, prompt: Prompt, rollout: Rollout) -> float:
        return self._verifier.grade(prompt.answer, rollout.text, {}).reward

    async def _sample_groups(self, stream: PromptStream, step: int) -> list[Group]:
        count = self._spec.schedule.prompts_per_step
        prompts = [stream.prompt((step - 1) * count + place) for place in range(count)]
        groups = []
        answers = await self._sample(f"step-{step}", prompts, self._spec.schedule.group_size)
        for prompt, rollouts in zip(prompts, answers, strict=True):
            rewards = tuple(Reward(self._grade(prompt, rollout)) for rollout in rollouts)
            kept = tuple(self._as_trained(rollout, step - 1) for rollout in rollouts)
            groups.append(Group(rollouts[0].group_id, prompt, step, kept, rewards))
        return groups

    def _as_trained(self, rollout: Rollout, version: int) -> Rollout:
        assert rollout.versions == (VersionSpan(version, 0, rollout.total_length),)
        return replace(rollout, sets=None) if self._way == NO_SETS else rollout

    async def _validate(self, prompts: Sequence[Prompt]) -> list[float]:
        answers = await self._sample("validation", prompts, samples=2)
        return [
            mean(self._grade(prompt, rollout) for rollout in rollouts)
            for prompt, rollouts in zip(prompts, answers, strict=True)
        ]


def train_way(way: str, seed: int, arguments: argparse.Namespace) -> TrainedSteps:
    """Train one way with one seed."""
    spec = make_spec(arguments, seed, "1" if way == WHOLE else arguments.top_p)
    spec_of_trainer = make_spec(arguments, seed, "1") if way == NO_SETS else spec
    with TemporaryDirectory(prefix="specrl-truncation-") as scratch:
        trial = Trial(way, spec, spec_of_trainer, Path(scratch))
        return asyncio.run(trial.train(arguments.steps, f"{way}, seed {seed}"))


def format_interval(values: Sequence[float]) -> str:
    """Return a mean with its 95 % interval."""
    ends = student_interval(list(values))
    return f"{mean(values):.3f}" + (f" [{ends[0]:.3f}, {ends[1]:.3f}]" if ends is not None else "")


def format_table(found: dict[str, list[TrainedSteps]]) -> str:
    """Format the table of all ways, in Markdown."""
    names = ("", "mismatch, mean", "mismatch, KL", "effective sample size", "tokens in a set", "bytes a token")
    names += (f"reward, first {ENDS}", f"reward, last {ENDS}", "validation before", "validation after")
    lines = [names, ("---",) * len(names)]
    for way, trained in found.items():
        steps = [metrics for item in trained for metrics in item.metrics]
        sets = [metrics for metrics in steps if metrics.sampling_set_tokens is not None]
        lines.append(
            (
                way,
                f"{mean(metrics.mismatch_mean_abs for metrics in steps):.1e}",
                f"{mean(metrics.mismatch_kl for metrics in steps):.1e}",
                f"{mean(metrics.effective_sample_size for metrics in steps):.5f}",
                f"{mean(metrics.sampling_set_tokens or 0 for metrics in sets):.2f}" if sets else "",
                f"{mean(metrics.sampling_set_bytes or 0 for metrics in sets):.1f}" if sets else "",
                f"{mean(mean(item.rewards[:ENDS]) for item in trained):.3f}",
                f"{mean(mean(item.rewards[-ENDS:]) for item in trained):.3f}",
                format_interval(average_problems([item.before for item in trained])),
                format_interval(average_problems([item.after for item in trained])),
            )
        )
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Train all ways and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--steps", type=int, default=30, help="steps of each run (default: %(default)s)")
    parser.add_argument("--top-p", default="0.9", help="top-p of the first two ways (default: %(default)s)")
    parser.add_argument("--temperature", default="1", help="sampling temperature (default: %(default)s)")
    parser.add_argument("--learning-rate", default="2e-4", help="learning rate (default: %(default)s)")
    parser.add_argument("--seeds", type=lambda text: [int(part) for part in text.split(",")], default=[1, 2])
    arguments = parser.parse_args()
    found: dict[str, list[TrainedSteps]] = {way: [] for way in WAYS}
    for seed in arguments.seeds:
        for way in WAYS:
            found[way].append(train_way(way, seed, arguments))
            table = format_table({name: trained for name, trained in found.items() if trained})
            Console().print(table, highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
