"""The protocol between the trainer service and a backend. `megatron_backend` implements it; tests/ has a stand-in.

Every method but `get_status` and `check_rollouts` is a collective: all ranks call the same method with the same
arguments (`calls.py`). But of the rollouts to train on, or to score, a rank may get outlines where another data
parallel rank trains on them (`TrainRollout.is_outline`). Rank 0 gets all of them whole, and checks them before.

The service answers with rank 0's result. Methods block, and the service runs them one after another on one thread.

Shapes: N sampled tokens of one rollout.
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
    DrafterEpoch,
    DrafterEpochMetrics,
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
    """The result of one step of `train_supervised`.

    loss: mean cross-entropy, in nats per token. tokens: those that the loss covers. seconds: wall time of the step.
    is_skipped: the gradients were not finite, so nothing was updated; loss and grad_norm are 0.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    is_skipped: bool = False


class TrainerBackend(Protocol):
    """Policy and drafter with their optimizers, sharded over the ranks."""

    def load_model(self, checkpoint: Path | None) -> None:
        """Load a checkpoint written by `save_checkpoint`; None loads the initial model.

        Raises CheckpointInvalid, MemoryTooSmall, and SpecInvalid if the folder of a model is incomplete.
        """

    def get_status(self) -> TrainerStatus:
        """Return the last trained step, the last checkpoint, and whether the drafter is initialised.

        Not a collective: it may be called while another method runs.
        """

    def check_rollouts(self, rollouts: Sequence[TrainRollout], *, is_step: bool) -> None:
        """Raise RecordInvalid for rollouts that cannot be trained on. Not a collective: rank 0 alone calls it.

        is_step: they are those of `train_step`, which must have what the run records while it samples.
        """

    def train_step(self, batch: Batch) -> TrainMetrics:
        """Train one step: first the policy, then the drafter.

        The policy's log-probabilities are recomputed, the loss corrects for lag, gradients are clipped and the
        optimizer steps. The drafter learns from the hidden states of the same forward pass, detached, with its own
        optimizer and clip.

        Every step makes a new version, even if it changes nothing:
        - A batch without rollouts (all prompts failed or were left out) leaves policy, drafter and optimizers as they
          are.
        - Gradients that are not finite leave the policy and its optimizer as they are.

        Raises VersionConflict unless batch.step is the last trained step plus 1, and TrainerFailed after too many steps
        in a row whose gradients are not finite.
        """

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        """Train one optimizer step on the cross-entropy of the rollouts' sampled tokens. The drafter does not change.

        Raises VersionConflict unless batch.step is the last trained step plus 1.
        """

    def train_drafter(
        self,
        rollouts: Sequence[TrainRollout],
        held_out: Sequence[TrainRollout],
        epochs: Sequence[DrafterEpoch],
        progress: Path,
    ) -> list[DrafterEpochMetrics]:
        """Initialise the drafter on rollouts, with the policy frozen. Measure it on `held_out` after each epoch.

        epochs: all from the first, each on the first so many rollouts. Returns one entry for each. A call with one more
        epoch continues the training.
        progress: a file that is rewritten after every epoch. Epochs that it has of the same rollouts are not trained
        again. If it has more of them than were asked for, they are returned, too, as far as `rollouts` reach.
        """

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        """Measure the drafter's loss and acceptance on rollouts, without training it."""

    def score_rollouts(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        """Compute the log-probabilities [N] of each rollout's sampled tokens under the current policy.

        They are taken at the temperature that the run samples with.
        """

    def describe_weights(self) -> WeightManifest:
        """List the policy's tensors, then the drafter's, by their Hugging Face names."""

    def open_weight_group(self, group: WeightGroup) -> int:
        """Close the previous weight group and listen for a new one, at rank 0. Returns the port; 0 at other ranks."""

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        """Join the weight group, unless already joined, and send the current version to it, bucket by bucket.

        Raises VersionConflict if `group_id` is not the open group, DeadlineExceeded or CollectiveFailed when a member
        fails.
        """

    @property
    def weight_transport(self) -> str:
        """Transport of the open weight group and why it was chosen, at rank 0; empty before its first broadcast."""

    @property
    def nccl_transport(self) -> str:
        """NCCL's transports to the open weight group, such as `NET/IB`, at rank 0; empty if they are not known."""

    def write_weights(self, folder: Path) -> WeightChecksums:
        """Write the current version into `folder`, atomically. `folder` must not exist.

        Raises StoreFailed when it cannot be written.
        """

    def save_checkpoint(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        """Take a snapshot of the current step, then write it into `directory` in a thread, atomically.

        stream: the position in the prompt stream after that step. A trainer that loads the checkpoint reports it in
        its status.

        Waits for the previous save first. The returned future completes when the checkpoint is durable; it raises
        StoreFailed when it cannot be written.
        """

    def export_model(self, directory: Path, *, drafter_only: bool = False) -> tuple[Path | None, Path | None]:
        """Write Hugging Face folders `policy/` and, if there is a drafter, `drafter/` under `directory`.

        drafter_only: the policy is written only if its tensors include the drafter's. Returns both paths; None for what
        was not written. Raises StoreFailed when they cannot be written.
        """

    def close(self) -> None:
        """Leave all process groups."""
