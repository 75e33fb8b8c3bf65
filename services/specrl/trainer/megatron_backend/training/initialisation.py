"""Initialises the drafter on rollouts while the policy is frozen. Can be interrupted and resumed between epochs.

    fresh -> vocabulary chosen -> epoch 1, measured -> ... -> epoch n      after each: weights, moments and metrics in
                                                                           one file
    killed anywhere: the next call with the same rollouts resumes after the last complete epoch in that file

The coordinator asks for the epochs one by one, since what it asks for next depends on the last. What the policy's
passes gave is kept from call to call, until a checkpoint is written or a step is trained.

Called by `backend.py`, at all ranks alike. Every rank reads the file before rank 0 writes it again, because an
optimizer step's all-reduce lies in between.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError

from specrl.drafting.online import DrafterTrainer, combine_updates
from specrl.drafting.packing import LessonBatch
from specrl.errors import StoreFailed
from specrl.files import replace_file
from specrl.records import DrafterEpoch, DrafterEpochMetrics, DrafterMetrics, TrainRollout
from specrl.spec.trainer import DrafterLoss
from specrl.telemetry import metrics as telemetry
from specrl.tensor_files import open_tensors, save_tensors
from specrl.trainer.megatron_backend.training.drafter_training import collect_turns, require_drafter
from specrl.trainer.megatron_backend.training.models import RankModels
from specrl.trainer.megatron_backend.training.turns import count_turn_tokens

log = structlog.get_logger(__name__)

UPDATES_PER_EPOCH = 32  # the goal; more if an update would have more rollouts than MAX_PER_UPDATE
MAX_PER_UPDATE = 32  # rollouts

# Lessons, with their states and logits, are cached up to this size on each rank. The policy's passes are repeated in
# every epoch for the rest.
CACHED_LESSONS_BYTES = 2 << 30

HELD_OUT = "held out"  # names the cached lessons of the held-out rollouts, beside the indices of parts


@dataclass(frozen=True)
class _FinishedEpoch:
    """A finished epoch. identity: digest of its plan, its rollouts and the held-out ones."""

    identity: str
    metrics: DrafterEpochMetrics


@dataclass(frozen=True)
class _Lessons:
    """The rollouts of one call."""

    rollouts: Sequence[TrainRollout]
    held_out: Sequence[TrainRollout]
    seed: int

    def compute_identity(self, epoch: DrafterEpoch) -> str:
        """Compute the identity of an epoch on these rollouts, of which there are enough."""
        found = hashlib.blake2b(f"{self.seed} {asdict(epoch)}".encode(), digest_size=16)
        for items in (self.rollouts[: epoch.rollouts], self.held_out):
            for item in items:
                for ids in (item.prompt_token_ids, item.rollout.token_ids_T):
                    found.update(np.asarray(ids, dtype=np.int64).tobytes() + b"|")  # | separates prompt and completion
            found.update(b"#")
        return found.hexdigest()

    def count_matching(self, epochs: Sequence[_FinishedEpoch]) -> int:
        """Count the finished epochs, from the first, that were trained on these rollouts."""
        count = 0
        for item in epochs:
            epoch = item.metrics.epoch
            if epoch.rollouts > len(self.rollouts) or self.compute_identity(epoch) != item.identity:
                break
            count += 1
        return count


class DrafterInitialiser:
    """Initialises one drafter, over several calls.

    _finished: the epochs that the drafter in memory has been trained in. _kept: lessons of the held-out rollouts and of
    some parts of the first _kept_rollouts rollouts.
    """

    def __init__(self, models: RankModels, progress: Path) -> None:
        self._models = models
        self._progress = progress
        self._finished: list[_FinishedEpoch] = []
        self._kept: dict[int | str, list[LessonBatch]] = {}
        self._kept_for = ""
        self._room_bytes = CACHED_LESSONS_BYTES

    def train_epochs(
        self,
        rollouts: Sequence[TrainRollout],
        held_out: Sequence[TrainRollout],
        epochs: Sequence[DrafterEpoch],
    ) -> list[DrafterEpochMetrics]:
        """See `TrainerBackend.train_drafter`."""
        models: RankModels = self._models
        drafter = require_drafter(models, [*rollouts, *held_out])
        lessons = _Lessons(rollouts, held_out, models.spec.schedule.seed)
        asked = [lessons.compute_identity(epoch) for epoch in epochs]
        finished, tensors = self._list_finished()
        known = lessons.count_matching(finished)
        is_same = [item.identity for item in finished[:known]][: len(asked)] == asked[:known]
        # The answers of later epochs may be missing here: a coordinator that was restarted begins with the first ones.
        if is_same and len(asked) <= known < len(finished):
            return [item.metrics for item in finished[:known]]
        if not is_same or known < len(finished):
            self._skip_progress("it is of other answers, another seed or other settings; training from the start")
            finished, tensors = [], {}
        if tensors:
            drafter.load_state(tensors)
            tensors.clear()  # as large as the drafter and its optimizer, which hold them now
        elif not finished and not models.state.is_drafter_initialised:
            counts_V = _count_tokens(rollouts[: epochs[0].rollouts], models.config.vocab_size)
            drafter.model.begin_initialisation(counts_V, models.policy.dtype)
        self._finished = finished
        for number in range(len(finished), len(epochs)):
            self._finished.append(_FinishedEpoch(asked[number], self._train_epoch(lessons, number, epochs[number])))
            if models.groups.rank == 0:
                self._write_progress(drafter)
        models.state = replace(models.state, is_drafter_initialised=True)
        return [item.metrics for item in self._finished]

    def _list_finished(self) -> tuple[list[_FinishedEpoch], dict[str, torch.Tensor]]:
        """List the finished epochs, with the drafter's state after the last, unless the drafter in memory has it."""
        return (self._finished, {}) if self._finished else self._read_progress()

    def _train_epoch(self, lessons: _Lessons, number: int, epoch: DrafterEpoch) -> DrafterEpochMetrics:
        """Train epoch `number`, counted from 0, then measure the drafter."""
        drafter = require_drafter(self._models, lessons.rollouts)
        parts = split_rollouts(epoch.rollouts, lessons.seed)
        order = np.random.default_rng([lessons.seed, number]).permutation(len(parts))
        early = replace(drafter.criterion, loss=DrafterLoss.SOFT_CROSS_ENTROPY)
        criterion = early if epoch.uses_cross_entropy else drafter.criterion
        self._forget_lessons_of_others(lessons, epoch.rollouts)
        started = time.perf_counter()
        done = []
        for place, chosen in enumerate(order):
            rollouts = [lessons.rollouts[i] for i in parts[chosen]]
            drafter.begin_update(count_turn_tokens(rollouts), criterion)
            for batch in self._get_lessons(drafter, int(chosen), rollouts):
                drafter.accumulate_gradients(batch)
            share = epoch.first_rate + (epoch.last_rate - epoch.first_rate) * place / len(parts)
            done.append(drafter.finish_update(drafter.learning_rate * share, dist.group.WORLD))
        trained = combine_updates(done)
        held_out = self._measure(drafter, lessons.held_out) if lessons.held_out else None
        # The time includes the policy's forward passes.
        return DrafterEpochMetrics(epoch, replace(trained, seconds=time.perf_counter() - started), held_out)

    @torch.no_grad()
    def _measure(self, drafter: DrafterTrainer, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        drafter.begin_update(count_turn_tokens(rollouts))
        for batch in self._get_lessons(drafter, HELD_OUT, rollouts):
            drafter.accumulate_gradients(batch)
        return combine_updates([drafter.finish_measurement(dist.group.WORLD)])

    # -- the progress file ---------------------------------------------------------------------------------------------

    def _write_progress(self, drafter: DrafterTrainer) -> None:
        """Write the drafter's state after the finished epochs, atomically. Raises StoreFailed."""
        file = self._progress
        rows = [asdict(item) for item in self._finished]
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.collect_state().items()}
            with replace_file(file) as scratch:
                save_tensors(tensors, scratch, {"epochs": json.dumps(rows)})
        except (OSError, SafetensorError) as error:
            raise StoreFailed(
                f"could not write the drafter's progress to {file}: {error}; free space on its disk"
            ) from error

    def _read_progress(self) -> tuple[list[_FinishedEpoch], dict[str, torch.Tensor]]:
        """Read the finished epochs of earlier calls, and the drafter's state after the last.

        Both are empty if the file is missing or broken.
        """
        file = self._progress
        if not file.is_file():
            return [], {}
        try:
            with open_tensors(file, "pt") as content:
                rows = json.loads((content.metadata() or {})["epochs"])
                epochs = [_FinishedEpoch(row["identity"], _read_epoch_metrics(row["metrics"])) for row in rows]
                return epochs, {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            self._skip_progress(f"{type(error).__name__}: {error}")
            return [], {}

    def _skip_progress(self, reason: str) -> None:
        telemetry.FILES_SKIPPED.labels("drafter_progress").inc()
        log.warning("drafter_progress_passed_over", path=str(self._progress), reason=reason)

    # -- lessons -------------------------------------------------------------------------------------------------------

    def _forget_lessons_of_others(self, lessons: _Lessons, rollouts: int) -> None:
        """Drop the lessons of other rollouts, whose parts have the same numbers."""
        shape = DrafterEpoch(rollouts, 0, 0)
        wanted = lessons.compute_identity(shape)
        if wanted != self._kept_for:
            self._kept.clear()
            self._kept_for = wanted
            self._room_bytes = CACHED_LESSONS_BYTES

    def _get_lessons(
        self, drafter: DrafterTrainer, part: int | str, rollouts: Sequence[TrainRollout]
    ) -> Iterator[LessonBatch]:
        """Yield this rank's lessons of one part's rollouts, from the cache if they are in it."""
        # The policy is frozen, so what the first epoch's passes kept is valid in all of them.
        if part in self._kept:
            yield from self._kept[part]
            return
        found: list[LessonBatch] = []
        size = 0
        for batch in collect_turns(self._models, drafter, rollouts):
            size += sum(x.nbytes for x in batch)
            if size <= self._room_bytes:
                found.append(batch)
            yield batch
        if size <= self._room_bytes:
            self._room_bytes -= size
            self._kept[part] = found


def _count_tokens(rollouts: Sequence[TrainRollout], vocab_size: int) -> torch.Tensor:
    """Count how often each token [V] was sampled."""
    sampled = np.concatenate([item.rollout.token_ids_T[item.rollout.sampled_N] for item in rollouts])
    return torch.from_numpy(np.bincount(sampled, minlength=vocab_size))


def _read_epoch_metrics(row: dict[str, Any]) -> DrafterEpochMetrics:
    """Read what `asdict` made of an epoch's metrics. Raises KeyError, TypeError."""
    held_out = row["held_out"]
    return DrafterEpochMetrics(
        DrafterEpoch(**row["epoch"]), _read_metrics(row["trained"]), _read_metrics(held_out) if held_out else None
    )


def _read_metrics(row: dict[str, Any]) -> DrafterMetrics:
    return DrafterMetrics(**row | {"acceptance_per_position": tuple(row["acceptance_per_position"])})


def split_rollouts(count: int, seed: int) -> list[list[int]]:
    """Split rollout indices into one part per update, at random. Equal in all epochs, so that states can be cached."""
    # Not by length: rollouts of similar length have similar content, and updates on one kind after another would undo
    # each other (docs/decisions/0029).
    drawn = np.random.default_rng([seed]).permutation(count).tolist()
    size = min(MAX_PER_UPDATE, -(-count // UPDATES_PER_EPOCH))
    return [drawn[first : first + size] for first in range(0, count, size)]
