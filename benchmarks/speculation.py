"""Measures whether the adaptive draft length finds the best length, and whether speculation can slow generation down.

    python benchmarks/speculation.py --run runs/demo-1                # the demo's policy with its trained drafter
    python benchmarks/speculation.py --spec run.yaml --policy MODEL --drafter HEAD --kept kept.json     # any other

Engines side by side: `none`; the trained drafter with the adaptive length; the same drafter with fixed lengths of 1 to
5; and with the adaptive length two more drafters, a useless one (random weights) and an adversarial one (the trained
head with its output layer negated, which proposes the least likely tokens). Each engine is a process, and two equal
processes differ by some percent all their lives, depending on where the machine placed them. So a second `none` is
measured, too: its ratio to the first shows how precise all ratios are. The fixed lengths share one engine, which swaps
places with the adaptive one at half time; a round, or a turn, combines one of each half.

Every table is printed a second time "at mean costs", which removes differences between processes. There, each step that
only decoded costs the mean of all engines' steps of its kind (live rollouts by half powers of two, and draft length;
engines with and without a drafter apart). Everything else keeps its measured time.

Every table is printed a third time by the CPU time of the engine: tokens per second that its processes, without the
front end, have computed. Other load on the machine changes that little. `--kept` keeps the slices of each load in a
file. A second run with the same file measures only the loads that are not in it. Slices of other models, another run
file or other options are refused. A slice must have ten steps or more,
so a model with long steps needs a longer `--slice` and `--learning`.

Two measurements on the same prompts:

    load    every engine keeps so many rollouts live. All engines but one are paused; that one computes for a fifth of a
            second, then the next, in another order each round, so that noise affects all equally. The controllers have
            twelve seconds to adapt to each load
    drain   a full batch at once until its last rollout finishes, so that the live batch falls from full to 1; in turns.
            Lengths are long-tailed as in RL (log-normal) unless the policy ends earlier. The engine does not know them:
            the benchmark aborts each answer at its length

Speeds are tokens per second relative to `none` in the same round or turn: the median and its 95 % interval. "against
the best" divides by the best fixed length at that load, which the controller does not know. Odd rounds choose that
length for even ones and even rounds for odd ones, because the best of several medians is biased in the rounds that
chose it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import math
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
from demo_runs import Failed, identify, identify_run, read_kept, write_kept
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.drafting.eagle3.head import load_head, write_untrained_head
from specrl.generation.compare import (
    LONGEST_ADAPTIVE,
    build_request,
    close_engines,
    parse_mechanism,
    replace_speculation,
)
from specrl.generation.vllm_backend import draft_length_client
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.models.policy_config import read_policy_config
from specrl.prompts import load_prompts
from specrl.prompts.stream import PromptStream
from specrl.records import RolloutRequest, StepCost
from specrl.spec import RunSpec, load_spec
from specrl.spec.generation import Eagle3

NONE = "none"
ANOTHER = "another none"
ADAPTIVE = "adaptive"
FIXED = "fixed"
USELESS = "useless drafter"
ADVERSARIAL = "adversarial drafter"
CONTROLLED = (ADAPTIVE, USELESS, ADVERSARIAL)
DRAIN = "drain"
MEDIAN_TOKENS = 20  # median and sigma of a drain's answer lengths, log-normal
SIGMA = 1.0
WATCH_S = 0.002  # a tenth of a step of a full batch
SLICE_S = 0.2  # ten steps or more; other noise of the machine lasts longer, and affects the neighbours, too
SETTLE_S = 0.02  # wait for the outputs of a paused engine's last step
LEARNING_S = 12.0  # seconds at a load for each controller
WARM_UP = 2  # rounds and turns that are not counted
CPU_TICK_S = 0.01  # the kernel counts CPU time in such ticks, so a short slice may have none


@dataclass(frozen=True)
class Mode:
    """An engine and its fixed length. None: the controller chooses the length."""

    name: str
    engine: VllmEngine
    length: int | None


Bin = tuple[int, int, int]


@dataclass(frozen=True)
class Slice:
    """Work of an engine in a turn. steps: count and seconds of steps that only decoded, by kind."""

    tokens: int
    seconds: float
    cpu_s: float
    steps: dict[Bin, tuple[int, float]]

    @property
    def speed(self) -> float:
        """Tokens per second as measured."""
        return self.tokens / self.seconds

    @property
    def speed_by_cpu(self) -> float:
        """Tokens per second of the engine's CPU time."""
        return self.tokens / max(self.cpu_s, CPU_TICK_S)

    def plus(self, other: Slice) -> Slice:
        """Add another turn."""
        steps = added([self.steps, other.steps])
        cpu_s = self.cpu_s + other.cpu_s
        return Slice(self.tokens + other.tokens, self.seconds + other.seconds, cpu_s, steps)

    def speed_at(self, mean_s: Mapping[Bin, float]) -> float:
        """Tokens per second if each step had cost the mean of its kind."""
        counted = sum(seconds for _, seconds in self.steps.values())
        expected = sum(count * mean_s[kind] for kind, (count, _) in self.steps.items())
        return self.tokens / (self.seconds - counted + expected)

    def to_json(self) -> list[Any]:
        """Serialise for the file of kept slices."""
        return [self.tokens, self.seconds, self.cpu_s, [[*kind, *sums] for kind, sums in self.steps.items()]]

    @classmethod
    def from_json(cls, found: list[Any]) -> Slice:
        """Read what `to_json` returned."""
        tokens, seconds, cpu_s, steps = found
        return cls(tokens, seconds, cpu_s, {(a, b, c): (count, sum_s) for a, b, c, count, sum_s in steps})


