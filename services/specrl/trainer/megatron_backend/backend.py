"""TrainerBackend on Megatron-Core: Gloo on CPUs, NCCL on CUDA. `calls.py` calls it, on every rank.

This module checks that steps come in order and delegates the rest: training to `training`, sending versions to
`weight_sender`, saving to `checkpoint`.

Invariant: the same batches and seed give the same weights, bit for bit, on the same number of ranks and threads.
"""

from __future__ import annotations

import gc
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import structlog
import torch

from specrl.errors import VersionConflict
from specrl.models import read_model_folder
from specrl.models.native_heads import list_head_notices
from specrl.models.policy_config import PolicyConfig, read_policy_config
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
from specrl.spec import RunSpec
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.megatron_backend import cpu_shim, weight_sender
from specrl.trainer.megatron_backend.checkpoint import CheckpointSaver, load_checkpoint, verify_checkpoint
from specrl.trainer.megatron_backend.model.gpt_model import check_layout
from specrl.trainer.megatron_backend.parallel import groups
from specrl.trainer.megatron_backend.training import drafter_training
from specrl.trainer.megatron_backend.training.batches import check_experts, check_rollouts, check_sets
from specrl.trainer.megatron_backend.training.initialisation import DrafterInitialiser
from specrl.trainer.megatron_backend.training.logprobs import compute_scores
from specrl.trainer.megatron_backend.training.models import CheckpointState, RankModels, load_models
from specrl.trainer.megatron_backend.training.policy_step import train_policy_step
from specrl.trainer.megatron_backend.training.supervised_step import train_supervised_step
from specrl.trainer.megatron_backend.weight_sender import WeightSender

log = structlog.get_logger(__name__)

cpu_shim.install_shim()  # after the imports above, since it patches the Megatron modules that are imported by now


