"""What does it bring that finished groups may overtake a straggler? Exposed generation of both orders, long tails.

    python -m benchmarks.windowed                # from the repository's root: it uses the stand-ins of tests/

The real coordinator (loop, scheduler, store, gRPC, weight broadcast) drives a stand-in engine and a stand-in trainer in
one process. A rollout takes as long as its length says, which is drawn from a log-normal distribution (sigma 1, cut at
12 times the median) by the rollout's own seed: so both orders generate the same rollouts. A training step takes a fixed
time. The machine's own speed hardly matters: nearly all of the time is slept.

    scarce   seats for about 1.0 times the rollouts that the trainer consumes, so that starts are spread over time
    ample    seats for about 3.3 times as many, so that whatever may start does so at once

In turns over seeds, lags and seats, both orders of one kind after each other, the first one alternating. Printed for
each: the share of wall time in which the trainer waited for rollouts, and the total time of Windowed relative to
InOrder with the same seed; median and range over the seeds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import numpy as np
import structlog
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from tests.integration.coordinator.small_run import VOCAB, RecordingBackend, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape, log_softmax, spans

from specrl.records import Batch, FinishReason, Peer, Role, Rollout, RolloutRequest, TrainMetrics
from specrl.rpc.membership import stay_registered
from specrl.rpc.server import serve
from specrl.spec import RunSpec, digest
from specrl.spec.run import Order
from specrl.trainer.service import TrainerService

PROMPTS, GROUP = 4, 4
MEDIAN_S, SIGMA, CUT = 0.22, 1.0, 12.0
TRAIN_S = 0.3
MAX_TOKENS = 24
SEATS = {"scarce": 9, "ample": 30}  # per replica of two; 16 rollouts of 0.35 s on average per 0.3 s keep 19 seats busy
LAGS = (0, 1, 2, 4)


class LongTailEngine(TableEngine):
    """Training rollouts take a time of their own; others (the drafter's initialisation) are quick."""

    async def _complete(self, request: RolloutRequest) -> Rollout:
        if not request.group_id[0].isdigit():
            return await super()._complete(request)
        began = time.monotonic()
        length = min(float(np.random.default_rng(request.sampling.seed).lognormal(0.0, SIGMA)), CUT)
        count = max(1, round(MAX_TOKENS * length / CUT))
        token = 2 + (request.sampling.seed or 0) % (VOCAB - 2)
        versions, logprobs = [], []
        for _ in range(count):
            await asyncio.sleep(MEDIAN_S * length / count)
            await self._is_running.wait()
            self._check_alive()
            versions.append(self._policy_version)
            logprobs.append(log_softmax(self.table_VV[token])[token])
        self._generated += count
        return Rollout(
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            token_ids_T=np.full(count, token, dtype=np.int32),
            sampler_logprobs_T=np.asarray(logprobs, dtype=np.float32),
            versions=spans(versions),
            finish_reason=FinishReason.LENGTH,
            replica_id=self._replica_id,
            text=" ".join([str(token)] * count),
            seconds=time.monotonic() - began,
        )


class PacedBackend(RecordingBackend):
    """A step takes TRAIN_S."""

    def train_step(self, batch: Batch) -> TrainMetrics:
        began = time.monotonic()
        metrics: TrainMetrics = super().train_step(batch)
        time.sleep(max(0.0, TRAIN_S - (time.monotonic() - began)))
        return metrics


@dataclass
class PacedRun(Run):
    """A run with a trainer that takes its time."""

    async def start_trainer(self) -> None:
        service = TrainerService(PacedBackend(self.trained), self.spec, self.folder, "127.0.0.1")
        await service.load()
        self.trainer_server, port = await serve(service.add_to, "127.0.0.1", 0)
        peer = Peer("trainer", Role.TRAINER, f"127.0.0.1:{port}", digest(self.spec))
        self.trainer_membership = asyncio.create_task(stay_registered(self.client, peer))

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        self.trainer_membership.cancel()
        await self.trainer_server.stop(None)


@dataclass
class Outcome:
    """What one run took, and what it trained on. overtaken: steps that left a prompt behind."""

    seconds: float
    exposed: float
    lag_mean: float
    overtaken: int


@dataclass
class Kind:
    """All runs with the same lag and seats, in the order of their seeds."""

    runs: dict[Order, list[Outcome]] = field(default_factory=lambda: {order: [] for order in Order})


def spec_of(folder: Path, seats: int, **schedule: int | str) -> RunSpec:
    """A run with so many seats at each replica, in which nothing but rollouts and steps takes time."""
    spec = a_spec(folder, promptsPerStep=PROMPTS, groupSize=GROUP, **schedule)
    return spec.model_copy(
        update={
            "validation": None,
            "canary": spec.canary.model_copy(update={"every_steps": 0}),
            "checkpoint": spec.checkpoint.model_copy(update={"every_steps": spec.schedule.steps}),
            "generation": spec.generation.model_copy(update={"max_live_rollouts": seats}),
        }
    )


async def measure(spec: RunSpec, folder: Path) -> Outcome:
    """One run from its first step to its last. Its promises are checked again, at no cost."""
    shape = TableShape(VOCAB, 128, 0.0)
    async with PacedRun(folder, spec, make_engine=lambda name: LongTailEngine(name, seed=7, shape=shape)) as run:
        await run.finish(timeout_s=600.0)
        reports = run.board.reports()
    lags = [lag for batch in run.trained for lag in batch.policy_lags]
    settled = sorted(position for batch in run.trained for position in batch.positions)
    if max(lags) > spec.schedule.max_policy_lag or settled != list(range(spec.schedule.steps * PROMPTS)):
        raise AssertionError(f"the run must keep its promises, got lag {max(lags)} and {len(settled)} prompts")
    seconds = sum(report.stages.total for report in reports)
    return Outcome(
        seconds=seconds,
        exposed=sum(report.exposed_generation for report in reports) / seconds,
        lag_mean=sum(lags) / len(lags),
        overtaken=sum(bool(report.ahead) for report in reports),
    )


async def measure_all(arguments: argparse.Namespace) -> dict[tuple[str, int], Kind]:
    kinds = {(seats, lag): Kind() for seats in SEATS for lag in LAGS}
    with Progress(transient=True) as progress:
        task = progress.add_task("runs", total=2 * len(kinds) * arguments.seeds)
        for seed in range(arguments.seeds):
            for (seats, lag), kind in kinds.items():
                for order in list(Order)[:: 1 if seed % 2 else -1]:
                    with tempfile.TemporaryDirectory() as scratch:
                        folder = Path(scratch)
                        schedule = {"steps": arguments.steps, "maxPolicyLag": lag, "seed": seed, "order": order.value}
                        spec = spec_of(folder, SEATS[seats], **schedule)
                        kind.runs[order].append(await measure(spec, folder))
                    progress.advance(task)
    return kinds


def spread(values: Sequence[float], form: str) -> str:
    """Median and range."""
    return f"{median(values):{form}} ({min(values):{form}}-{max(values):{form}})"


def show(kinds: dict[tuple[str, int], Kind], console: Console) -> None:
    table = Table(
        "seats", "maxPolicyLag", "exposed, InOrder", "exposed, Windowed", "time ratio", "mean lag", "steps overtaken"
    )
    for (seats, lag), kind in kinds.items():
        first, second = kind.runs[Order.IN_ORDER], kind.runs[Order.WINDOWED]
        table.add_row(
            seats,
            str(lag),
            spread([run.exposed for run in first], ".1%"),
            spread([run.exposed for run in second], ".1%"),
            spread([b.seconds / a.seconds for a, b in zip(first, second, strict=True)], ".3f"),
            " / ".join(f"{median(run.lag_mean for run in runs):.2f}" for runs in (first, second)),
            f"{sum(run.overtaken for run in second) / len(second):.1f}",
        )
    console.print(table)


def main() -> None:
    """Run all, print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to leave every run's figures")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    kinds = asyncio.run(measure_all(arguments))
    show(kinds, Console(width=140))
    if arguments.json:
        runs = {f"{s}-{lag}": {o.value: [vars(r) for r in k.runs[o]] for o in Order} for (s, lag), k in kinds.items()}
        arguments.json.write_text(json.dumps(runs, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
