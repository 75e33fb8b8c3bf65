"""Supervised warm-up: the trainer minimises the cross-entropy of given completions.

Invariant: the examples of a step depend on its number alone. An interrupted warm-up therefore ends with the same policy
as an uninterrupted one. Called by `python -m specrl.trainer.sft`.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import structlog
from pydantic.alias_generators import to_camel

from specrl.api.v1 import trainer_pb2
from specrl.files import parse_object
from specrl.records import wire
from specrl.spec import RunSpec
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.calls import RankCalls
from specrl.trainer.checkpointing import checkpoints
from specrl.trainer.ranks import AllRanks
from specrl.trainer.sft.examples import TrainingExamples

METRICS = "metrics.jsonl"

log = structlog.get_logger(__name__)


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
