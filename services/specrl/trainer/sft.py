"""Supervised warm-up: the cross-entropy of completions, minimised by the trainer of a run. `specrl sft` starts it.

    python -m specrl.trainer.sft --folder DIR --held-out 0.05          one rank; RANK and WORLD_SIZE as from torchrun

    DIR/run.yaml        schedule.steps steps on schedule.promptsPerStep examples of prompts.source each
    DIR/metrics.jsonl   one line a step
    DIR/checkpoints/    as a run's; what is interrupted goes on after the newest
    DIR/export/policy   at the end: the policy as a Hugging Face folder

Which examples a step has depends on its number alone, so that an interrupted warm-up ends where one that was not does.
Rank 0 decides and the others follow, as in a run (`ranks.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import structlog
from pydantic.alias_generators import to_camel

from specrl.errors import DatasetInvalid, SpecrlError
from specrl.files import parse_object
from specrl.prompts.columns import Problem
from specrl.prompts.sources import LeftOut, ProblemSource
from specrl.prompts.stream import PromptStream, epoch_order, load_prompts
from specrl.prompts.templates import PromptTemplate
from specrl.records import Batch, FinishReason, OutputSpan, Rollout, StreamPlace, TrainRollout, VersionSpan
from specrl.spec import RunSpec, load_spec
from specrl.telemetry import logs
from specrl.trainer import checkpoints
from specrl.trainer.backend import SupervisedMetrics

METRICS = "metrics.jsonl"
STOPPED = 143  # 128 + SIGTERM, as shells say it
_SPLIT_EPOCH = 1 << 32
"""The order that held-out examples are taken from: an epoch that no training reaches."""

log = structlog.get_logger(__name__)


class Backend(Protocol):
    """What this needs of a trainer backend (`backend.py`)."""

    def load(self, checkpoint: Path | None) -> None: ...
    def train_supervised(self, batch: Batch) -> SupervisedMetrics: ...
    def score(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]: ...
    def save(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]: ...
    def export(self, directory: Path) -> tuple[Path, Path | None]: ...


@dataclass(frozen=True)
class Part:
    """Some problems of a source."""

    whole: ProblemSource
    indices: Sequence[int]

    def __len__(self) -> int:
        return len(self.indices)

    def problem(self, index: int) -> Problem:
        return self.whole.problem(self.indices[index])

    def place(self, index: int) -> str:
        return self.whole.place(self.indices[index])

    @property
    def left_out(self) -> LeftOut:
        return self.whole.left_out

    def without(self, faults: Mapping[int, str]) -> ProblemSource:
        kept = [index for place, index in enumerate(self.indices) if place not in faults]
        return Part(self.whole, kept)


class Examples:
    """Prompts with their completions: a stream to train on, and those that are held out."""

    def __init__(self, spec: RunSpec, held_out: Decimal) -> None:
        """Read and check all of them. Raises DatasetInvalid, with the line of what does not fit; CheckpointInvalid."""
        self._template = PromptTemplate(spec.prompts, spec.model.path)
        self._tools = spec.tools
        seed, size = spec.schedule.seed, spec.schedule.prompts_per_step
        source = self._fitting(load_prompts(spec).source, spec.model.max_length)
        order = epoch_order(len(source), seed, _SPLIT_EPOCH).tolist()
        count = int(len(source) * held_out)
        if count == len(source):
            raise DatasetInvalid(f"examples must be more than are held out, got {len(source)}; give more of them")
        held = Part(source, sorted(order[:count]))
        self.held_out = [self._example(held.problem(i), i) for i in range(len(held))]
        self._stream = PromptStream(Part(source, sorted(order[count:])), self._template, seed)
        self._size = size

    def __len__(self) -> int:
        """Examples of one epoch, without the held-out ones."""
        return len(self._stream)

    def of_step(self, step: int) -> Batch:
        """What a step trains on; the stream goes on over the end of an epoch."""
        positions = range((step - 1) * self._size, step * self._size)
        prompts = [self._stream.prompt(position) for position in positions]
        return Batch(step, tuple(self._row(prompt.token_ids, prompt.answer, prompt.position) for prompt in prompts))

    def _fitting(self, source: ProblemSource, most: int) -> ProblemSource:
        lengths = [self._length(source.problem(index)) for index in range(len(source))]
        wrong = {
            index: f"{length} tokens with its completion, which must be at most {most} (model.maxLength)"
            for index, length in enumerate(lengths)
            if length > most
        }
        return source.without(wrong) if wrong else source

    def _length(self, problem: Problem) -> int:
        row = self._example(problem, 0)
        return len(row.prompt_token_ids) + row.rollout.length

    def _example(self, problem: Problem, number: int) -> TrainRollout:
        prompt = self._template.tokenize(self._template.format(problem.question))
        return self._row(prompt, problem.answer, number)

    def _row(self, prompt: tuple[int, ...], completion: str, number: int) -> TrainRollout:
        """A rollout as if it had been sampled with certainty; what a tool writes is read and not learnt."""
        token_ids, outputs = self._template.completion(completion, self._tools)
        token_ids_T = np.array(token_ids, dtype=np.int32)
        turns = _between(outputs, len(token_ids))
        return TrainRollout(
            prompt,
            Rollout(
                rollout_id=str(number),
                group_id=str(number),
                sample_index=0,
                token_ids_T=token_ids_T,
                sampler_logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
                versions=tuple(VersionSpan(0, first, end) for first, end in turns),
                finish_reason=FinishReason.STOP,
                replica_id="",
                text="",
                seconds=0.0,
                outputs=tuple(OutputSpan(first, end) for first, end in outputs),
            ),
            advantage=1.0,
        )


def _between(outputs: Sequence[tuple[int, int]], length: int) -> list[tuple[int, int]]:
    """[first, end) of what is left of [0, length)."""
    ends = [*(first for first, _ in outputs), length]
    return [(first, end) for first, end in zip([0, *(end for _, end in outputs)], ends, strict=True) if first < end]


class Curves:
    """metrics.jsonl: a line of each step, none twice, also after a crash between a checkpoint and the next."""

    def __init__(self, file: Path, trained: int) -> None:
        """Keep the lines of steps up to `trained`."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        kept = [line for line in lines if 1 <= _step_of(line) <= trained]
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = file

    def append(self, step: int, metrics: SupervisedMetrics, held_out_loss: float | None) -> None:
        """Add a step."""
        line = {"step": step} | {to_camel(k): v for k, v in asdict(metrics).items()} | {"heldOutLoss": held_out_loss}
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _step_of(line: str) -> int:
    """Of a line of metrics; 0 for one that was cut short."""
    try:
        step = parse_object(line).get("step")
    except ValueError:
        return 0
    return step if isinstance(step, int) else 0


