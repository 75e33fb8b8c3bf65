"""Supervised warm-up: the trainer minimises the cross-entropy of given completions. `specrl sft` starts it.

    python -m specrl.trainer.sft --folder DIR --held-out 0.05          one rank; RANK and WORLD_SIZE as from torchrun

    DIR/run.yaml        schedule.steps steps on schedule.promptsPerStep examples of prompts.source each
    DIR/metrics.jsonl   one line per step; before them, for step 0, the held-out loss of the given policy
    DIR/checkpoints/    as in a run; an interrupted warm-up resumes from the newest
    DIR/export/policy   at the end: the policy as a Hugging Face folder

Invariant: the examples of a step depend on its number alone. An interrupted warm-up therefore ends with the same policy
as an uninterrupted one. Rank 0 makes the calls and the other ranks follow, as in a run (`ranks.py`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from google.protobuf.empty_pb2 import Empty
from pydantic.alias_generators import to_camel

from specrl.api.v1 import trainer_pb2
from specrl.errors import DatasetInvalid, SpecrlError
from specrl.files import parse_object
from specrl.prompts.columns import DatasetProblem
from specrl.prompts.mixing import epoch_order
from specrl.prompts.sources import ProblemSource
from specrl.prompts.stream import NamedProblems, PromptStream, load_prompts
from specrl.prompts.templates import PromptTemplate
from specrl.records import Batch, FinishReason, OutputSpan, Rollout, TrainRollout, VersionSpan, wire
from specrl.spec import RunSpec, load_process_spec
from specrl.telemetry import logs
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.calls import RankCalls
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.ranks import AllRanks, ControlGroup, follow_rank_0

METRICS = "metrics.jsonl"
STOPPED = 143  # the shell's code for SIGTERM, 128 + 15

# Held-out examples are drawn from the shuffled order of this epoch. Training never reaches it, so the split is
# independent of the order of training.
_SPLIT_EPOCH = 1 << 32

log = structlog.get_logger(__name__)


class TrainingExamples:
    """The examples, prompts with completions: a stream to train on, and a held-out set."""

    def __init__(self, spec: RunSpec, held_out: Decimal) -> None:
        """Read and check all examples. held_out: the share that is not trained on.

        Raises DatasetInvalid, which names the line of an example that does not fit, and CheckpointInvalid when the
        policy's tokenizer cannot be read.
        """
        self._template = PromptTemplate(spec.prompts, spec.model.path)
        self._tools = spec.tools
        self._size = spec.schedule.prompts_per_step
        seed = spec.schedule.seed
        trained: list[NamedProblems] = []
        held: list[tuple[DatasetProblem, str]] = []
        for number, named in enumerate(load_prompts(spec).sources):
            source = self._drop_too_long(named, spec.model.max_length)
            order = epoch_order(len(source), seed, _SPLIT_EPOCH, number).tolist()
            count = int(len(source) * held_out)
            if count == len(source):
                raise DatasetInvalid(
                    f"examples must be more than those held out, got {len(source)}; add examples or lower --held-out"
                )
            held += [(problem, named.name) for problem in source.select_problems(sorted(order[:count])).problems]
            trained.append(replace(named, source=source.select_problems(sorted(order[count:]))))
        self.held_out = [self._build_example(problem, name, i) for i, (problem, name) in enumerate(held)]
        self._stream = PromptStream(trained, self._template, seed)

    def __len__(self) -> int:
        """Count the examples of one epoch, without the held-out ones."""
        return len(self._stream)

    def build_batch(self, step: int) -> Batch:
        """Build the batch of a step, counted from 1. It may span the end of an epoch."""
        positions = range((step - 1) * self._size, step * self._size)
        prompts = map(self._stream.prompt, positions)
        rollouts = [self._build_rollout(prompt.token_ids, prompt.answer, prompt.position) for prompt in prompts]
        return Batch(step, tuple(rollouts))

    def _drop_too_long(self, named: NamedProblems, most: int) -> ProblemSource:
        source = named.source
        lengths = [self._count_tokens(problem, named.name) for problem in source.problems]
        wrong = {
            index: f"{length} tokens with its completion, which must be at most {most} (model.maxLength)"
            for index, length in enumerate(lengths)
            if length > most
        }
        return source.without_problems(wrong) if wrong else source

    def _count_tokens(self, problem: DatasetProblem, source: str) -> int:
        row = self._build_example(problem, source, 0)
        return len(row.prompt_token_ids) + row.rollout.total_length

    def _build_example(self, problem: DatasetProblem, source: str, number: int) -> TrainRollout:
        prompt = self._template.tokenize_text(self._template.format_problem(problem, source))
        return self._build_rollout(prompt, problem.answer, number)

    def _build_rollout(self, prompt: tuple[int, ...], completion: str, number: int) -> TrainRollout:
        """Build a rollout from a given completion.

        Its log-probabilities are 0, as if it had been sampled with certainty, and its advantage is 1. Tool output is
        part of the context but not of the loss.
        """
        token_ids, outputs = self._template.tokenize_completion(completion, self._tools)
        rollout = Rollout(
            rollout_id=str(number),
            group_id=str(number),
            sample_index=0,
            token_ids_T=np.array(token_ids, dtype=np.int32),
            sampler_logprobs_T=np.zeros(len(token_ids), dtype=np.float32),
            versions=(),
            finish_reason=FinishReason.STOP,
            replica_id="",
            text="",
            seconds=0.0,
            outputs=tuple(OutputSpan(first, end) for first, end in outputs),
        )
        # A completion may start with a tool's output, and two outputs may follow each other: no turn is between them.
        versions = tuple(VersionSpan(0, first, end) for first, end in rollout.turn_spans if first < end)
        return TrainRollout(prompt, replace(rollout, versions=versions), advantage=1.0)


class MetricsFile:
    """Writes metrics.jsonl, one line per step. Invariant: no step is in it twice, even after a crash."""

    def __init__(self, file: Path, trained: int) -> None:
        """Drop the lines of steps after `trained`: they were trained after the checkpoint and will be trained again."""
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        kept = [line for line in lines if 0 <= _parse_step(line) <= trained]
        self.is_empty = not kept
        file.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
        self._file = file

    def append_start(self, held_out_loss: float) -> None:
        """Append the line of step 0: the held-out loss before training."""
        self._append_line({"step": 0, "heldOutLoss": held_out_loss})

    def append_step(self, step: int, metrics: SupervisedMetrics, held_out_loss: float | None) -> None:
        """Append a step's line. held_out_loss: None if it was not measured after this step."""
        figures = {to_camel(name): value for name, value in asdict(metrics).items()}
        self._append_line({"step": step} | figures | {"heldOutLoss": held_out_loss})

    def _append_line(self, line: dict[str, Any]) -> None:
        with self._file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _parse_step(line: str) -> int:
    """Read the step of a line of metrics; -1 if the line is incomplete."""
    try:
        step = parse_object(line).get("step")
    except ValueError:
        return -1
    return step if isinstance(step, int) else -1