class MegatronBackend:
    """Implements `TrainerBackend`, whose docstrings say what each method promises."""

    # Set by `load_model`, which is called first.
    models: RankModels
    _saved: CheckpointState  # of the last checkpoint that was loaded or written
    _initialiser: DrafterInitialiser | None  # while the drafter is initialised

    def __init__(self, spec: RunSpec) -> None:
        torch.set_num_threads(spec.trainer.threads)
        self.spec = spec
        self.config: PolicyConfig = read_policy_config(Path(spec.model.path))
        check_layout(self.config, spec.trainer.parallelism)
        self.groups = groups.join_groups(spec.trainer.parallelism, spec.schedule.seed)
        self._saver = CheckpointSaver(self.groups)
        self._sender = WeightSender(self.groups)

    # -- state --------------------------------------------------------------------------------------------------------

    def load_model(self, checkpoint: Path | None) -> None:
        if checkpoint is not None:
            verify_checkpoint(checkpoint, self.groups)  # before the models take their time and memory
        self._drop_models()  # of a checkpoint that did not fit them
        # The initial model is loaded even before a checkpoint: Megatron's optimizer copies its float32 masters from
        # existing weights.
        self.models = load_models(self.spec, self.config, self.groups)
        if self.groups.rank == 0:
            for notice in list_head_notices(self.spec, read_model_folder(self.config.path, "model.path")):
                log.warning("native_heads_not_trained", notice=notice)
        if checkpoint is not None:
            load_checkpoint(checkpoint, self.models)
        self._saved = self.models.state

    def _drop_models(self) -> None:
        """Free the memory and the groups of the models that were loaded."""
        self._initialiser = None
        if hasattr(self, "models"):
            _clear_caches(self.models)
            del self.models
            gc.collect()  # modules and their hooks refer to each other
            torch.cuda.empty_cache()

    def get_status(self) -> TrainerStatus:
        state = self.models.state
        saved = self._saved
        return TrainerStatus(state.step, saved.step, state.is_drafter_initialised, self.groups.world_size, saved.stream)

    def save_checkpoint(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        self._initialiser = None  # its cache is large, and a checkpoint ends an initialisation
        state = replace(self.models.state, stream=stream)
        writing = self._saver.start_save(directory, self.models, state)

        # Called in the thread that writes.
        def record_checkpoint(written: Future[None]) -> None:
            if written.exception() is None:
                self._saved = state

        writing.add_done_callback(record_checkpoint)
        return writing

    def close(self) -> None:
        self._saver.close()
        self._sender.close()
        groups.leave_groups()
        self._drop_models()  # a Gloo group's threads go on while anything refers to it

    # -- training -----------------------------------------------------------------------------------------------------

    def check_rollouts(self, rollouts: Sequence[TrainRollout], *, is_step: bool) -> None:
        check_rollouts(rollouts, self.config)
        if is_step:
            check_experts(rollouts, self.spec.trainer.routing)
            check_sets(rollouts, is_truncated=self.spec.generation.sampling.is_truncated)

    def train_step(self, batch: Batch) -> TrainMetrics:
        self._check_step(batch.step)
        self._initialiser = None
        if batch.rollouts:
            self.check_rollouts(batch.rollouts, is_step=True)
            metrics = train_policy_step(self.models, batch)
        else:
            metrics = TrainMetrics.for_empty_batch(self.models.learning_rate(batch.step))
        self.models.finish_step(batch.step)
        return metrics

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        self._check_step(batch.step)
        check_rollouts(batch.rollouts, self.config)
        metrics = train_supervised_step(self.models, batch)
        self.models.finish_step(batch.step)
        return metrics

    def _check_step(self, step: int) -> None:
        expected = self.models.state.step + 1
        if step != expected:
            raise VersionConflict(
                f"step must be {expected}, the one after the last trained, got step={step}; call "
                "GetTrainerStatus and send the steps after it"
            )

    def train_drafter(
        self,
        rollouts: Sequence[TrainRollout],
        held_out: Sequence[TrainRollout],
        epochs: Sequence[DrafterEpoch],
        progress: Path,
    ) -> list[DrafterEpochMetrics]:
        if self._initialiser is None:
            self._initialiser = DrafterInitialiser(self.models, progress)
        return self._initialiser.train_epochs(rollouts, held_out, epochs)

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        return drafter_training.evaluate_drafter(self.models, rollouts)

    def score_rollouts(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        check_rollouts(rollouts, self.config)
        return compute_scores(self.models, rollouts)

    # -- weights ------------------------------------------------------------------------------------------------------

    def describe_weights(self) -> WeightManifest:
        return weight_sender.describe_weights(self.models)

    def open_weight_group(self, group: WeightGroup) -> int:
        return self._sender.open_group(group)

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        return self._sender.broadcast_version(self.models, group_id)

    @property
    def weight_transport(self) -> str:
        return self._sender.weight_transport

    @property
    def nccl_transport(self) -> str:
        return self._sender.nccl_transport

    def write_weights(self, folder: Path) -> WeightChecksums:
        return weight_sender.write_weights(self.models, folder)

    def export_model(self, directory: Path, *, drafter_only: bool = False) -> tuple[Path | None, Path | None]:
        return weight_sender.write_model_folders(self.models, directory, drafter_only=drafter_only)


def _clear_caches(models: RankModels) -> None:
    """Clear what Megatron's modules keep of earlier passes, since that would keep them and their groups.

    The keys of the cache of rotary embeddings are modules. A mixture's token dispatcher has tensors whose autograd
    graph leads back to it, which Python's collector cannot see.
    """
    for chunk in models.policy.chunks:
        for module in chunk.modules():
            clear = getattr(module.forward, "cache_clear", None)
            if clear is not None:
                clear()
            dispatcher = getattr(module, "token_dispatcher", None)
            if dispatcher is not None:
                kept = [name for name, it in vars(dispatcher).items() if isinstance(it, torch.Tensor) and it.grad_fn]
                vars(dispatcher).update(dict.fromkeys(kept))