def train(
    backend: Backend, spec: RunSpec, examples: Examples, folder: Path, is_told_to_stop: Callable[[], bool]
) -> bool:
    """Go on after the newest checkpoint in `folder`, to the last step. Returns whether it came there.

    Told to stop, it writes a checkpoint first. Raises SpecrlError.
    """
    newest = checkpoints.load_newest(folder, backend.load)
    trained = checkpoints.step_of(newest.name) or 0 if newest is not None else 0
    curves = Curves(folder / METRICS, trained)
    saves = _Saves(backend, spec, folder)
    for step in range(trained + 1, spec.schedule.steps + 1):
        metrics = backend.train_supervised(examples.of_step(step))
        if metrics.is_skipped:
            log.warning("step_skipped", step=step, updates=0, reason="gradients not finite")
        is_last = step == spec.schedule.steps or is_told_to_stop()
        is_due = is_last or step % spec.checkpoint.every_steps == 0
        curves.append(step, metrics, held_out_loss(backend, spec, examples) if is_due else None)
        if is_due:
            saves.begin(step)
        if is_last and step < spec.schedule.steps:
            saves.end()
            return False
    saves.end()
    backend.export(folder / "export")
    return True


class _Saves:
    """Checkpoints one after another, each written while the next steps are trained."""

    def __init__(self, backend: Backend, spec: RunSpec, folder: Path) -> None:
        self._backend, self._settings, self._folder = backend, spec.checkpoint, folder
        self._under_way: Future[None] | None = None

    def begin(self, step: int) -> None:
        """Have the present step written. Raises StoreFailed when the one before could not be."""
        self.end()
        self._under_way = self._backend.save(checkpoints.directory(self._folder, step))

    def end(self) -> None:
        """Wait for the one under way. Raises StoreFailed."""
        if self._under_way is not None:
            self._under_way.result()
            checkpoints.prune(self._folder, self._settings.keep, self._settings.milestone_every_steps)


def held_out_loss(backend: Backend, spec: RunSpec, examples: Examples) -> float | None:
    """Mean nats of a held-out completion's tokens; None when none is held out."""
    rows, size = examples.held_out, spec.schedule.prompts_per_step
    if not rows:
        return None
    found = [scores for first in range(0, len(rows), size) for scores in backend.score(rows[first : first + size])]
    return -float(np.concatenate(found).astype(np.float64).mean())


def main(arguments: Sequence[str] | None = None) -> None:
    """Be one rank until the end."""
    parser = argparse.ArgumentParser(prog="specrl-sft", description="One rank of a supervised warm-up.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--held-out", type=Decimal, required=True)
    given = parser.parse_args(arguments)
    try:
        code = _rank(given.folder, given.held_out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - for whoever started it
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread may hang in a collective with a rank that is gone, and must not keep this one alive


def _rank(folder: Path, held_out: Decimal) -> int:
    from specrl.trainer.megatron_backend import MegatronBackend
    from specrl.trainer.ranks import ControlGroup, RankedBackend, follow

    spec = load_spec(folder / "run.yaml")
    rank = int(os.environ.get("RANK", "0"))
    logs.configure(spec.telemetry.log_level.value, f"sft-{rank}", spec.name)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # Other ranks wait for rank 0 to say so; it is told, too.
        signal.signal(number, (lambda *_: stop.set()) if rank == 0 else signal.SIG_IGN)
    started = time.monotonic()
    backend, control = MegatronBackend(spec), ControlGroup()
    if control.rank != 0:
        follow(backend, control)
        return 0
    ranked = RankedBackend(backend, control)
    is_done = train(ranked, spec, Examples(spec, held_out), folder, stop.is_set)
    ranked.close()
    log.info("warm_up_ended", finished=is_done, seconds=round(time.monotonic() - started, 1))
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    main()