class CpuClocks:
    """CPU time of each engine's processes."""

    def __init__(self) -> None:
        self._processes: dict[int, list[psutil.Process]] = {}

    async def start(self, engine: VllmEngine) -> None:
        """Start an engine. Its processes are those that appear meanwhile."""
        before = set(psutil.Process().children(recursive=True))
        await engine.start()
        self._processes[id(engine)] = [*(set(psutil.Process().children(recursive=True)) - before)]

    def read(self, engine: VllmEngine) -> float:
        """Return the CPU seconds of an engine so far."""
        times = [process.cpu_times() for process in self._processes[id(engine)]]
        return sum(each.user + each.system for each in times)


CLOCKS = CpuClocks()


async def costs_of(engine: VllmEngine) -> dict[Bin, StepCost]:
    """Costs of the engine's steps so far, by kind."""
    return {cost.bin_key: cost for cost in (await engine.get_status()).step_costs}


def since(before: Mapping[Bin, StepCost], now: Mapping[Bin, StepCost]) -> dict[Bin, tuple[int, float]]:
    """Steps and seconds since `before`, by kind."""
    found = {kind: cost.minus(before.get(kind)) for kind, cost in now.items()}
    return {kind: (cost.steps, cost.seconds_sum) for kind, cost in found.items() if cost.steps}


def added(parts: Iterable[Mapping[Bin, tuple[int, float]]]) -> dict[Bin, tuple[int, float]]:
    """Sum steps and seconds of all turns, by kind."""
    sums: dict[Bin, tuple[int, float]] = {}
    for part in parts:
        for kind, (count, seconds) in part.items():
            known = sums.get(kind, (0, 0.0))
            sums[kind] = known[0] + count, known[1] + seconds
    return sums


def at_mean_costs(slices: Mapping[str, Sequence[Slice]]) -> dict[str, list[float]]:
    """Speeds by mode, with each step at the mean of its kind, over engines with a drafter or over those without."""
    found: dict[str, list[float]] = {}
    for names in ((NONE, ANOTHER), [name for name in slices if name not in (NONE, ANOTHER)]):
        sums = added(one.steps for name in names for one in slices[name])
        mean_s = {kind: seconds / count for kind, (count, seconds) in sums.items()}
        found |= {name: [one.speed_at(mean_s) for one in slices[name]] for name in names}
    return found


