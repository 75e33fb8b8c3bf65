"""How fast rollouts come with one kind of speculation against another: engines side by side in one process.

    python -m specrl.generation.compare --spec runs/demo-1/run.yaml --policy runs/demo-1/export/policy \\
        --drafter runs/demo-1/export/drafter --mechanism none --mechanism eagle3:3 --batches 8,64

All engines are started first, then measured in turns, so that a noisy machine disturbs all of them alike. One turn
keeps `batch` rollouts of the run's own prompts in flight until a fixed number has finished, at the run's own sampling.
Each batch is a load by itself: a draft length that adapts is decided anew for it, in turns that are not counted.
Figures are ratios to the first mechanism, median and range over the turns; absolute times are not shown on purpose.
Called by the demo for its closing comparison and by benchmarks/rollout_speed.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.errors import SpecrlError
from specrl.generation.engine import Engine
from specrl.prompts import load_prompts
from specrl.records import RolloutRequest, Sampling, SpeculationCounters
from specrl.spec import RunSpec, load_spec
from specrl.spec.base import Empty
from specrl.spec.generation import DraftLength, Eagle3, Ngram, Speculation

if TYPE_CHECKING:
    from specrl.generation.vllm_backend.engine import VllmEngine

Generation = dict[str, Any]
LONGEST_ADAPTIVE = 5
"""Most draft tokens of a mechanism that is named without k."""
WARM_UP_TURNS = 2


@dataclass(frozen=True)
class Turn:
    """One engine, one batch size, once."""

    tokens: int
    seconds: float
    counters: SpeculationCounters

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Row:
    """One engine at one batch size: speed relative to the first mechanism, turn by turn, and acceptance."""

    mechanism: str
    batch: int
    ratios: tuple[float, ...]
    acceptance_length: float | None
    accepted_per_position: tuple[float, ...]

    @property
    def ratio(self) -> float:
        return median(self.ratios)

    def to_json(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "batch": self.batch,
            "speed": round(self.ratio, 3),
            "speedLow": round(min(self.ratios), 3),
            "speedHigh": round(max(self.ratios), 3),
            "acceptanceLength": self.acceptance_length,
            "acceptedPerPosition": [round(share, 3) for share in self.accepted_per_position],
        }


def mechanism(text: str, drafter: str | None) -> Generation:
    """Fields of the run file's `generation` for `none`, `ngram[:k]` or `eagle3[:k]`; without k the length is adaptive.

    Raises ValueError for anything else.
    """
    name, _, number = text.partition(":")
    length = DraftLength.FIXED if number else DraftLength.ADAPTIVE
    k = int(number or LONGEST_ADAPTIVE)
    if name == "none":
        return {"speculation": Speculation(none=Empty())}
    if name == "ngram":
        return {"speculation": Speculation(ngram=Ngram(num_draft_tokens=k)), "draft_length": length}
    if name == "eagle3":
        return {"speculation": Speculation(eagle3=Eagle3(num_draft_tokens=k, path=drafter)), "draft_length": length}
    raise ValueError(f"a mechanism must be none, ngram[:k] or eagle3[:k], got {text!r}; as in eagle3:3")


def with_speculation(spec: RunSpec, fields: Generation, policy: str | None) -> RunSpec:
    """The run with another kind of speculation, and with another policy folder if one is given."""
    generation = spec.generation.model_copy(update=fields)
    model = spec.model.model_copy(update={"path": policy}) if policy else spec.model
    return spec.model_copy(update={"generation": generation, "model": model})


def a_request(spec: RunSpec, prompt_token_ids: tuple[int, ...], place: str, seed: int) -> RolloutRequest:
    """A rollout as the run would draw it."""
    sampling = spec.generation.sampling
    wanted = Sampling(max_tokens=sampling.max_tokens, temperature=float(sampling.temperature), seed=seed)
    return RolloutRequest(place, place, 0, prompt_token_ids, wanted)


async def turn(engine: Engine, requests: Sequence[RolloutRequest], batch: int) -> Turn:
    """Keep `batch` of the requests in flight until all have finished."""
    waiting = list(reversed(requests))
    tokens = 0

    async def worker() -> None:
        nonlocal tokens
        while waiting:
            async for rollout in engine.generate([waiting.pop()], admit_together=False):
                tokens += rollout.length

    before = (await engine.status()).speculation
    began = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(batch)))
    seconds = time.perf_counter() - began
    return Turn(tokens, seconds, (await engine.status()).speculation.minus(before))


async def compare(
    engines: dict[str, VllmEngine], spec: RunSpec, batches: Sequence[int], turns: int, progress: Progress
) -> list[Row]:
    """Measure started engines in turns; the first one is what the others are relative to."""
    prompts = load_prompts(spec)
    rows: list[Row] = []
    task = progress.add_task("measuring", total=len(batches) * (turns + WARM_UP_TURNS) * len(engines))
    for batch in batches:
        count = max(2 * batch, 8)
        measured: dict[str, list[Turn]] = {name: [] for name in engines}
        for number in range(turns + WARM_UP_TURNS):
            requests = [
                a_request(spec, prompts.prompt(place).token_ids, f"{number}-{batch}-{place}", 1000 * number + place)
                for place in range(count)
            ]
            for name, engine in engines.items():
                named = [replace(request, rollout_id=f"{name}-{request.rollout_id}") for request in requests]
                result = await turn(engine, named, batch)
                if number >= WARM_UP_TURNS:
                    measured[name].append(result)
                progress.advance(task)
        first = measured[next(iter(engines))]
        for name, own in measured.items():
            total = SpeculationCounters()
            for item in own:
                total = total.plus(item.counters)
            shares = tuple(count / total.drafts for count in total.accepted_per_position) if total.drafts else ()
            ratios = tuple(mine.tokens_per_s / base.tokens_per_s for mine, base in zip(own, first, strict=True))
            rows.append(Row(name, batch, ratios, total.acceptance_length, shares))
    return rows


def table(rows: Sequence[Row]) -> Table:
    """Rows for people."""
    shown = Table("mechanism", "live batch", "speed (median)", "range", "acceptance length", "accepted by position")
    for row in rows:
        shown.add_row(
            row.mechanism,
            str(row.batch),
            f"{row.ratio:.2f}x",
            f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
            "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in row.accepted_per_position) or "-",
        )
    return shown


async def start_engines(
    spec: RunSpec, mechanisms: Sequence[str], policy: str, drafter: str | None
) -> dict[str, VllmEngine]:
    """One started vLLM engine per mechanism. Closes those already started when one fails."""
    from specrl.generation.vllm_backend.engine import VllmEngine

    engines: dict[str, VllmEngine] = {}
    try:
        for name in mechanisms:
            engine = VllmEngine(with_speculation(spec, mechanism(name, drafter), policy), name)
            await engine.start()
            engines[name] = engine
    except BaseException:
        await close_engines(engines)
        raise
    return engines


async def close_engines(engines: Mapping[str, Engine]) -> None:
    """Stop all of them."""
    for engine in engines.values():
        await engine.close()


async def _main(arguments: argparse.Namespace) -> None:
    spec = load_spec(arguments.spec)
    console = Console(stderr=True)
    policy = str(arguments.policy or spec.model.path)
    drafter = str(arguments.drafter) if arguments.drafter else None
    with Progress(console=console, disable=not console.is_terminal) as progress:
        starting = progress.add_task("starting engines", total=None)
        engines = await start_engines(spec, arguments.mechanism, policy, drafter)
        progress.remove_task(starting)
        try:
            rows = await compare(engines, spec, arguments.batches, arguments.turns, progress)
        finally:
            await close_engines(engines)
    console.print(table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row.to_json() for row in rows], indent=1), encoding="utf-8")


def main() -> None:
    """Entry point of `python -m specrl.generation.compare`."""
    parser = argparse.ArgumentParser(
        prog="specrl.generation.compare", description="Speed of speculation, side by side."
    )
    parser.add_argument("--spec", type=Path, required=True, help="run file: prompts, sampling, engine settings")
    parser.add_argument("--policy", type=Path, help="policy folder (default: the run file's)")
    parser.add_argument("--drafter", type=Path, help="EAGLE-3 head for eagle3:k (default: an untrained one)")
    parser.add_argument(
        "--mechanism", action="append", required=True, help="none, ngram[:k] or eagle3[:k], adaptive without k; repeat"
    )
    parser.add_argument("--batches", type=lambda text: [int(part) for part in text.split(",")], default=[8], help="1,8")
    parser.add_argument("--turns", type=int, default=5, help="measured turns of each (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the rows here")
    try:
        asyncio.run(_main(parser.parse_args()))
    except (SpecrlError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
