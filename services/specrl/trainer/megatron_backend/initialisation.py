"""Initialises the drafter on rollouts of a policy that does not move, epoch after epoch, and can be interrupted.

    fresh -> vocabulary chosen -> epoch 1 -> ... -> epoch n        after each: weights, moments and metrics in one file
    killed anywhere: the next call with the same rollouts goes on after the last whole epoch in that file

Called by `backend.py` alone, at all ranks alike. Every rank reads the file before rank 0 writes it again: in between
lies the all-reduce of an optimizer step.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import structlog
import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specrl.drafting.online import DrafterTrainer, PolicyEnds, metrics_of
from specrl.drafting.packing import HeadBatch
from specrl.errors import StoreFailed
from specrl.files import replace_file
from specrl.records import DrafterMetrics, TrainRollout
from specrl.spec.trainer import DrafterLoss
from specrl.telemetry import metrics as telemetry
from specrl.trainer.megatron_backend.turns import turn_lengths

log = structlog.get_logger(__name__)

UPDATES_PER_EPOCH = 32  # at most; more where one would be of more rollouts than
MOST_PER_UPDATE = 32
LAST_RATE = 0.1  # the learning rate falls linearly to this share
CACHED_STATES_BYTES = 2 << 30  # hidden states are kept up to this size, else recomputed in every epoch


@dataclass(frozen=True)
class Plan:
    """What is trained on, how often; `progress` is the file between the epochs, None where nothing is kept."""

    rollouts: Sequence[TrainRollout]
    epochs: int
    seed: int
    progress: Path | None

    def digest(self) -> str:
        """Equal for the same plan alone."""
        found = hashlib.blake2b(f"{self.seed} {self.epochs}".encode(), digest_size=16)
        for item in self.rollouts:
            for ids in (item.prompt_token_ids, item.rollout.token_ids_T):
                found.update(np.asarray(ids, dtype=np.int64).tobytes() + b"|")
        return found.hexdigest()


class Initialisation:
    """One plan on its way. states: the hidden states of some rollouts, this rank's share of them."""

    def __init__(
        self, plan: Plan, drafter: DrafterTrainer, states: Callable[[Sequence[TrainRollout]], list[HeadBatch]]
    ) -> None:
        self._plan, self._drafter, self._states = plan, drafter, states
        self._kept: dict[int, list[HeadBatch]] = {}
        self._room = CACHED_STATES_BYTES

    def finished_epochs(self) -> list[DrafterMetrics]:
        """Of an earlier call with the same plan that was interrupted, or came to its end; none where there was none."""
        metadata = self._read()[0]
        return _epochs_in(metadata) if metadata is not None else []

    def restore(self) -> None:
        """Give the drafter what it had after the last finished epoch."""
        self._drafter.load_state(self._read()[1])

    def epoch(self, number: int, ends: PolicyEnds, teach: Callable[[HeadBatch], None]) -> DrafterMetrics:
        """Train one epoch, from 0. teach: accumulate this rank's part of some states."""
        plan, drafter = self._plan, self._drafter
        parts = parts_of(len(plan.rollouts), plan.seed)
        order = np.random.default_rng([plan.seed, number]).permutation(len(parts))
        # Total variation has almost no gradient while the head knows nothing.
        is_early = number < (plan.epochs + 1) // 2
        early = replace(drafter.criterion, loss=DrafterLoss.SOFT_CROSS_ENTROPY)
        criterion = early if is_early else drafter.criterion
        started, done = time.perf_counter(), []
        for place, chosen in enumerate(order):
            progress = (number * len(parts) + place) / (plan.epochs * len(parts))
            drafter.begin(ends, turn_lengths([plan.rollouts[i] for i in parts[chosen]]), criterion)
            for states in self._cached(int(chosen), parts[chosen]):
                teach(states)
            rate = drafter.learning_rate * (1 - (1 - LAST_RATE) * progress)
            done.append(drafter.finish(rate, dist.group.WORLD))
        # The policy's forward passes included.
        return replace(metrics_of(done), seconds=time.perf_counter() - started)

    def keep(self, metrics: Sequence[DrafterMetrics]) -> None:
        """Write the drafter as it is after these epochs, whole or not at all. Raises StoreFailed."""
        file = self._plan.progress
        if file is None:
            return
        metadata = {"plan": self._plan.digest(), "metrics": json.dumps([asdict(item) for item in metrics])}
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self._drafter.state().items()}
            with replace_file(file) as scratch:
                save_file(tensors, scratch, metadata)
        except (OSError, SafetensorError) as error:
            raise StoreFailed(
                f"the drafter's progress must be written to {file}, got {error}; make room on the disk"
            ) from error

    def _read(self) -> tuple[dict[str, str] | None, dict[str, torch.Tensor]]:
        """Metadata and tensors of the file; None for a file that is not there, broken, or of another plan."""
        file = self._plan.progress
        if file is None or not file.is_file():
            return None, {}
        try:
            with safe_open(file, "pt") as content:
                metadata = content.metadata() or {}
                if metadata.get("plan") != self._plan.digest():
                    return None, {}
                _epochs_in(metadata)
                return metadata, {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118 - no mapping
        except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
            telemetry.FILES_PASSED_OVER.labels("drafter_progress").inc()
            log.warning("drafter_progress_passed_over", path=str(file), reason=str(error))
            return None, {}

    def _cached(self, part: int, indices: Sequence[int]) -> list[HeadBatch]:
        """Hidden states of one part's rollouts: the policy does not move, so one forward pass serves all epochs."""
        if part in self._kept:
            return self._kept[part]
        found = self._states([self._plan.rollouts[i] for i in indices])
        size = sum(item.aux_BSA.nbytes + item.last_BSH.nbytes for item in found)
        if size <= self._room:
            self._room -= size
            self._kept[part] = found
        return found


def _epochs_in(metadata: dict[str, str]) -> list[DrafterMetrics]:
    """Of every finished epoch. Raises ValueError, KeyError or TypeError for what `keep` did not write."""
    return [
        DrafterMetrics(item["loss"], item["grad_norm"], tuple(item["acceptance_per_position"]), item["seconds"])
        for item in json.loads(metadata["metrics"])
    ]


def parts_of(count: int, seed: int) -> list[list[int]]:
    """Rollout indices of each update of an epoch, drawn at random: the same in all epochs, so that states can be kept.

    Rollouts of like lengths are of like content, and updates on one kind after another would undo each other.
    """
    drawn = np.random.default_rng([seed]).permutation(count).tolist()
    size = min(MOST_PER_UPDATE, -(-count // UPDATES_PER_EPOCH))
    return [drawn[first : first + size] for first in range(0, count, size)]
