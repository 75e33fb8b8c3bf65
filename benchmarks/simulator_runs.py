"""Measures how well `specrl simulate` predicts runs of this machine: thirteen runs, predicted from two others.

    python -m benchmarks.simulator_runs --run runs/demo-1 --out runs/simulator      # a finished run with a drafter

The trained policy and drafter of the run train on 24 prompts, epoch after epoch, with thirteen configurations of draft
length, live rollouts, length limit, replicas, policy lag and group size. Two more runs calibrate, one without and one
with drafts, at the largest batch and the longest answers. The predictions know only their calibration.json, and are
written to OUT/predictions.json before any of the thirteen runs is read. All fifteen take turns, each turn in another
order with the same seeds, so that a slow hour of the machine affects all of them. Whole epochs are compared, because
prompts decide how long answers are, and answers how long a step is. For the same reason the policy must not change, so
the learning rate is 1e-9.

The measured value is the median over turns of a run's mean step. First epochs are left out until the run has warmed up
as far as for a calibration. The noise is the median distance of a turn from that median. "gain" is the speed of
generation relative to the same configuration without drafts, if that is one of the thirteen and nothing is trained
meanwhile. A gain is as noisy as two engines, so these runs and those that calibrate have more turns. Exposed generation
is almost 0 in some configurations, so its error is given as a share of the measured step. Finished runs are kept, so
the same command continues after Ctrl-C.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
from benchmarks import demo_runs
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.formats.calibration import WARM_UP_STEPS
from specrl.launcher.run_directory import RunDirectory
from specrl.report.reading import load_run
from specrl.simulator.costs.measured import read_calibrations
from specrl.simulator.pipeline import PHASES
from specrl.simulator.scenarios.from_run import scenario_from_run
from specrl.simulator.scenarios.scenario_file import parse_scenario
from specrl.simulator.simulate import simulate_scenario
from specrl.spec import load_spec
from specrl.spec.yaml_input import quote_yaml

PROMPTS = 24
"""Prompts in an epoch."""

MEASURED_STEPS = 3
"""Steps of a run at least, in whole epochs."""


@dataclass(frozen=True)
class Configuration:
    """A configuration that is compared. k 0: no drafts. rollouts: per step, in groups of `group`."""

    k: int
    rollouts: int
    longest: int = 112
    replicas: int = 1
    lag: int = 0
    group: int = 8

    @property
    def name(self) -> str:
        """Name, also of its folder."""
        load = f"rollouts{self.rollouts}-group{self.group}-longest{self.longest}"
        return f"k{self.k}-{load}-replicas{self.replicas}-lag{self.lag}"

    @property
    def plain(self) -> Configuration:
        """The same configuration without drafts."""
        return replace(self, k=0)

    @property
    def epoch_steps(self) -> int:
        """Steps in which every prompt is trained once."""
        return PROMPTS * self.group // self.rollouts

    @property
    def warm_up_steps(self) -> int:
        """Whole epochs of steps that are not compared."""
        return self._whole(WARM_UP_STEPS)

    @property
    def steps(self) -> int:
        """Steps of a run."""
        return self.warm_up_steps + self._whole(MEASURED_STEPS)

    def _whole(self, steps: int) -> int:
        return -(-steps // self.epoch_steps) * self.epoch_steps

    def fields(self, run: Path) -> dict[str, str]:
        """Fields of the demo's run file."""
        export = (run / "export").resolve()
        speculation = "{none: {}}"
        if self.k:
            speculation = f"{{eagle3: {{numDraftTokens: {self.k}, path: {quote_yaml(export / 'drafter')}}}}}"
        return {
            "model.path": quote_yaml(export / "policy"),
            "prompts.source.generated.count": str(PROMPTS),
            "generation.speculation": speculation,
            "generation.sampling.maxTokens": str(self.longest),
            "generation.replicas": str(self.replicas),
            "generation.maxLiveRollouts": str(max(1, self.rollouts // self.replicas)),
            "trainer.parallelism.data": "1",
            "trainer.optimizer.learningRate": "1e-9",
            "trainer.drafter.online": "false",
            "schedule.promptsPerStep": str(self.rollouts // self.group),
            "schedule.groupSize": str(self.group),
            "schedule.maxPolicyLag": str(self.lag),
            "schedule.steps": str(self.steps),
            "validation": "null",
            "canary.everySteps": "0",
            "checkpoint.everySteps": "1000",
        }


CALIBRATIONS = (Configuration(0, 96), Configuration(3, 96))
CONFIGURATIONS = (
    Configuration(0, 64),
    Configuration(3, 64),
    Configuration(1, 64),
    Configuration(5, 64),
    Configuration(0, 16),
    Configuration(3, 16),
    Configuration(0, 64, longest=64),
    Configuration(3, 64, longest=64),
    Configuration(0, 64, lag=1),
    Configuration(3, 64, lag=1),
    Configuration(3, 32, replicas=2),
    Configuration(3, 32, lag=2),
    Configuration(3, 64, group=16),
)

COMPARED = tuple(one for one in CONFIGURATIONS if one.k and not one.lag and one.plain in CONFIGURATIONS)
"""Pair configurations with the same ones without drafts. A configuration that trains meanwhile has no gain."""


def predict(run: Path, calibrations: list[Path]) -> dict[str, Any]:
    """Seconds per step, exposed seconds per step, and gain, by configuration."""
    measured = read_calibrations(calibrations)
    found = {}
    for configuration in CONFIGURATIONS:
        spec = load_spec(demo_runs.RUN_FILE, demo_runs.overrides_of(configuration.fields(run)))
        outcome = simulate_scenario(parse_scenario(scenario_from_run(spec, measured, None)), measured)
        found[configuration.name] = {
            "stepS": outcome.speculative.step_s,
            "exposedS": outcome.speculative.exposed_generation_s,
            "gain": outcome.rollout_speedup,
            "notes": outcome.warnings,
        }
    return found


def measured_of(configuration: Configuration, folder: Path) -> dict[str, float]:
    """Means over the steps of a run after its warm-up."""
    steps = load_run(RunDirectory(folder)).steps[configuration.warm_up_steps :]
    return {
        "stepS": fmean(sum(getattr(step.phases, name) for name in PHASES) for step in steps),
        "exposedS": fmean(step.exposed_generation for step in steps),
    }


def noise_of(values: Sequence[float]) -> float:
    """Median distance of a value from the median, relative to the median."""
    middle = median(values)
    return median(abs(value / middle - 1) for value in values)


def score(predictions: Mapping[str, Any], turns: Mapping[str, list[dict[str, float]]], console: Console) -> None:
    """Print predictions beside measurements, with their errors."""
    table = Table(
        "configuration", "step, s", "measured", "off by", "noise", "exposed, s", "measured", "gain", "measured"
    )
    errors = []
    gains = []
    exposed = []
    noises = []
    gain_noises = []
    for configuration in CONFIGURATIONS:
        name = configuration.name
        own = predictions[configuration.name]
        found = {key: [turn[key] for turn in turns[name]] for key in ("stepS", "exposedS")}
        step_s = median(found["stepS"])
        errors.append(own["stepS"] / step_s - 1)
        noises.append(noise_of(found["stepS"]))
        exposed_s = median(found["exposedS"])
        exposed.append((own["exposedS"] - exposed_s) / step_s)
        gain = ""  # if nothing is trained meanwhile, all generation is exposed
        if configuration in COMPARED:
            plain = [turn["exposedS"] for turn in turns[configuration.plain.name]]
            each = [one / other for one, other in zip(plain, found["exposedS"], strict=True)]
            measured = median(each)
            gains.append(own["gain"] / measured - 1)
            gain_noises.append(noise_of(each))
            gain = f"{measured:.2f}"
        table.add_row(
            *(name, f"{own['stepS']:.3g}", f"{step_s:.3g}", f"{errors[-1]:+.0%}", f"{noises[-1]:.0%}"),
            *(f"{own['exposedS']:.3g}", f"{exposed_s:.3g}"),
            *((f"{own['gain']:.2f}", gain) if gain else ("", "")),
        )
    console.print(table)
    counts = sorted({len(own) for own in turns.values()})
    console.print(f"{len(errors)} configurations, {' or '.join(map(str, counts))} turns")
    for what, off_by in (("a step", errors), ("a gain", gains), ("exposed generation, in shares of a step", exposed)):
        distances = np.abs(off_by)
        console.print(f"{what}: median error {np.median(distances):.1%}, worst {distances.max():.1%}")
    console.print(f"a turn is {median(noises):.1%} off its configuration's median, a gain {median(gain_noises):.1%}")


def shuffled(configurations: Sequence[Configuration], turn: int) -> list[Configuration]:
    """Shuffle for each turn, equally in every run of this program."""
    return random.Random(turn).sample(configurations, len(configurations))  # noqa: S311 - not for security


def main() -> None:
    """Run all configurations in turns, predict from those that calibrate, and score."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="a finished run of the demo: its policy and drafter")
    parser.add_argument("--out", type=Path, required=True, help="folder of runs and predictions")
    parser.add_argument("--turns", type=int, default=5, help="turns of every configuration (default: %(default)s)")
    parser.add_argument(
        "--more-turns",
        type=int,
        default=4,
        help="further turns of runs that calibrate, and of those with a gain (default: %(default)s)",
    )
    asked = parser.parse_args()
    console = Console(width=150)
    every = (*CALIBRATIONS, *CONFIGURATIONS)
    noisy = (*CALIBRATIONS, *dict.fromkeys(one for pair in COMPARED for one in (pair, pair.plain)))
    order = [
        (configuration, turn)
        for turn in range(asked.turns + asked.more_turns)
        for configuration in shuffled(every if turn < asked.turns else noisy, turn)
    ]
    folders: dict[Configuration, list[Path]] = {configuration: [] for configuration in every}
    with Progress(console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=len(order))
        for configuration, turn in order:
            name = f"{configuration.name}-turn{turn}"
            bar.update(task, description=name)
            folders[configuration].append(demo_runs.run(configuration.fields(asked.run), asked.out / name))
            bar.advance(task)
    calibrations = [folder / "calibration.json" for one in CALIBRATIONS for folder in folders[one]]
    predictions = predict(asked.run, calibrations)
    (asked.out / "predictions.json").write_text(json.dumps(predictions, indent=1) + "\n", encoding="utf-8")
    turns = {one.name: [measured_of(one, folder) for folder in folders[one]] for one in CONFIGURATIONS}
    score(predictions, turns, console)


if __name__ == "__main__":
    main()
