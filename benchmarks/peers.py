"""Compares whole steps of specrl with those of TRL's GRPOTrainer, on one machine.

    python -m benchmarks.peers --policy runs/demo-policy --out runs/peers                     20 runs
    python -m benchmarks.peers --policy runs/demo-policy --out runs/peers --turns 3 --arms specrl-lag0,trl-vllm-2

Both train the demo (examples/demo/run.yaml): the same policy, prompts, verifier, group size, sampling, loss, optimizer
and dtype, with one thread for each of two processes or ranks, or two threads for one. specrl runs as in the demo, with
its canary, its durable store and its drafter's training, but without validations and checkpoints. The arm
"TRL, its batches" has TRL's own micro-batches of 8 rollouts and gradient checkpointing.

Every turn runs all arms; every other turn in reverse order. The first two steps of a run warm up, and the last one has
no next step that is sampled meanwhile. These three are left out. Measured of the others, as means over a run:

- seconds of a trained step, and CPU seconds of a step, of all processes of the run
- generation: seconds in which the trainer waited for rollouts (specrl), or that the first rank generated (TRL)
- weight sync: of specrl with its canary
- the start: seconds and CPU seconds from the command to the end of the first step
- reward after equal time: mean of the last three steps that an arm had ended when the first arm of that turn ended its
  last one. The time runs from the end of each arm's first step.

Printed, as Markdown: means over the turns in which the arm and "TRL, vLLM, two ranks" have finished. Ratios are to that
arm in the same turn. In brackets are 95 % intervals by Student's t over the turns.

Finished arms are kept in --out, and are not repeated. The same command continues after Ctrl-C, and may ask for more
turns. An EAGLE-3 drafter is made at the start (--drafter takes another one). TRL is one of this checkout's development
packages (`make setup`).
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

import psutil
from benchmarks.demo_runs import RUN_FILE, Failed, begin, call, identify, make_drafter, read_kept, write_kept
from benchmarks.loss_curves import render_rows
from benchmarks.peers_trl import TRANSFORMERS, VLLM, StepLine

from specrl.files import replace_file
from specrl.formats.reports import StepReport
from specrl.formats.statistics.mean_reward import student_interval
from specrl.spec.yaml_input import quote_yaml

WARM_UP_STEPS = 2
REWARD_STEPS = 3
FEWEST_STEPS = 5
GLANCE_S = 0.05
PROGRESS_S = 10.0
TRL_SCRIPT = Path(__file__).with_name("peers_trl.py")
RESULTS = Path(__file__).with_name("results") / "peers.json"
NONE = "{none: {}}"
EAGLE3 = "{eagle3: {numDraftTokens: 3, path: DRAFTER}}"


@dataclass(frozen=True)
class SpecrlArm:
    """A way to train with specrl."""

    name: str
    says: str
    speculation: str
    lag: int


@dataclass(frozen=True)
class TrlArm:
    """A way to train with TRL. micro_batch: rollouts in a forward pass of one rank."""

    name: str
    says: str
    generation: str
    ranks: int
    micro_batch: int
    options: tuple[str, ...] = ()


Arm = SpecrlArm | TrlArm
REFERENCE = "trl-vllm-2"
ARMS: tuple[Arm, ...] = (
    SpecrlArm("specrl-lag0", "specrl, no drafts, lag 0", NONE, 0),
    SpecrlArm("specrl-lag1", "specrl, no drafts, lag 1", NONE, 1),
    SpecrlArm("specrl-eagle3-lag0", "specrl, EAGLE-3, lag 0", EAGLE3, 0),
    SpecrlArm("specrl-eagle3-lag1", "specrl, EAGLE-3, lag 1", EAGLE3, 1),
    TrlArm("trl-vllm-2-uncorrected", "TRL, vLLM, two ranks, uncorrected", VLLM, 2, 16, ("--without-correction",)),
    TrlArm(REFERENCE, "TRL, vLLM, two ranks", VLLM, 2, 16),
    TrlArm("trl-vllm-1", "TRL, vLLM, one process", VLLM, 1, 64),
    TrlArm("trl-transformers-2", "TRL, transformers, two ranks", TRANSFORMERS, 2, 16),
    TrlArm("trl-transformers-1", "TRL, transformers, one process", TRANSFORMERS, 1, 64),
    TrlArm("trl-defaults", "TRL, transformers, its batches", TRANSFORMERS, 1, 8, ("--gradient-checkpointing",)),
)
NAMES = tuple(arm.name for arm in ARMS)


class Mark(NamedTuple):
    """The end of a step. wall_s, cpu_s: since the command; the others are of the step alone."""

    wall_s: float
    cpu_s: float
    generation_s: float
    sync_s: float
    reward: float
    tokens: float


class Figures(NamedTuple):
    """Means of a run's measured steps. start_s, start_cpu_s: from the command to the end of the first step."""

    step_s: float
    cpu_s: float
    generation_s: float
    sync_s: float
    start_s: float
    start_cpu_s: float
    reward: float


