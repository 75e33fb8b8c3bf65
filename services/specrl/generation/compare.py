"""Compares the rollout speed of speculation mechanisms, with one engine for each, side by side in one process.

    python -m specrl.generation.compare --spec runs/demo-1/run.yaml --policy runs/demo-1/export/policy \\
        --drafter runs/demo-1/export/drafter --mechanism none --mechanism eagle3:3 --batches 8,64

All engines start first. They are then measured in alternating turns, so that other load on the machine affects all of
them alike. A turn keeps `batch` rollouts in flight until a fixed number has finished, with the run's own prompts and
sampling. Each batch size begins with uncounted turns, in which an adaptive draft length settles.

Results are speed ratios to the first mechanism: median and range over the turns. Absolute times are left out on
purpose, since they describe the machine.

Called by the demo for its closing comparison and by benchmarks/rollout_speed.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from specrl.errors import SpecrlError
from specrl.files import write_text
from specrl.generation.engine import Engine
from specrl.models.precision import resolve_dtype
from specrl.prompts import load_prompts
from specrl.records import RolloutRequest, Sampling, SpeculationCounters
from specrl.spec import RunSpec, load_spec
from specrl.spec.base import EmptySection
from specrl.spec.generation import DraftLength, Eagle3, Ngram, Speculation

if TYPE_CHECKING:
    from specrl.generation.vllm_backend.engine import VllmEngine

GenerationFields = dict[str, Any]

ComparisonProgress = Callable[[str, int, int], None]
"""Called with the present activity in words, and with how many activities of its kind are done and there are."""

LONGEST_ADAPTIVE = 5
"""Draft tokens at most of a mechanism without `:k`, whose draft length is adaptive."""
WARM_UP_TURNS = 2  # uncounted, for each batch size


@dataclass(frozen=True)
class TurnResult:
    """One measurement of one engine at one batch size."""

    tokens: int
    seconds: float
    counters: SpeculationCounters

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class ComparisonRow:
    """The result of one engine at one batch size.

    ratios: speed relative to the first mechanism, by turn. acceptance_length: mean tokens per verification step.
    accepted_per_position: share of drafts whose token at each position was accepted.
    """

    mechanism: str
    batch: int
    ratios: tuple[float, ...]
    acceptance_length: float | None
    accepted_per_position: tuple[float, ...]

    @property
    def median_ratio(self) -> float:
        return median(self.ratios)

    def to_json(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "batch": self.batch,
            "speed": round(self.median_ratio, 3),
            "speedLow": round(min(self.ratios), 3),
            "speedHigh": round(max(self.ratios), 3),
            "acceptanceLength": self.acceptance_length,
            "acceptedPerPosition": [round(share, 3) for share in self.accepted_per_position],
        }


def parse_mechanism(text: str, drafter: str | None) -> GenerationFields:
    """Parse `none`, `ngram[:k]` or `eagle3[:k]` into fields of the run file's `generation`.

    Without k the draft length is adaptive. Raises ValueError for any other text.
    """
    name, _, number = text.partition(":")
    length = DraftLength.FIXED if number else DraftLength.ADAPTIVE
    k = int(number or LONGEST_ADAPTIVE)
    if name == "none":
        return {"speculation": Speculation(none=EmptySection())}
    if name == "ngram":
        return {"speculation": Speculation(ngram=Ngram(num_draft_tokens=k)), "draft_length": length}
    if name == "eagle3":
        return {"speculation": Speculation(eagle3=Eagle3(num_draft_tokens=k, path=drafter)), "draft_length": length}
    raise ValueError(f"a mechanism must be none, ngram[:k] or eagle3[:k], got {text!r}; as in eagle3:3")


def replace_speculation(spec: RunSpec, fields: GenerationFields, policy: str) -> RunSpec:
    """Return the run with other generation fields and another policy folder."""
    generation = spec.generation.model_copy(update=fields)
    model = spec.model.model_copy(update={"path": policy})
    return spec.model_copy(update={"generation": generation, "model": model})


def build_request(spec: RunSpec, prompt_token_ids: tuple[int, ...], place: str, seed: int) -> RolloutRequest:
    """Build a request that samples as the run does."""
    sampling = spec.generation.sampling
    wanted = Sampling(
        max_tokens=sampling.max_tokens,
        temperature=float(sampling.temperature),
        top_p=float(sampling.top_p),
        top_k=sampling.top_k,
        seed=seed,
        stop=sampling.stop,
    )
    return RolloutRequest(place, place, 0, prompt_token_ids, wanted)


def check_batches(spec: RunSpec, batches: Sequence[int]) -> None:
    """Raise ValueError for a batch that the engines cannot have in flight. Call it before they start."""
    most = spec.generation.max_live_rollouts
    wrong = [batch for batch in batches if not 1 <= batch <= most]
    if wrong:
        raise ValueError(
            f"a batch must be 1 to generation.maxLiveRollouts, {most}, got {wrong[0]}; more would wait inside vLLM. "
            "Raise maxLiveRollouts in the run file, or measure smaller batches"
        )


async def measure_turn(engine: Engine, requests: Sequence[RolloutRequest], batch: int) -> TurnResult:
    """Run all requests, with `batch` of them in flight at a time, and measure the time."""
    waiting = list(reversed(requests))
    tokens = 0

    async def run_requests() -> None:
        nonlocal tokens
        while waiting:
            async for rollout in engine.generate([waiting.pop()], admit_together=False):
                tokens += rollout.total_length

    before = (await engine.get_status()).speculation
    began = time.perf_counter()
    await asyncio.gather(*(run_requests() for _ in range(batch)))
    seconds = time.perf_counter() - began
    return TurnResult(tokens, seconds, (await engine.get_status()).speculation.minus(before))


async def compare_engines(
    engines: dict[str, VllmEngine], spec: RunSpec, batches: Sequence[int], turns: int, progress: ComparisonProgress
) -> list[ComparisonRow]:
    """Measure started engines in alternating turns. Speeds are relative to the first engine."""
    prompts = load_prompts(spec)
    rows: list[ComparisonRow] = []
    done = 0
    total_turns = len(batches) * (turns + WARM_UP_TURNS) * len(engines)
    for batch in batches:
        count = max(2 * batch, 8)
        measured: dict[str, list[TurnResult]] = {name: [] for name in engines}
        for number in range(turns + WARM_UP_TURNS):
            requests = [
                build_request(spec, prompts.prompt(place).token_ids, f"{number}-{batch}-{place}", 1000 * number + place)
                for place in range(count)
            ]
            for name, engine in engines.items():
                progress(f"measuring {name} with {batch} live rollouts", done, total_turns)
                # The same prompts and seeds for every engine.
                named = [replace(request, rollout_id=f"{name}-{request.rollout_id}") for request in requests]
                result = await measure_turn(engine, named, batch)
                if number >= WARM_UP_TURNS:
                    measured[name].append(result)
                done += 1
        first = measured[next(iter(engines))]
        for name, own in measured.items():
            total = SpeculationCounters()
            for item in own:
                total = total.plus(item.counters)
            shares = tuple(total.acceptance_by_position)
            ratios = tuple(mine.tokens_per_s / base.tokens_per_s for mine, base in zip(own, first, strict=True))
            rows.append(ComparisonRow(name, batch, ratios, total.acceptance_length, shares))
    return rows


def format_table(rows: Sequence[ComparisonRow]) -> Table:
    """Format the results for the terminal."""
    shown = Table("mechanism", "live batch", "speed (median)", "range", "acceptance length", "accepted by position")
    for row in rows:
        shown.add_row(
            row.mechanism,
            str(row.batch),
            f"{row.median_ratio:.2f}x",
            f"{min(row.ratios):.2f}-{max(row.ratios):.2f}",
            "-" if row.acceptance_length is None else f"{row.acceptance_length:.2f}",
            " ".join(f"{share:.2f}" for share in row.accepted_per_position) or "-",
        )
    return shown


async def start_engines(
    spec: RunSpec, mechanisms: Sequence[str], policy: str, drafter: str | None, progress: ComparisonProgress
) -> dict[str, VllmEngine]:
    """Start one vLLM engine per mechanism. If one fails, close those that have started.

    Raises ValueError, before any engine starts, for a mechanism that is unknown or named twice.
    """
    specs = {name: replace_speculation(spec, parse_mechanism(name, drafter), policy) for name in mechanisms}
    if len(specs) < len(mechanisms):
        raise ValueError(f"mechanisms must differ, got {', '.join(mechanisms)}; name each once")
    from specrl.generation.vllm_backend.engine import VllmEngine

    engines: dict[str, VllmEngine] = {}
    try:
        for done, (name, own) in enumerate(specs.items()):
            progress(f"starting the engine of {name}", done, len(mechanisms))
            engine = VllmEngine(own, name)
            await engine.start()
            engines[name] = engine
    except BaseException:
        await close_engines(engines)
        raise
    return engines


async def close_engines(engines: Mapping[str, Engine]) -> None:
    """Close all engines."""
    for engine in engines.values():
        await engine.close()


def show_on_bar(bar: Progress) -> ComparisonProgress:
    """Return a callback that shows the progress on one bar."""
    task = bar.add_task("starting")

    def update_bar(activity: str, done: int, total: int) -> None:
        bar.update(task, description=activity, completed=done, total=total)

    return update_bar


def _write_progress(file: Path, activity: str, done: int, total: int) -> None:
    """Replace the file's content, so that its readers never see half of a line."""
    write_text(file, f"{activity}, {done} of {total} done")


