"""A trainer backend in numpy: a bigram policy that really learns, a drafter that counts.

It keeps every promise of `trainer/backend.py` that a test can rely on: steps in order, versions, refusals, the same
weights for the same batches, checkpoints that appear whole, a broadcast through the real stream. The contract suite
runs on it and on Megatron alike.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch._C._distributed_c10d import TCPStore

from specrl.errors import CheckpointInvalid, RecordInvalid, SpecrlError, VersionConflict
from specrl.records import (
    NO_DRAFTER,
    Batch,
    DrafterMetrics,
    StreamPlace,
    TensorMeta,
    TrainerStatus,
    TrainMetrics,
    TrainRollout,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
)
from specrl.trainer import checksums
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.checkpoints import STATE, stream_of, temporary
from specrl.weights.files import write
from specrl.weights.group import BroadcastGroup, listen
from specrl.weights.stream import send

LEARNING_RATE = 0.5


class StandInBackend:
    """policy_VV[a, b]: logit of token b after token a. drafter_VV: how often b followed a, or zeros."""

    def __init__(self, vocab: int = 16, *, has_drafter: bool = True, seed: int = 0) -> None:
        self.vocab, self.has_drafter, self.seed = vocab, has_drafter, seed
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._joined: BroadcastGroup | None = None
        self._step, self._checkpoint_step, self._is_initialised = 0, 0, False
        self._stream: StreamPlace | None = None
        self._writer = ThreadPoolExecutor(max_workers=1)

    def load(self, checkpoint: Path | None) -> None:
        self.policy_VV = np.random.default_rng(self.seed).normal(size=(self.vocab, self.vocab)).astype(np.float32)
        self.drafter_VV = np.zeros((self.vocab, self.vocab), dtype=np.float32)
        if checkpoint is None:
            return
        try:
            state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            self.policy_VV, self.drafter_VV = (np.load(checkpoint / f"{name}.npy") for name in ("policy", "drafter"))
        except (OSError, ValueError) as error:
            raise CheckpointInvalid(f"a checkpoint must be complete, got {checkpoint}: {error}; delete it") from error
        self._step = self._checkpoint_step = state["step"]
        self._stream = stream_of(state.get("stream"))
        self._is_initialised = state["is_drafter_initialised"]

    def status(self) -> TrainerStatus:
        return TrainerStatus(self._step, self._checkpoint_step, self._is_initialised, 1, self._stream)

    def check_alive(self) -> None:
        """One rank is always alive."""

    def train_step(self, batch: Batch) -> TrainMetrics:
        if batch.step != self._step + 1:
            raise VersionConflict(f"the trained step must be {self._step + 1}, got step={batch.step}; ask the status")
        if not batch.rollouts:
            self._step = batch.step
            return TrainMetrics.of_nothing(LEARNING_RATE)
        self._check(batch.rollouts)
        scores = self.score(batch.rollouts)
        tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
        gradient_VV = np.zeros_like(self.policy_VV)
        loss = 0.0
        for item, logprobs_T in zip(batch.rollouts, scores, strict=True):
            before_T, after_T = self._pairs(item)
            loss -= item.advantage * float(logprobs_T.sum()) / tokens
            probabilities_TV = np.exp(_log_softmax(self.policy_VV[before_T]))
            probabilities_TV[np.arange(len(after_T)), after_T] -= 1
            np.add.at(gradient_VV, before_T, item.advantage / tokens * probabilities_TV)
        self.policy_VV = self.policy_VV - np.float32(LEARNING_RATE) * gradient_VV
        self._step = batch.step
        differences = np.concatenate(
            [
                score_N - item.rollout.sampler_logprobs_T[item.rollout.sampled_N]
                for score_N, item in zip(scores, batch.rollouts, strict=True)
            ]
        )
        return TrainMetrics(
            loss=loss,
            grad_norm=float(np.linalg.norm(gradient_VV)),
            learning_rate=LEARNING_RATE,
            tokens=tokens,
            logprob_seconds=0.001,
            train_seconds=0.002,
            mismatch_mean_abs=float(np.abs(differences).mean()),
            mismatch_max_abs=float(np.abs(differences).max()),
            mismatch_kl=float((np.expm1(differences) - differences).mean()),
            mismatch_tokens=tokens,
            importance_weight_mean=1.0,
            clip_fraction=0.0,
            entropy=math.log(self.vocab),
            effective_sample_size=1.0,
            drafter=self._learn(batch.rollouts) if self.has_drafter else None,
        )

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        certain = tuple(replace(item, advantage=1.0) for item in batch.rollouts)
        found = self.train_step(Batch(batch.step, certain))
        return SupervisedMetrics(found.loss, found.grad_norm, found.learning_rate, found.tokens, found.train_seconds)

    def train_drafter(
        self, rollouts: Sequence[TrainRollout], epochs: int, progress: Path | None = None
    ) -> list[DrafterMetrics]:
        self._check_drafter(rollouts)
        metrics: list[DrafterMetrics] = []
        plan = [[*item.prompt_token_ids, *item.rollout.token_ids_T.tolist()] for item in rollouts]
        if progress is not None and progress.is_file():
            kept = json.loads(progress.read_text(encoding="utf-8"))
            if kept["plan"] == plan:
                metrics = [
                    DrafterMetrics(**item | {"acceptance_per_position": tuple(item["acceptance_per_position"])})
                    for item in kept["metrics"]
                ]
                self.drafter_VV = np.array(kept["drafter"], dtype=np.float32)
        while len(metrics) < epochs:
            metrics.append(self._learn(rollouts))
            if progress is not None:
                progress.parent.mkdir(parents=True, exist_ok=True)
                kept = {"plan": plan, "metrics": [asdict(m) for m in metrics], "drafter": self.drafter_VV.tolist()}
                progress.write_text(json.dumps(kept), encoding="utf-8")
        self._is_initialised = True
        return metrics

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        self._check_drafter(rollouts)
        before = self.drafter_VV.copy()
        metrics = self._learn(rollouts)
        self.drafter_VV = before
        return metrics

    def _check_drafter(self, rollouts: Sequence[TrainRollout]) -> None:
        self._check(rollouts)
        if not self.has_drafter:
            raise CheckpointInvalid("generation.speculation must be eagle3 for a drafter to be trained; change the run")

    def score(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        self._check(rollouts)
        found = []
        for item in rollouts:
            before_T, after_T = self._pairs(item)
            found.append(_log_softmax(self.policy_VV[before_T])[np.arange(len(after_T)), after_T].astype(np.float32))
        return found

    def describe_weights(self) -> WeightManifest:
        shape = (self.vocab, self.vocab)
        metas = [TensorMeta("policy.weight", WeightOwner.POLICY, "float32", shape)]
        if self.has_drafter:
            metas.append(TensorMeta("drafter.weight", WeightOwner.DRAFTER, "float32", shape))
        return WeightManifest(tuple(metas), 1 << 20)

    def open_weight_group(self, group: WeightGroup) -> int:
        self._close_group()
        self._group = group
        self._store = listen(group.world_size, group.timeout_s, group.address)
        return self._store.port

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        if self._group is None or self._group.group_id != group_id:
            raise VersionConflict(f"the weight group must be the open one, got {group_id}; open it first")
        try:
            if self._joined is None:
                self._joined = BroadcastGroup(self._group, self._store)
            return self._checksums(send(self._joined, self.describe_weights(), self._tensors()))
        except SpecrlError:
            self._close_group()
            raise

    def write_weights(self, folder: Path) -> WeightChecksums:
        return self._checksums(write(folder, self.describe_weights(), self._tensors()))

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        tensors = [("policy.weight", torch.from_numpy(self.policy_VV.copy()))]
        if self.has_drafter:
            tensors.append(("drafter.weight", torch.from_numpy(self.drafter_VV.copy())))
        return tensors

    def _checksums(self, sums: tuple[int, ...]) -> WeightChecksums:
        return WeightChecksums(self._step, sums, self._step if self.has_drafter else NO_DRAFTER)

    def save(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        taken = {"policy": self.policy_VV.copy(), "drafter": self.drafter_VV.copy()}
        state = {"step": self._step, "is_drafter_initialised": self._is_initialised}
        state |= {"stream": asdict(stream) if stream is not None else None}
        return self._writer.submit(self.write_checkpoint, directory, taken, state)

    def write_checkpoint(
        self, directory: Path, taken: dict[str, npt.NDArray[np.float32]], state: dict[str, Any]
    ) -> None:
        """What the thread does; tests may have it refuse, or take its time."""
        scratch = temporary(directory)
        scratch.mkdir(parents=True, exist_ok=True)
        for name, array in taken.items():
            np.save(scratch / f"{name}.npy", array)
        (scratch / STATE).write_text(json.dumps(state), encoding="utf-8")
        checksums.write(scratch, checksums.of_folder(scratch))
        shutil.rmtree(directory, ignore_errors=True)  # of the same step, when its drafter was not yet initialised
        scratch.rename(directory)
        self._checkpoint_step, self._stream = state["step"], stream_of(state["stream"])

    def export(self, directory: Path) -> tuple[Path, Path | None]:
        policy, drafter = directory / "policy", directory / "drafter"
        for folder, weights in ((policy, self.policy_VV), (drafter, self.drafter_VV if self.has_drafter else None)):
            if weights is not None:
                folder.mkdir(parents=True, exist_ok=True)
                np.save(folder / "weight.npy", weights)
        return policy, drafter if self.has_drafter else None

    def close(self) -> None:
        self._writer.shutdown()
        self._close_group()

    def _close_group(self) -> None:
        """The group ends with its last reference: a broadcast that is under way when this trainer is killed has one."""
        self._joined = self._store = self._group = None

    def _check(self, rollouts: Sequence[TrainRollout]) -> None:
        if not rollouts:
            raise RecordInvalid("a batch must hold rollouts, got none; send the groups of its step")
        for item in rollouts:
            item.check(1 << 20, self.vocab)

    def _pairs(self, item: TrainRollout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """[N] the token before each sampled one, and the sampled ones."""
        after_T, sampled_N = item.rollout.token_ids_T, item.rollout.sampled_N
        before_T = np.concatenate([[item.prompt_token_ids[-1]], after_T[:-1]]).astype(np.int32)
        return before_T[sampled_N], after_T[sampled_N]

    def _learn(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        """Count pairs. The loss is how surprising they are with one count more for every pair."""
        pairs = [self._pairs(item) for item in rollouts]
        for pair in pairs:
            np.add.at(self.drafter_VV, pair, 1.0)
        shares_VV = (self.drafter_VV + 1) / (self.drafter_VV + 1).sum(-1, keepdims=True)
        loss = float(np.mean(np.concatenate([-np.log(shares_VV[pair]) for pair in pairs])))
        right = float((self.drafter_VV.argmax(-1) == self.policy_VV.argmax(-1)).mean())
        return DrafterMetrics(loss, 1.0, (right, right, right), 0.001)


def _log_softmax(logits_TV: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted_TV = (logits_TV - logits_TV.max(-1, keepdims=True)).astype(np.float64)
    found: npt.NDArray[np.float64] = shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
    return found
