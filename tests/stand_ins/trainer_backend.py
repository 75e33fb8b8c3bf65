"""A trainer backend in numpy: a bigram policy that really learns, and a drafter that counts pairs of tokens.

It keeps the promises of `trainer/backend.py`: steps in order, versions, rejected requests, reproducible weights, atomic
checkpoints, a broadcast through the real stream. The contract suite runs on it and on Megatron.
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
from tests.checkpoint_sums import write_checksums
from torch._C._distributed_c10d import TCPStore

from specrl.errors import CheckpointInvalid, RecordInvalid, SpecrlError, VersionConflict
from specrl.records import (
    NO_DRAFTER,
    Batch,
    DrafterEpoch,
    DrafterEpochMetrics,
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
from specrl.trainer.backend import SupervisedMetrics
from specrl.trainer.checkpointing.checkpoints import STATE, parse_stream_place, scratch_directory
from specrl.weights.files import write_version
from specrl.weights.group import BroadcastGroup, open_rendezvous_store
from specrl.weights.stream import send_version

LEARNING_RATE = 0.5


class StandInBackend:
    """policy_VV[a, b]: logit of token b after token a. drafter_VV: how often b followed a, plus a random share."""

    def __init__(self, vocab: int = 16, *, has_drafter: bool = True, seed: int = 0) -> None:
        self.vocab = vocab
        self.has_drafter = has_drafter
        self.seed = seed
        self._store: TCPStore | None = None
        self._group: WeightGroup | None = None
        self._joined: BroadcastGroup | None = None
        self._step = 0
        self._checkpoint_step = 0
        self._is_initialised = False
        self._stream: StreamPlace | None = None
        self._writer = ThreadPoolExecutor(max_workers=1)

    def load_model(self, checkpoint: Path | None) -> None:
        self.policy_VV = np.random.default_rng(self.seed).normal(size=(self.vocab, self.vocab)).astype(np.float32)
        self.drafter_VV = np.random.default_rng(self.seed).random((self.vocab, self.vocab), dtype=np.float32)
        if checkpoint is None:
            return
        try:
            state = json.loads((checkpoint / STATE).read_text(encoding="utf-8"))
            self.policy_VV, self.drafter_VV = (np.load(checkpoint / f"{name}.npy") for name in ("policy", "drafter"))
        except (OSError, ValueError) as error:
            raise CheckpointInvalid(f"could not read checkpoint {checkpoint}: {error}; delete it") from error
        self._step = self._checkpoint_step = state["step"]
        self._stream = parse_stream_place(state.get("stream"))
        self._is_initialised = state["is_drafter_initialised"]

    def get_status(self) -> TrainerStatus:
        return TrainerStatus(self._step, self._checkpoint_step, self._is_initialised, 1, self._stream)

    def train_step(self, batch: Batch) -> TrainMetrics:
        if batch.step != self._step + 1:
            raise VersionConflict(f"step must be {self._step + 1}, got step={batch.step}; call GetTrainerStatus")
        if not batch.rollouts:
            self._step = batch.step
            return TrainMetrics.for_empty_batch(LEARNING_RATE)
        self.check_rollouts(batch.rollouts, is_step=True)
        scores = self.score_rollouts(batch.rollouts)
        tokens = sum(item.rollout.sampled_length for item in batch.rollouts)
        gradient_VV = np.zeros_like(self.policy_VV)
        loss = 0.0
        for item, logprobs_T in zip(batch.rollouts, scores, strict=True):
            before_T, after_T = self._token_pairs(item)
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
            drafter=self._count_pairs(batch.rollouts) if self.has_drafter else None,
        )

    def train_supervised(self, batch: Batch) -> SupervisedMetrics:
        certain = tuple(replace(item, advantage=1.0) for item in batch.rollouts)
        found = self.train_step(Batch(batch.step, certain))
        return SupervisedMetrics(found.loss, found.grad_norm, found.learning_rate, found.tokens, found.train_seconds)

    def train_drafter(
        self,
        rollouts: Sequence[TrainRollout],
        held_out: Sequence[TrainRollout],
        epochs: Sequence[DrafterEpoch],
        progress: Path,
    ) -> list[DrafterEpochMetrics]:
        self._check_drafter([*rollouts, *held_out])
        finished: list[DrafterEpochMetrics] = []
        tokens = [[*item.prompt_token_ids, *item.rollout.token_ids_T.tolist()] for item in rollouts]
        if progress.is_file():
            kept = json.loads(progress.read_text(encoding="utf-8"))
            known = [item for item in kept["finished"] if item["epoch"]["rollouts"] <= len(rollouts)]
            if kept["tokens"][: len(tokens)] == tokens[: len(kept["tokens"])]:
                finished = [_read_epoch_metrics(item) for item in known]
                self.drafter_VV = np.array(kept["drafter"], dtype=np.float32)
        for epoch in epochs[len(finished) :]:
            trained = self._count_pairs(rollouts[: epoch.rollouts])
            finished.append(DrafterEpochMetrics(epoch, trained, self.evaluate_drafter(held_out) if held_out else None))
            progress.parent.mkdir(parents=True, exist_ok=True)
            rows = [asdict(item) for item in finished]
            kept = {"tokens": tokens, "finished": rows, "drafter": self.drafter_VV.tolist()}
            progress.write_text(json.dumps(kept), encoding="utf-8")
        self._is_initialised = True
        return finished

    def evaluate_drafter(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        self._check_drafter(rollouts)
        return self._measure_pairs([self._token_pairs(item) for item in rollouts])

    def _check_drafter(self, rollouts: Sequence[TrainRollout]) -> None:
        self.check_rollouts(rollouts, is_step=False)
        if not self.has_drafter:
            raise CheckpointInvalid("generation.speculation must be eagle3 to train a drafter; change the run file")

    def score_rollouts(self, rollouts: Sequence[TrainRollout]) -> list[npt.NDArray[np.float32]]:
        self.check_rollouts(rollouts, is_step=False)
        found = []
        for item in rollouts:
            before_T, after_T = self._token_pairs(item)
            logits_TV = self.policy_VV[before_T]
            sets = item.rollout.sets
            if sets is not None:
                is_outside_TV = np.ones(logits_TV.shape, dtype=bool)
                is_outside_TV[sets.owner_M, sets.ids_M] = False
                logits_TV = np.where(is_outside_TV, -np.inf, logits_TV)
            found.append(_log_softmax(logits_TV)[np.arange(len(after_T)), after_T].astype(np.float32))
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
        self._store = open_rendezvous_store(group.world_size, group.timeout_s, group.address)
        return self._store.port

    def broadcast_weights(self, group_id: str) -> WeightChecksums:
        if self._group is None or self._group.group_id != group_id:
            raise VersionConflict(
                f"group_id must be the open weight group's, got {group_id}; call OpenWeightGroup first"
            )
        try:
            if self._joined is None:
                self._joined = BroadcastGroup(self._group, self._store)
            return self._describe_checksums(send_version(self._joined, self.describe_weights(), self._list_tensors()))
        except SpecrlError:
            self._close_group()
            raise

    weight_transport = "Gloo: the run file's weights.transport"
    nccl_transport = ""
    """Of a group on Gloo. Tests set others."""

    def write_weights(self, folder: Path) -> WeightChecksums:
        return self._describe_checksums(write_version(folder, self.describe_weights(), self._list_tensors()))

    def _list_tensors(self) -> list[tuple[str, torch.Tensor]]:
        tensors = [("policy.weight", torch.from_numpy(self.policy_VV.copy()))]
        if self.has_drafter:
            tensors.append(("drafter.weight", torch.from_numpy(self.drafter_VV.copy())))
        return tensors

    def _describe_checksums(self, sums: tuple[int, ...]) -> WeightChecksums:
        return WeightChecksums(self._step, sums, self._step if self.has_drafter else NO_DRAFTER)

    def save_checkpoint(self, directory: Path, stream: StreamPlace | None = None) -> Future[None]:
        taken = {"policy": self.policy_VV.copy(), "drafter": self.drafter_VV.copy()}
        state = {"step": self._step, "is_drafter_initialised": self._is_initialised}
        state |= {"stream": asdict(stream) if stream is not None else None}
        return self._writer.submit(self.write_checkpoint, directory, taken, state)

    def write_checkpoint(
        self, directory: Path, taken: dict[str, npt.NDArray[np.float32]], state: dict[str, Any]
    ) -> None:
        """Write a checkpoint, in the thread. Tests replace it, to make it fail or wait."""
        scratch = scratch_directory(directory)
        scratch.mkdir(parents=True, exist_ok=True)
        for name, array in taken.items():
            np.save(scratch / f"{name}.npy", array)
        (scratch / STATE).write_text(json.dumps(state), encoding="utf-8")
        write_checksums(scratch)
        shutil.rmtree(
            directory, ignore_errors=True
        )  # a checkpoint of this step from before the drafter was initialised
        scratch.rename(directory)
        self._checkpoint_step = state["step"]
        self._stream = parse_stream_place(state["stream"])

    def export_model(self, directory: Path, *, drafter_only: bool = False) -> tuple[Path | None, Path | None]:
        policy = None if drafter_only and self.has_drafter else directory / "policy"
        drafter = directory / "drafter" if self.has_drafter else None
        for folder, weights in ((policy, self.policy_VV), (drafter, self.drafter_VV)):
            if folder is not None:
                folder.mkdir(parents=True, exist_ok=True)
                np.save(folder / "weight.npy", weights)
        return policy, drafter

    def close(self) -> None:
        self._writer.shutdown()
        self._close_group()

    def _close_group(self) -> None:
        # Not BroadcastGroup.close: a broadcast that still runs when this trainer is killed needs the group. The group
        # ends with the last reference to it.
        self._joined = self._store = self._group = None

    def check_rollouts(self, rollouts: Sequence[TrainRollout], *, is_step: bool) -> None:
        if not rollouts:
            raise RecordInvalid("rollouts must not be empty, got none; send the groups of the step")
        for item in rollouts:
            item.check(1 << 20, self.vocab, (0, 0, 0))

    def _token_pairs(self, item: TrainRollout) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        """Return the tokens [N] before the sampled ones, and the sampled ones [N]."""
        after_T = item.rollout.token_ids_T
        sampled_N = item.rollout.sampled_N
        before_T = np.concatenate([[item.prompt_token_ids[-1]], after_T[:-1]]).astype(np.int32)
        return before_T[sampled_N], after_T[sampled_N]

    def _count_pairs(self, rollouts: Sequence[TrainRollout]) -> DrafterMetrics:
        """Count pairs of tokens, then measure the drafter on them."""
        pairs = [self._token_pairs(item) for item in rollouts]
        for pair in pairs:
            np.add.at(self.drafter_VV, pair, 1.0)
        return self._measure_pairs(pairs)

    def _measure_pairs(self, pairs: Sequence[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]) -> DrafterMetrics:
        """Measure the loss, cross-entropy under the counts plus one, and how often the likeliest token came.

        So a drafter of few pairs knows its own better than others.
        """
        shares_VV = (self.drafter_VV + 1) / (self.drafter_VV + 1).sum(-1, keepdims=True)
        loss = float(np.mean(np.concatenate([-np.log(shares_VV[pair]) for pair in pairs])))
        likeliest_V = self.drafter_VV.argmax(-1)
        right = float(np.mean(np.concatenate([likeliest_V[before_N] == after_N for before_N, after_N in pairs])))
        return DrafterMetrics(loss, 1.0, (right, right, right), 0.001)


def _read_epoch_metrics(row: dict[str, Any]) -> DrafterEpochMetrics:
    """Read what `asdict` made of an epoch's metrics."""
    trained, held_out = (
        DrafterMetrics(**item | {"acceptance_per_position": tuple(item["acceptance_per_position"])}) if item else None
        for item in (row["trained"], row["held_out"])
    )
    assert trained is not None
    return DrafterEpochMetrics(DrafterEpoch(**row["epoch"]), trained, held_out)


def _log_softmax(logits_TV: npt.NDArray[np.float32]) -> npt.NDArray[np.float64]:
    shifted_TV = (logits_TV - logits_TV.max(-1, keepdims=True)).astype(np.float64)
    found: npt.NDArray[np.float64] = shifted_TV - np.log(np.exp(shifted_TV).sum(-1, keepdims=True))
    return found