async def start(spec: RunSpec, policy: Path, drafter: Path, scratch: Path) -> dict[str, VllmEngine]:
    """All engines."""
    config = read_policy_config(policy)
    write_untrained_head(scratch / "useless", policy, Eagle3(), seed=1)
    head = load_head(drafter, config)
    head.lm_head.weight.data.neg_()
    head.write_folder(scratch / "adversarial", head.lm_head.weight.dtype)
    heads = {ADAPTIVE: drafter, FIXED: drafter, USELESS: scratch / "useless", ADVERSARIAL: scratch / "adversarial"}
    engines: dict[str, VllmEngine] = {}
    for name in (NONE, ANOTHER, *heads):
        fields = parse_mechanism("eagle3", str(heads[name])) if name in heads else parse_mechanism("none", "")
        engines[name] = VllmEngine(replace_speculation(spec, fields, str(policy)), name.replace(" ", "-"))
        await CLOCKS.start(engines[name])
    return engines


def modes_of(engines: dict[str, VllmEngine], lengths: Sequence[int]) -> list[Mode]:
    """The modes that are measured. The fixed lengths always include 3."""
    fixed = [Mode(f"k = {k}", engines[FIXED], k) for k in sorted({3, *lengths})]
    plain = [Mode(name, engines[name], None) for name in (NONE, ANOTHER)]
    return [*plain, *fixed, *(Mode(name, engines[name], None) for name in CONTROLLED)]


async def both_ways(
    engines: dict[str, VllmEngine],
    lengths: Sequence[int],
    measure: Callable[[list[Mode]], Awaitable[dict[str, list[Slice]]]],
) -> dict[str, list[Slice]]:
    """Measure twice, swapping the places of the adaptive and the fixed engine in between."""
    swapped = engines | {ADAPTIVE: engines[FIXED], FIXED: engines[ADAPTIVE]}
    first, second = [await measure(modes_of(placed, lengths)) for placed in (engines, swapped)]
    return {
        name: [one.plus(other) for one, other in zip(own, second[name], strict=True)] for name, own in first.items()
    }


class Load:
    """Keeps so many rollouts live in one engine. Only the time between resume and pause counts."""

    def __init__(self, engine: VllmEngine, spec: RunSpec, prompts: PromptStream, live: int) -> None:
        self._engine = engine
        self._spec = spec
        self._prompts = prompts
        self._finished = 0
        self._numbers = itertools.count()
        self._tasks = [asyncio.create_task(self._keep_one()) for _ in range(live)]

    async def _keep_one(self) -> None:
        while True:
            number = next(self._numbers)
            name = f"{len(self._tasks)}-{number}"
            request = build_request(self._spec, self._prompts.prompt(number).token_ids, name, number)
            async for rollout in self._engine.generate([request], admit_together=False):
                self._finished += rollout.total_length

    async def compute(self, seconds: float) -> Slice:
        """Let the engine compute for so long."""
        before = await costs_of(self._engine)
        tokens = self._tokens()
        cpu_s = CLOCKS.read(self._engine)
        began = time.perf_counter()
        await resume_sampling(self._engine)
        await asyncio.sleep(seconds)
        await self._engine._pause_scheduling()
        took = time.perf_counter() - began
        await asyncio.sleep(SETTLE_S)
        cpu_s = CLOCKS.read(self._engine) - cpu_s
        return Slice(self._tokens() - tokens, took, cpu_s, since(before, await costs_of(self._engine)))

    def _tokens(self) -> int:
        return self._finished + sum(len(completion.token_ids) for completion in self._engine._live.values())

    async def close(self) -> None:
        """Abort the live rollouts, and resume the engine."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await resume_sampling(self._engine)


async def resume_sampling(engine: VllmEngine) -> None:
    """Let a paused engine sample again. The time of the pause is no step's duration."""
    engine._counters.times.note_interruption()
    await engine._resume_scheduling()