def run_warm_up(
    ranks: AllRanks, spec: RunSpec, examples: TrainingExamples, folder: Path, is_told_to_stop: Callable[[], bool]
) -> bool:
    """Train from the newest checkpoint in `folder` to the last step, then export. Returns whether it got there.

    is_told_to_stop: asked after every step; if true, a checkpoint is written and the training returns early.
    Raises SpecrlError.
    """
    newest = checkpoints.load_newest(folder, ranks.load_checkpoint)
    trained = checkpoints.parse_step(newest.name) or 0 if newest is not None else 0
    curves = MetricsFile(folder / METRICS, trained)
    if curves.is_empty and (before := compute_held_out_loss(ranks, spec, examples)) is not None:
        curves.append_start(before)
    saving: Future[None] | None = None  # a checkpoint is written while the next steps are trained
    for step in range(trained + 1, spec.schedule.steps + 1):
        metrics = ranks.run_call(RankCalls.TrainSupervised, wire.batch_to_wire(examples.build_batch(step)))
        if metrics.is_skipped:
            log.warning("step_skipped", step=step, updates=0, reason="gradients not finite")
        is_last = step == spec.schedule.steps or is_told_to_stop()
        is_due = is_last or step % spec.checkpoint.every_steps == 0
        curves.append_step(step, metrics, compute_held_out_loss(ranks, spec, examples) if is_due else None)
        if is_due:
            _finish_save(saving, spec, folder)
            saving = ranks.run_call(RankCalls.SaveCheckpoint, trainer_pb2.SaveCheckpointRequest(step=step))
        if is_last and step < spec.schedule.steps:
            _finish_save(saving, spec, folder)
            return False
    _finish_save(saving, spec, folder)
    ranks.run_call(RankCalls.ExportModel, trainer_pb2.ExportModelRequest(directory=str(folder / "export")))
    return True