class Estimate(NamedTuple):
    """A mean over turns, and its 95 % interval; None if one turn, or equal values, gave none."""

    mean: float
    interval: tuple[float, float] | None

    def __str__(self) -> str:
        if self.interval is None:
            return f"{self.mean:.2f}"
        low, high = self.interval
        return f"{self.mean:.2f} ({low:.2f} to {high:.2f})"


Turn = Mapping[str, Sequence[Mark]]
"""The marks of each arm of one turn, by name."""


def read_specrl_step(line: str) -> StepLine:
    """Read a line of a run's metrics.jsonl."""
    report = StepReport.model_validate_json(line)
    seconds = report.phases
    return StepLine(report.step, report.reward or 0.0, report.tokens, seconds.generation, seconds.prepare)


def read_trl_step(line: str) -> StepLine:
    """Read a line that peers_trl.py wrote."""
    return StepLine(**json.loads(line))


def compute_equal_time(turn: Turn) -> float:
    """Return the seconds from the end of the first step to that of the last, of the fastest arm."""
    return min(marks[-1].wall_s - marks[0].wall_s for marks in turn.values())


def compute_figures(marks: Sequence[Mark], equal_s: float) -> Figures:
    """Compute the figures of a run of at least FEWEST_STEPS steps. equal_s: the time of which the reward is."""
    before = marks[WARM_UP_STEPS - 1]
    measured = marks[WARM_UP_STEPS:-1]
    ended = [mark.reward for mark in marks if mark.wall_s - marks[0].wall_s <= equal_s]
    return Figures(
        step_s=(measured[-1].wall_s - before.wall_s) / len(measured),
        cpu_s=(measured[-1].cpu_s - before.cpu_s) / len(measured),
        generation_s=fmean(mark.generation_s for mark in measured),
        sync_s=fmean(mark.sync_s for mark in measured),
        start_s=marks[0].wall_s,
        start_cpu_s=marks[0].cpu_s,
        reward=fmean(ended[-REWARD_STEPS:]),
    )


def estimate(values: Sequence[float]) -> Estimate:
    """Estimate the mean over turns."""
    return Estimate(fmean(values), student_interval(values))


def make_rows(turns: Sequence[Turn]) -> list[tuple[str, ...]]:
    """Make the table's rows in the order of ARMS, from the turns in which an arm and the reference have finished."""
    figures: dict[str, list[tuple[Figures, Figures]]] = {}
    for turn in turns:
        if REFERENCE in turn:
            equal_s = compute_equal_time(turn)
            reference = compute_figures(turn[REFERENCE], equal_s)
            for name, marks in turn.items():
                figures.setdefault(name, []).append((compute_figures(marks, equal_s), reference))
    return [make_row(arm, figures[arm.name]) for arm in ARMS if arm.name in figures]


def make_row(arm: Arm, pairs: Sequence[tuple[Figures, Figures]]) -> tuple[str, ...]:
    """Make an arm's row. pairs: its figures and the reference's, by turn."""
    means = Figures(*(fmean(values) for values in zip(*(own for own, _ in pairs), strict=True)))
    return (
        arm.says,
        str(len(pairs)),
        f"{means.step_s:.2f}",
        str(estimate([own.step_s / reference.step_s for own, reference in pairs])),
        f"{means.cpu_s:.2f}",
        str(estimate([own.cpu_s / reference.cpu_s for own, reference in pairs])),
        str(estimate([own.generation_s for own, _ in pairs])),
        f"{means.sync_s:.2f}",
        f"{means.step_s - means.generation_s - means.sync_s:.2f}",
        f"{means.start_s:.0f}",
        f"{means.start_cpu_s:.0f}",
        str(estimate([own.reward for own, _ in pairs])),
    )


