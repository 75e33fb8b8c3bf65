"""What the trainer service needs of a backend. `megatron_backend` implements it; tests/ has a stand-in.

Every method is a collective: all ranks call the same method with the same arguments (see `ranks.py`), rank 0's answer
is the one that is served. Methods block; the service runs them one after another on one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt

from specrl.records import (
    Batch,
    DrafterMetrics,
    StreamPlace,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
)


@dataclass(frozen=True)
class SupervisedMetrics:
    """One step of `train_supervised`. loss: nats a token; tokens: those that were learnt.

    is_skipped: nothing was, since gradients were not finite; loss and norm are 0 then.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    is_skipped: bool = False


class TrainerBackend(Protocol):
    """Policy and drafter with their optimizers, sharded over the ranks."""

    def load(self, checkpoint: Path | None) -> None:
        """Load the initial model, or a checkpoint written by `save`. Raises CheckpointInvalid, MemoryTooSmall."""

    def status(self) -> TrainerStatus:
        """Step, checkpoint, drafter state."""

    def train_step(self, batch: Batch) -> TrainMetrics:
        """Train one optimizer step. batch.step must be status().step + 1, else VersionConflict.

        Recomputes log-probabilities on the policy, corrects for lag, clips, steps; then the drafter, on the same
        forward's hidden states, detached, with its own optimizer and clip. A batch without rollouts, every prompt of
        which failed or was left out, becomes the version all the same, with policy, drafter and optimizers as they
        were. So does a step whose gradients are not finite, with the policy and its optimizer as they were, until there
        are too many in a row: then TrainerFailed.
        """

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        """Train one optimizer step on the cross-entropy of the rollouts' sampled tokens, whatever sampled them.

        batch.step must be status().step + 1, else VersionConflict. The drafter is left as it is.
        """

    def train_drafter(
        self, rollouts: Sequence[TrainRollout], epochs: int, progress: Path | None = None
    ) -> list[DrafterMetrics]:
        """Initialise the drafter on rollouts of the present policy, which does not move. One entry an epoch.

        progress: a file that every finished epoch is kept in. A call that finds some of its own epochs there, left by
        one that was interrupted, goes on after them; one that finds all of them trains nothing.
        """

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        """Loss and acceptance of the present drafter on rollouts of the present policy. Nothing is trained."""

    def score(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        """Log-probabilities [N] of each rollout's sampled tokens, by the present policy at the sampling temperature."""

    def describe_weights(self) -> WeightManifest:
        """Policy tensors, then drafter tensors, by their Hugging Face names."""

    def open_weight_group(self, group: WeightGroup) -> int:
        """Listen for a new weight group (rank 0), closing the one before. Returns the port."""

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        """Join `group_id` if not yet joined and send the present version, bucket by bucket.

        Raises VersionConflict for another group, DeadlineExceeded or CollectiveFailed when a member fails.
        """

    def write_weights(self, folder: Path) -> WeightChecksums:
        """Write the present version into `folder`, which must not exist and appears whole or not at all.

        Raises StoreFailed when it cannot be written.
        """

    def save(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        """Take a snapshot of the present step, and write it into `directory` in a thread, whole or not at all.

        stream: where the data stand with that step, for the status of whoever loads it. Waits for the save before. The
        future is done when the checkpoint is durable, and raises StoreFailed when it cannot be written.
        """

    def export(self, directory: Path) -> tuple[Path, Path | None]:
        """Write policy and drafter as Hugging Face folders `policy/` and `drafter/` under `directory`."""

    def close(self) -> None:
        """Leave all process groups."""