async def choose(mode: Mode) -> None:
    """Fix the engine's length, or leave it to its controller."""
    if mode.length is not None or mode.name in CONTROLLED:
        await draft_length_client.fix_length(mode.engine._llm, mode.length)


async def at_load(
    live: int, modes: Sequence[Mode], spec: RunSpec, arguments: argparse.Namespace, advance: Callable[[], None]
) -> dict[str, list[Slice]]:
    """Measure one load by mode, one slice per round."""
    prompts = load_prompts(spec)
    engines = list({id(mode.engine): mode.engine for mode in modes}.values())
    for engine in engines:
        await engine._pause_scheduling()
    loads = {id(engine): Load(engine, spec, prompts, live) for engine in engines}
    for mode in modes:
        if mode.name in CONTROLLED:
            await choose(mode)
            await loads[id(mode.engine)].compute(arguments.learning)
    slices: dict[str, list[Slice]] = {mode.name: [] for mode in modes}
    for number in range(arguments.rounds + WARM_UP):
        for mode in in_order(modes, number):
            await choose(mode)
            one = await loads[id(mode.engine)].compute(arguments.slice)
            if number >= WARM_UP:
                slices[mode.name].append(one)
            advance()
    for load in loads.values():
        await load.close()
    return slices


async def answer(engine: VllmEngine, requests: Sequence[RolloutRequest], most: Sequence[int]) -> tuple[int, float]:
    """Generate all requests at once, each until it ends or has so many tokens. Returns tokens and seconds."""
    emitted: dict[str, int] = {}

    async def one(request: RolloutRequest) -> None:
        async for rollout in engine.generate([request], admit_together=False):
            emitted[request.rollout_id] = rollout.total_length

    began = time.perf_counter()
    tasks = {request.rollout_id: asyncio.create_task(one(request)) for request in requests}
    limits = {request.rollout_id: limit for request, limit in zip(requests, most, strict=True)}
    while not all(task.done() for task in tasks.values()):
        await asyncio.sleep(WATCH_S)
        for completion in list(engine._live.values()):
            name = completion.request.rollout_id
            tokens = len(completion.token_ids)
            if tokens >= limits[name] and name not in emitted:
                emitted[name] = tokens
                tasks[name].cancel()
    seconds = time.perf_counter() - began
    for ended in await asyncio.gather(*tasks.values(), return_exceptions=True):
        if isinstance(ended, Exception):  # a cancelled task has none
            raise ended
    return sum(emitted.values()), seconds


async def drain(
    modes: Sequence[Mode], spec: RunSpec, turns: int, advance: Callable[[], None]
) -> dict[str, list[Slice]]:
    """Measure a full batch until it is empty, by mode, one slice per turn."""
    prompts = load_prompts(spec)
    full = spec.generation.max_live_rollouts
    slices: dict[str, list[Slice]] = {mode.name: [] for mode in modes}
    for number in range(turns + WARM_UP):
        requests = [
            build_request(spec, prompts.prompt(place).token_ids, f"{number}-{place}", 1000 * number + place)
            for place in range(full)
        ]
        drawn = np.random.default_rng(number).lognormal(math.log(MEDIAN_TOKENS), SIGMA, full)
        most = np.ceil(drawn).astype(int).tolist()
        for mode in in_order(modes, number):
            await choose(mode)
            named = [replace(request, rollout_id=f"{mode.name}-{request.rollout_id}") for request in requests]
            before = await costs_of(mode.engine)
            cpu_s = CLOCKS.read(mode.engine)
            emitted, seconds = await answer(mode.engine, named, most)
            cpu_s = CLOCKS.read(mode.engine) - cpu_s
            if number >= WARM_UP:
                steps = since(before, await costs_of(mode.engine))
                slices[mode.name].append(Slice(emitted, seconds, cpu_s, steps))
            advance()
    return slices