COLUMNS = (
    "arm",
    "turns",
    "step, s",
    "ratio",
    "CPU, s",
    "ratio",
    "generation, s",
    "weight sync, s",
    "rest, s",
    "start, s",
    "start, CPU s",
    "reward after equal time",
)


def make_reporter(describe: Callable[[], str]) -> Callable[[], None]:
    """Make a function that prints the progress, at most every PROGRESS_S seconds."""
    began = said = time.monotonic()

    def report() -> None:
        nonlocal said
        if time.monotonic() - said >= PROGRESS_S:
            said = time.monotonic()
            print(f"{describe()}, {said - began:.0f} s", flush=True)

    return report


class StepWatcher:
    """Looks at a run from outside: marks the end of each step, and prints progress."""

    def __init__(self, says: str, steps: int, read: Callable[[str], StepLine], folder: Path, pattern: str) -> None:
        self.marks: list[Mark] = []
        self._read = read
        self._folder = folder
        self._pattern = pattern
        self._me = psutil.Process()
        self._cpu_s = self._tree_cpu_s()
        self._began = time.monotonic()
        self._report = make_reporter(lambda: f"{says}: {len(self.marks)} of {steps} steps")

    def look(self) -> None:
        """Mark the steps that have ended since the last look."""
        now = time.monotonic()
        for line in self._read_lines()[len(self.marks) :]:
            step = self._read(line)
            self.marks.append(
                Mark(
                    wall_s=now - self._began,
                    cpu_s=self._tree_cpu_s() - self._cpu_s,
                    generation_s=step.generation_s,
                    sync_s=step.sync_s,
                    reward=step.reward,
                    tokens=step.tokens,
                )
            )
        self._report()

    def _read_lines(self) -> list[str]:
        """Return the lines of the run's file that are whole."""
        for file in self._folder.glob(self._pattern):
            return [line for line in file.read_text(encoding="utf-8").splitlines(True) if line.endswith("\n")]
        return []

    def _tree_cpu_s(self) -> float:
        """CPU seconds of all processes below this one, those that ended included."""
        own = self._me.cpu_times()
        total = own.children_user + own.children_system
        for process in self._me.children(recursive=True):
            try:
                total += sum(process.cpu_times()[:4])  # user, system, and both of children that ended
            except psutil.Error:
                continue  # it ended meanwhile
        return total


@dataclass
class Benchmark:
    """The policy, the drafter and the folder that all arms share."""

    policy: Path
    drafter: Path
    out: Path
    steps: int

    def load_marks(self, turn: int, arm: Arm) -> list[Mark] | None:
        """Return the marks of a finished arm; None if there is none with these settings, policy and drafter."""
        try:
            found = read_kept(self._marks_file(turn, arm), self._identify(arm))
        except Failed:
            return None
        return None if found is None else [Mark(**mark) for mark in found["marks"]]

    def load_turns(self, turns: int) -> list[Turn]:
        """Return the marks of all arms that have finished, by turn."""
        found = []
        for turn in range(1, turns + 1):
            marks = {arm.name: self.load_marks(turn, arm) for arm in ARMS}
            found.append({name: some for name, some in marks.items() if some is not None})
        return found

    def run_arm(self, turn: int, turns: int, arm: Arm) -> None:
        """Run one arm to its end and keep its marks. Raises Failed."""
        folder = self.out / f"turn-{turn}" / arm.name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        says = f"turn {turn} of {turns}, {arm.says}"
        if isinstance(arm, SpecrlArm):
            command = self._specrl_command(arm, folder, turn)
            watcher = StepWatcher(says, self.steps, read_specrl_step, folder, "*/metrics.jsonl")
        else:
            command = self._trl_command(arm, folder, turn)
            watcher = StepWatcher(says, self.steps, read_trl_step, folder, "steps.jsonl")
        call(command, folder.with_suffix(".log"), watcher.look, GLANCE_S)
        watcher.look()
        if len(watcher.marks) != self.steps:
            raise Failed(f"{len(watcher.marks)} of {self.steps} steps; see {folder.with_suffix('.log')}")
        self.keep_marks(turn, arm, watcher.marks)
        shutil.rmtree(folder)  # checkpoints and policies

    def keep_marks(self, turn: int, arm: Arm, marks: Sequence[Mark]) -> None:
        """Keep the marks of a finished arm."""
        content = {"marks": [mark._asdict() for mark in marks]}
        write_kept(self._marks_file(turn, arm), self._identify(arm), content)

    def _identify(self, arm: Arm) -> str:
        return identify([RUN_FILE, self.policy, self.drafter, self.steps, asdict(arm)])

    def _marks_file(self, turn: int, arm: Arm) -> Path:
        return self.out / f"turn-{turn}" / f"{arm.name}.json"

    def _specrl_command(self, arm: SpecrlArm, folder: Path, seed: int) -> list[str]:
        fields = {
            "model.path": quote_yaml(self.policy),
            "generation.speculation": arm.speculation.replace("DRAFTER", quote_yaml(self.drafter)),
            "schedule.maxPolicyLag": str(arm.lag),
            "schedule.steps": str(self.steps),
            "schedule.seed": str(seed),
            "validation": "null",
            "checkpoint.everySteps": "1000",
        }
        return begin(fields, folder, "run")

    def _trl_command(self, arm: TrlArm, folder: Path, seed: int) -> list[str]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={arm.ranks}"]
        return [
            sys.executable,
            *(launcher if arm.ranks > 1 else ()),
            str(TRL_SCRIPT),
            f"--run-file={RUN_FILE}",
            f"--policy={self.policy}",
            f"--steps-file={folder / 'steps.jsonl'}",
            f"--steps={self.steps}",
            f"--seed={seed}",
            f"--generation={arm.generation}",
            f"--micro-batch={arm.micro_batch}",
            f"--threads={2 // arm.ranks}",
            *arm.options,
        ]