async def _run_comparison(arguments: argparse.Namespace) -> None:
    spec = resolve_dtype(load_spec(arguments.spec))
    console = Console(stderr=True)
    policy = str(arguments.policy or spec.model.path)
    drafter = str(arguments.drafter) if arguments.drafter else None
    check_batches(spec, arguments.batches)
    with Progress(console=console, disable=not console.is_terminal) as bar:
        progress = show_on_bar(bar) if arguments.progress is None else partial(_write_progress, arguments.progress)
        engines = await start_engines(spec, arguments.mechanism, policy, drafter, progress)
        try:
            rows = await compare_engines(engines, spec, arguments.batches, arguments.turns, progress)
        finally:
            await close_engines(engines)
    console.print(format_table(rows))
    if arguments.json:
        arguments.json.write_text(json.dumps([row.to_json() for row in rows], indent=1), encoding="utf-8")


def main() -> None:
    """Entry point of `python -m specrl.generation.compare`."""
    parser = argparse.ArgumentParser(
        prog="specrl.generation.compare", description="Compare the rollout speed of speculation mechanisms."
    )
    parser.add_argument("--spec", type=Path, required=True, help="run file with prompts, sampling and engine settings")
    parser.add_argument("--policy", type=Path, help="policy folder (default: the run file's)")
    parser.add_argument("--drafter", type=Path, help="EAGLE-3 head for eagle3:k (default: an untrained one)")
    parser.add_argument(
        "--mechanism",
        action="append",
        required=True,
        help="none, ngram[:k] or eagle3[:k]; the length is adaptive without k; may be repeated",
    )
    parser.add_argument(
        "--batches",
        type=lambda text: [int(part) for part in text.split(",")],
        default=[8],
        help="batch sizes, as in 1,8 (default: 8)",
    )
    parser.add_argument("--turns", type=int, default=5, help="measured turns per batch size (default: %(default)s)")
    parser.add_argument("--progress", type=Path, help="keep the present activity in this file, in one line")
    parser.add_argument("--json", type=Path, help="also write the results to this file")
    try:
        asyncio.run(_run_comparison(parser.parse_args()))
    except (SpecrlError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)


if __name__ == "__main__":
    main()