def in_order(modes: Sequence[Mode], number: int) -> list[Mode]:
    """Shuffle for each round, equally in every run."""
    return random.Random(number).sample(modes, len(modes))  # noqa: S311 - not for security


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Ratios to `none` by turn, and of the adaptive length to the best fixed one and to k = 3."""
    rows: list[dict[str, Any]] = []
    for load, speeds in found.items():
        ratios = {name: _ratios(own, speeds[NONE]) for name, own in speeds.items()}
        rows += [{"load": load, "mode": name, **_spread(own)} for name, own in ratios.items() if name != NONE]
        fixed = {name: own for name, own in speeds.items() if name.startswith("k = ")}
        against_best: list[float] = []
        best: list[str] = []
        for half in (0, 1):
            chosen = max(fixed, key=lambda name: median(ratios[name][1 - half :: 2]))
            best.append(chosen)
            against_best += _ratios(speeds[ADAPTIVE][half::2], fixed[chosen][half::2])
        rows += [
            {"load": load, "against": " or ".join(sorted(set(best))), "isBest": True, **_spread(against_best)},
            {"load": load, "against": "k = 3", **_spread(_ratios(speeds[ADAPTIVE], speeds["k = 3"]))},
        ]
    return rows


def _ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [one / other for one, other in zip(mine, theirs, strict=True)]


def _spread(ratios: Sequence[float]) -> dict[str, float]:
    """The median, and the order statistics that bound its 95 % interval."""
    ranked = sorted(ratios)
    count = len(ratios)
    reach = 0.98 * math.sqrt(count)
    low = max(0, math.floor(count / 2 - reach))
    high = min(count - 1, math.ceil(count / 2 + reach))
    return {"speed": median(ranked), "low": ranked[low], "high": ranked[high]}


def tables(rows: Sequence[dict[str, Any]], title: str) -> list[Table]:
    """Format for people."""
    speeds = Table("live", "mode", "speed (median)", "95 %", title=title)
    against = Table("live", "adaptive against", "speed (median)", "95 %", title=title)
    for row in rows:
        shown = f"{row['speed']:.3f}x", f"{row['low']:.3f}-{row['high']:.3f}"
        if "against" in row:
            against.add_row(row["load"], f"best fixed: {row['against']}" if "isBest" in row else row["against"], *shown)
        else:
            speeds.add_row(row["load"], row["mode"], *shown)
    return [speeds, against]


async def run(arguments: argparse.Namespace, console: Console) -> None:
    """Start, measure, print, and write the rows if asked."""
    spec = load_spec(arguments.spec)
    settings = identify_settings(arguments)
    try:
        kept = read_slices(arguments.kept, settings)
    except Failed as error:
        sys.exit(str(error))
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console, disable=not console.is_terminal) as bar:
        engines = await start(spec, arguments.policy, arguments.drafter, Path(scratch))
        try:
            slices = len(arguments.batches) * (arguments.rounds + WARM_UP) + arguments.turns + WARM_UP
            total = 2 * len(modes_of(engines, arguments.lengths)) * slices
            advance = partial(bar.advance, bar.add_task("measuring", total=total))
            both = partial(both_ways, engines, arguments.lengths)
            measures: dict[str, Callable[[list[Mode]], Awaitable[dict[str, list[Slice]]]]] = {
                str(live): partial(at_load, live, spec=spec, arguments=arguments, advance=advance)
                for live in arguments.batches
            }
            measures[DRAIN] = partial(drain, spec=spec, turns=arguments.turns, advance=advance)
            for load, measure in measures.items():
                if load not in kept:
                    kept[load] = await both(measure)
                    write_slices(arguments.kept, settings, kept)
            found = {load: kept[load] for load in measures}
            reports = {name: await draft_length_client.fetch_report(engines[name]._llm) for name in CONTROLLED}
        finally:
            await close_engines(engines)
    rows = rows_of({load: {name: [one.speed for one in own] for name, own in by.items()} for load, by in found.items()})
    at_mean = rows_of({load: at_mean_costs(by) for load, by in found.items()})
    by_cpu = rows_of(
        {load: {name: [one.speed_by_cpu for one in own] for name, own in by.items()} for load, by in found.items()}
    )
    for title, shown in (("as measured", rows), ("at mean costs", at_mean), ("by CPU time of the engine", by_cpu)):
        for table in tables(shown, title):
            console.print(table)
    for name, report in reports.items():
        shares = " ".join(f"{share:.2f}" for share in report["acceptance"])
        console.print(f"{name}: {report['state']}, lengths by batch {report['table']}, first i accepted {shares}")
    if arguments.json:
        arguments.json.write_text(
            json.dumps({"rows": rows, "atMeanCosts": at_mean, "byCpuTime": by_cpu, "reports": reports}, indent=1)
            + "\n",
            encoding="utf-8",
        )


def read_slices(file: Path | None, settings: str) -> dict[str, dict[str, list[Slice]]]:
    """Read the slices of an earlier run with these settings, by load and mode. Raises Failed for those of others."""
    found = None if file is None else read_kept(file, settings)
    if found is None:
        return {}
    return {
        load: {name: [Slice.from_json(one) for one in own] for name, own in by.items()}
        for load, by in found["loads"].items()
    }


def write_slices(file: Path | None, settings: str, kept: dict[str, dict[str, list[Slice]]]) -> None:
    """Keep the slices, if a file is named."""
    if file is not None:
        loads = {load: {name: [one.to_json() for one in own] for name, own in by.items()} for load, by in kept.items()}
        write_kept(file, settings, {"loads": loads})


def identify_settings(arguments: argparse.Namespace) -> str:
    """Return a digest of all that a load's slices depend on: engine, models and the command line."""
    given = [getattr(arguments, name) for name in ("lengths", "rounds", "slice", "learning", "turns")]
    models = [arguments.policy.resolve(), arguments.drafter.resolve()]
    return identify([identify_run({}, arguments.spec), models, given])


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, help="folder of a finished run with an EAGLE-3 drafter")
    parser.add_argument("--spec", type=Path, help="run file with the prompts and engine (default: RUN/run.yaml)")
    parser.add_argument("--policy", type=Path, help="folder of the policy (default: RUN/export/policy)")
    parser.add_argument("--drafter", type=Path, help="folder of its drafter (default: RUN/export/drafter)")
    parser.add_argument("--kept", type=Path, help="file of measured loads, so that an interrupted run can go on")
    parser.add_argument(
        "--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8, 16, 64]
    )
    parser.add_argument(
        "--lengths",
        type=lambda text: [int(part) for part in text.split(",")],
        default=list(range(1, LONGEST_ADAPTIVE + 1)),
        help=f"fixed lengths that the adaptive one is compared with (default: 1 to {LONGEST_ADAPTIVE})",
    )
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds at each load (default: %(default)s)")
    parser.add_argument("--slice", type=float, default=SLICE_S, help="seconds of a slice (default: %(default)s)")
    parser.add_argument(
        "--learning",
        type=float,
        default=LEARNING_S,
        help="seconds at a load for each controller before it is measured (default: %(default)s)",
    )
    parser.add_argument("--turns", type=int, default=8, help="measured turns of the drain (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    arguments = parser.parse_args()
    if (
        min(arguments.rounds, arguments.turns) < 2
    ):  # at least one round that chooses the best length, and one that is judged by it
        parser.error(f"rounds and turns must be 2 or more, got {arguments.rounds} and {arguments.turns}")
    if arguments.run is not None:
        arguments.spec = arguments.spec or arguments.run / "run.yaml"
        arguments.policy = arguments.policy or arguments.run / "export" / "policy"
        arguments.drafter = arguments.drafter or arguments.run / "export" / "drafter"
    if arguments.spec is None or arguments.policy is None or arguments.drafter is None:
        parser.error("--run, or --spec with --policy and --drafter, must be given")
    asyncio.run(run(arguments, Console()))


if __name__ == "__main__":
    main()
