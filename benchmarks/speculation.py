"""Does the adaptive draft length find the best one, and can speculation ever cost anything?

    python benchmarks/speculation.py --run runs/demo-1                # the demo's policy with its trained drafter

One process, engines side by side: `none`; the trained drafter, its length fixed at 1 to 5 in turns and then left to the
controller; and under the controller two more drafters: a useless one (random weights), and an adversarial one (the
trained head with its output layer negated, so that it proposes what the policy likes least).

Two measurements, in turns on the same prompts and seeds, every turn in another order:
    load    so many rollouts live all the time
    drain   a full batch at once, until the last one has finished: the live batch falls from full to 1
Speeds are tokens per second relative to `none` in the same turn; median and range. "against the best" divides by the
fixed length with the best median at that load, which nobody told the controller.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.drafting.head import load_head, save_head, write_untrained
from specrl.drafting.policy_config import read_policy_config
from specrl.generation.compare import LONGEST_ADAPTIVE, a_request, close_engines, mechanism, turn, with_speculation
from specrl.generation.vllm_backend import drafting
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.prompts import load_prompts
from specrl.prompts.stream import PromptStream
from specrl.spec import RunSpec, load_spec
from specrl.spec.generation import Eagle3

NONE, TRAINED, USELESS, ADVERSARIAL = "none", "adaptive", "useless drafter", "adversarial drafter"
DRAIN = "drain"
WARM_UP_TURNS = 1  # also where the controllers learn acceptance


@dataclass(frozen=True)
class Mode:
    """An engine, and the length that it is held at; None leaves it to the controller."""

    name: str
    engine: VllmEngine
    length: int | None


async def start(spec: RunSpec, policy: Path, drafter: Path, scratch: Path) -> dict[str, VllmEngine]:
    """All engines."""
    config = read_policy_config(policy)
    write_untrained(scratch / "useless", policy, Eagle3(), seed=1)
    head = load_head(drafter, config)
    head.lm_head.weight.data.neg_()
    save_head(scratch / "adversarial", head, head.lm_head.weight.dtype)
    heads = {TRAINED: drafter, USELESS: scratch / "useless", ADVERSARIAL: scratch / "adversarial"}
    engines: dict[str, VllmEngine] = {}
    for name in (NONE, *heads):
        fields = mechanism("none" if name == NONE else "eagle3", str(heads.get(name, "")))
        engines[name] = VllmEngine(with_speculation(spec, fields, str(policy)), name.replace(" ", "-"))
        await engines[name].start()
    return engines


def modes_of(engines: dict[str, VllmEngine]) -> list[Mode]:
    """What is measured."""
    fixed = [Mode(f"k = {k}", engines[TRAINED], k) for k in range(1, LONGEST_ADAPTIVE + 1)]
    return [Mode(NONE, engines[NONE], None), *fixed, *(Mode(n, engines[n], None) for n in engines if n != NONE)]


async def measure(
    modes: Sequence[Mode], spec: RunSpec, loads: Sequence[int | str], turns: int, progress: Progress
) -> dict[str, dict[str, list[float]]]:
    """Tokens per second by load and mode, one value a turn."""
    prompts = load_prompts(spec)
    found: dict[str, dict[str, list[float]]] = {}
    task = progress.add_task("measuring", total=len(loads) * (turns + WARM_UP_TURNS) * len(modes))
    for load in loads:
        speeds: dict[str, list[float]] = {mode.name: [] for mode in modes}
        for number in range(turns + WARM_UP_TURNS):
            shift = number % len(modes)
            for mode in [*modes[shift:], *modes[:shift]]:
                speed = await one(mode, spec, prompts, load, number)
                if number >= WARM_UP_TURNS:
                    speeds[mode.name].append(speed)
                progress.advance(task)
        found[str(load)] = speeds
    return found


async def one(mode: Mode, spec: RunSpec, prompts: PromptStream, load: int | str, number: int) -> float:
    """One turn of one mode: tokens per second."""
    full = spec.generation.max_live_rollouts
    count, live = (full, full) if isinstance(load, str) else (max(2 * load, 12), load)
    requests = [
        a_request(spec, prompts.prompt(place).token_ids, f"{number}-{place}", 1000 * number + place)
        for place in range(count)
    ]
    named = [replace(request, rollout_id=f"{mode.name}-{load}-{request.rollout_id}") for request in requests]
    if mode.length is not None or mode.name == TRAINED:
        await drafting.fix(mode.engine._llm, mode.length)
    return (await turn(mode.engine, named, live)).tokens_per_s


def rows_of(found: dict[str, dict[str, list[float]]]) -> list[dict[str, Any]]:
    """Ratios to `none`, turn by turn, and of the adaptive length to the best fixed one and to k = 3."""
    rows: list[dict[str, Any]] = []
    for load, speeds in found.items():
        ratios = {
            name: [mine / base for mine, base in zip(own, speeds[NONE], strict=True)] for name, own in speeds.items()
        }
        best = max((name for name in ratios if name.startswith("k = ")), key=lambda name: median(ratios[name]))
        against = {
            other: [mine / theirs for mine, theirs in zip(speeds[TRAINED], speeds[other], strict=True)]
            for other in (best, "k = 3")
        }
        rows += [
            {"load": load, "mode": name, "speed": median(own), "low": min(own), "high": max(own)}
            for name, own in ratios.items()
            if name != NONE
        ]
        rows.append(
            {
                "load": load,
                "mode": "adaptive against",
                "best": best,
                "againstBest": median(against[best]),
                "againstThree": median(against["k = 3"]),
            }
        )
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> list[Table]:
    """For people."""
    speeds = Table("live", "mode", "speed (median)", "range")
    against = Table("live", "best fixed length", "adaptive against it", "adaptive against k = 3")
    for row in rows:
        if "best" in row:
            against.add_row(row["load"], row["best"], f"{row['againstBest']:.3f}x", f"{row['againstThree']:.3f}x")
        else:
            speeds.add_row(row["load"], row["mode"], f"{row['speed']:.2f}x", f"{row['low']:.2f}-{row['high']:.2f}")
    return [speeds, against]


async def run(arguments: argparse.Namespace, console: Console) -> None:
    """Start, measure, print, and write the rows if asked."""
    spec = load_spec(arguments.run / "run.yaml")
    export = arguments.run / "export"
    with tempfile.TemporaryDirectory() as scratch, Progress(console=console, disable=not console.is_terminal) as bar:
        engines = await start(spec, export / "policy", export / "drafter", Path(scratch))
        try:
            modes = modes_of(engines)
            found = await measure(modes, spec, [*arguments.batches, DRAIN], arguments.turns, bar)
            reports = {name: await drafting.report(e._llm) for name, e in engines.items() if name != NONE}
        finally:
            await close_engines(dict(engines))
    rows = rows_of(found)
    for table in tables(rows):
        console.print(table)
    for name, report in reports.items():
        shares = " ".join(f"{share:.2f}" for share in report["acceptance"])
        console.print(f"{name}: {report['state']}, lengths by batch {report['table']}, first i accepted {shares}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rows": rows, "reports": reports}, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    """Parse the command line and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True, help="folder of a finished run with an EAGLE-3 drafter")
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 16, 64])
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    asyncio.run(run(parser.parse_args(), Console()))


if __name__ == "__main__":
    main()