def order_arms(arms: Sequence[Arm], turn: int) -> list[Arm]:
    """Order the arms of a turn. Every other turn is reversed, so that no arm is always first."""
    return list(arms) if turn % 2 else list(reversed(arms))


def write_results(file: Path, policy: Path, turns: Sequence[Turn]) -> None:
    """Write the marks of all arms."""
    file.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"turn": number, "arm": name, **{key: [round(getattr(mark, key), 3) for mark in marks] for key in Mark._fields}}
        for number, turn in enumerate(turns, 1)
        for name, marks in turn.items()
    ]
    lines = ",\n".join(json.dumps(row) for row in rows)
    with replace_file(file) as scratch:
        scratch.write_text(f'{{"policy": {json.dumps(policy.name)}, "runs": [\n{lines}\n]}}\n', encoding="utf-8")


def parse_arms(text: str) -> list[Arm]:
    """Parse the names of arms."""
    names = text.split(",")
    if not set(names) <= set(NAMES) or REFERENCE not in names:
        raise argparse.ArgumentTypeError(f"must be some of {','.join(NAMES)}, with {REFERENCE}, got {text}")
    return [arm for arm in ARMS if arm.name in names]


def main() -> None:
    """Run the missing arms, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", type=Path, required=True, help="base policy, as `specrl demo` leaves it")
    parser.add_argument("--out", type=Path, required=True, help="folder for the runs of this policy")
    parser.add_argument("--drafter", type=Path, help="EAGLE-3 drafter of the policy (default: one is made in --out)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="JSON file (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=2, help="runs of each arm (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=8, help="steps of a run (default: %(default)s)")
    parser.add_argument("--arms", type=parse_arms, default=list(ARMS), help=f"default: {','.join(NAMES)}")
    given = parser.parse_args()
    if given.steps < FEWEST_STEPS:
        parser.error(f"--steps must be at least {FEWEST_STEPS}, got {given.steps}")
    if find_spec("trl") is None:
        parser.error("--policy must be trained by TRL, too, and this Python has no trl; run `make setup`")
    policy = given.policy.resolve()
    out = given.out.resolve()
    if given.drafter is None:
        try:
            drafter = make_drafter(policy, out, make_reporter(lambda: "making the drafter"))
        except Failed as error:
            sys.exit(str(error))
    else:
        drafter = given.drafter.resolve()
    benchmark = Benchmark(policy, drafter, out, given.steps)
    for turn in range(1, given.turns + 1):
        for arm in order_arms(given.arms, turn):
            if benchmark.load_marks(turn, arm) is None:
                benchmark.run_arm(turn, given.turns, arm)
        turns = benchmark.load_turns(turn)
        write_results(given.results, policy, turns)
        print(f"runs of {given.steps} steps; ratios to {REFERENCE}\n")
        print(render_rows([COLUMNS, *make_rows(turns)], text_columns=1), flush=True)


if __name__ == "__main__":
    main()