def _finish_save(saving: Future[None] | None, spec: RunSpec, folder: Path) -> None:
    """Wait until the save, if there is one, is complete, then delete superseded checkpoints. Raises StoreFailed."""
    if saving is not None:
        saving.result()
        keeping = checkpoints.Keeping(spec.checkpoint.keep, spec.checkpoint.milestone_every_steps)
        checkpoints.prune_superseded(folder, keeping)


def compute_held_out_loss(ranks: AllRanks, spec: RunSpec, examples: TrainingExamples) -> float | None:
    """Compute the mean cross-entropy of held-out completions, in nats per token; None if none are held out."""
    rows = examples.held_out
    size = spec.schedule.prompts_per_step
    if not rows:
        return None
    found: list[float] = []
    # In portions of a step's size, so that scoring needs no more memory than training does.
    for first in range(0, len(rows), size):
        part = [wire.train_rollout_to_wire(row) for row in rows[first : first + size]]
        reply = ranks.run_call(RankCalls.Score, trainer_pb2.ScoreRequest(rollouts=part))
        found += [logprob for row in reply.rollouts for logprob in row.logprobs]
    return -float(np.mean(found))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one rank of the warm-up until it ends, and exit."""
    parser = argparse.ArgumentParser(prog="specrl-sft", description="One rank of a supervised warm-up.")
    parser.add_argument("--folder", type=Path, required=True, help="folder with run.yaml, which gets all results")
    parser.add_argument("--held-out", type=Decimal, required=True, help="share of the examples to hold out")
    given = parser.parse_args(arguments)
    try:
        code = _run_rank(given.folder, given.held_out)
    except SpecrlError as error:
        print(error, file=sys.stderr)  # noqa: T201 - the one message to the user
        code = error.exit_code
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # sys.exit would join worker threads; one may hang in a collective with a rank that is gone


def _run_rank(folder: Path, held_out: Decimal) -> int:
    from specrl.trainer.megatron_backend import MegatronBackend

    spec = load_process_spec(folder / "run.yaml")
    rank = int(os.environ.get("RANK", "0"))
    logs.configure_logging(spec.telemetry.log_level.value, f"sft-{rank}", spec.name)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # A signal usually reaches all ranks at once. The others ignore it and wait for rank 0's Close, so that none
        # leaves in the middle of a collective.
        signal.signal(number, (lambda *_: stop.set()) if rank == 0 else signal.SIG_IGN)
    started = time.monotonic()
    calls = RankCalls(MegatronBackend(spec), spec, folder, host="")
    control = ControlGroup()
    if control.rank != 0:
        follow_rank_0(calls, control)
        return 0
    ranks = AllRanks(calls, control)
    is_done = run_warm_up(ranks, spec, TrainingExamples(spec, held_out), folder, stop.is_set)
    ranks.run_call(RankCalls.Close, Empty())
    log.info("warm_up_ended", finished=is_done, seconds=round(time.monotonic() - started, 1))
    return 0 if is_done else STOPPED


if __name__ == "__main__":
    main()
