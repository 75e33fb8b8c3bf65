"""A fast Engine without a model: a table of logits [V, V] gives the next token from the last one.

Passes tests/contract/test_engine_contract.py like the real one, and receives weights over a real broadcast group. A
tensor `table` or `policy.weight` of shape [V, V] is used as the table. Otherwise the checksums seed a table.

`die` makes it fail like an engine whose process was killed. `stale_loads` is the number of versions that it loads
without using them: it samples from its initial table, like an engine that keeps a stale copy of its weights.

V: vocabulary.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from specrl.errors import EngineFailed, RecordInvalid, VersionConflict
from specrl.generation.engine import LoadTiming
from specrl.records import (
    NO_DRAFTER,
    FinishReason,
    GenerationStatus,
    Rollout,
    RolloutRequest,
    SamplingSets,
    SpeculationCounters,
    VersionSpan,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
)

END_TOKEN = 1


@dataclass(frozen=True)
class TableShape:
    """Vocabulary, longest sequence in tokens, and seconds per token of the stand-in."""

    vocab: int = 32
    max_length: int = 256
    token_seconds: float = 0.0


class TableEngine:
    """Implements Engine."""

    def __init__(self, replica_id: str = "gen-0", seed: int = 0, shape: TableShape = TableShape()) -> None:
        self.shape = shape
        self.table_VV = self._first_VV = seeded_table(seed, shape.vocab)
        self._replica_id = replica_id
        self._policy_version = -1
        self._is_running = asyncio.Event()
        self._is_started = self._is_dead = False
        self._live = 0
        self._generated = 0
        self._group: Any = None
        self._staged: tuple[WeightChecksums, list[str], np.ndarray] | None = None
        self._drafter_version = NO_DRAFTER
        self._staged_has_drafter = False
        self.stale_loads = 0

    async def start(self) -> None:
        self._is_started = True
        self._is_running.set()

    def die(self) -> None:
        """Fail every call from now on. Also drops the weight group, whose threads wake up 100 times a second."""
        self._is_dead = True
        self._group = None
        self._is_running.set()

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        self._check_alive()
        for request in requests:
            self._check_request(request)
        self._live += len(requests)
        tasks = [asyncio.create_task(self._sample_rollout(request)) for request in requests]
        for task in tasks:
            task.add_done_callback(self._count_finished)
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _count_finished(self, _: asyncio.Task[Rollout]) -> None:
        self._live -= 1

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        began = time.monotonic()
        sampling = request.sampling
        random = np.random.default_rng(sampling.seed)
        last = request.prompt_token_ids[-1]
        tokens = []
        logprobs = []
        versions = []
        sets = []
        text = ""
        stop = ""
        while len(tokens) < sampling.max_tokens and not stop and (last != END_TOKEN or not tokens):
            await asyncio.sleep(self.shape.token_seconds)
            await self._is_running.wait()
            self._check_alive()
            logprobs_V = log_softmax(self.table_VV[last] / (sampling.temperature or 1.0))
            if sampling.is_truncated:
                logprobs_V = truncate(logprobs_V, sampling.top_p, sampling.top_k)
                sets.append(np.flatnonzero(np.isfinite(logprobs_V)).tolist())
            last = int(random.choice(self.shape.vocab, p=np.exp(logprobs_V)))
            if sampling.temperature == 0:
                last = int(logprobs_V.argmax())
            tokens.append(last)
            logprobs.append(logprobs_V[last])
            versions.append(self._policy_version)
            self._generated += 1
            text = " ".join(str(token) for token in tokens if token != END_TOKEN)
            stop = next((word for word in sampling.stop if word in text), "")
        return Rollout(
            rollout_id=request.rollout_id,
            group_id=request.group_id,
            sample_index=request.sample_index,
            token_ids_T=np.asarray(tokens, dtype=np.int32),
            sampler_logprobs_T=np.asarray(logprobs, dtype=np.float32),
            versions=group_versions(versions),
            finish_reason=FinishReason.STOP if last == END_TOKEN or stop else FinishReason.LENGTH,
            replica_id=self._replica_id,
            text=text.partition(stop)[0] if stop else text,
            seconds=time.monotonic() - began,
            stop=stop,
            sets=SamplingSets.from_lists(sets) if sets else None,
        )

    def _check_request(self, request: RolloutRequest) -> None:
        prompt = request.prompt_token_ids
        sampling = request.sampling
        is_right = (
            len(prompt) > 0
            and all(0 <= token < self.shape.vocab for token in prompt)
            and sampling.max_tokens >= 1
            and len(prompt) + sampling.max_tokens <= self.shape.max_length
            and (sampling.temperature == 0 or sampling.temperature >= 0.01)
            and 0 < sampling.top_p <= 1
            and sampling.top_k >= 0
            and (sampling.seed is None or sampling.seed >= 0)
        )
        if not is_right:
            raise RecordInvalid(f"request {request.rollout_id} must fit the model, got another; mend it")

    async def pause(self) -> None:
        """Sample nothing until `resume`, so that a test's rollouts stay unfinished. Only the stand-in has this."""
        self._check_alive()
        self._is_running.clear()

    async def resume(self) -> None:
        self._check_alive()
        self._is_running.set()

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        self._check_alive()
        self._staged = None
        area = await asyncio.to_thread(self._receive_area, group, manifest)
        checksums = WeightChecksums(policy_version, area.checksums)
        self._staged = (checksums, [meta.name for meta in manifest.tensors], self._table_of(area))
        self._staged_has_drafter = manifest.has_drafter
        return checksums

    def _receive_area(self, group: WeightGroup, manifest: WeightManifest) -> Any:
        from specrl.weights.files import read_version
        from specrl.weights.group import BroadcastGroup
        from specrl.weights.stream import receive_version

        if group.folder:
            return read_version(Path(group.folder), manifest)
        if self._group is None or self._group.group.group_id != group.group_id:
            self._group = BroadcastGroup(replace(group))
        try:
            return receive_version(self._group, manifest)
        except Exception:
            self._group = None
            raise

    def _table_of(self, area: Any) -> np.ndarray:
        for meta, tensor in area.gather_tensors([None]):
            if meta.name in ("table", "policy.weight") and meta.shape == self.table_VV.shape:
                return np.asarray(tensor.numpy(), dtype=np.float64)
        return seeded_table(sum(area.checksums) % 2**63, self.shape.vocab)

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        self._check_alive()
        staged = self._staged
        self._staged = None
        if staged is None:
            raise VersionConflict("weights must have been received before they are loaded, got nothing; send them")
        staged[0].check_equal(sent, staged[1])
        self._policy_version = sent.policy_version
        self._drafter_version = sent.drafter_version if self._staged_has_drafter else NO_DRAFTER
        if self.stale_loads > 0:
            self.stale_loads -= 1
            self.table_VV = self._first_VV
        else:
            self.table_VV = staged[2]
        self._is_running.set()
        return LoadTiming(0.0, 0.0, 0.0)

    async def get_status(self) -> GenerationStatus:
        self._check_alive()
        counters = SpeculationCounters(generated_tokens=self._generated)
        is_paused = not self._is_running.is_set()
        return GenerationStatus(
            self._replica_id, self._policy_version, is_paused, self._live, counters, self._drafter_version
        )

    async def close(self) -> None:
        self._is_started = False
        self._group = None

    def _check_alive(self) -> None:
        if self._is_dead or not self._is_started:
            raise EngineFailed(f"the engine of {self._replica_id} must be running, got a dead one; start it again")


def seeded_table(seed: int, vocab: int) -> np.ndarray:
    """Return a table of logits [V, V], spread so widely that greedy choices are never close."""
    return np.random.default_rng(seed).normal(0, 2, (vocab, vocab))


def log_softmax(logits_V: np.ndarray) -> np.ndarray:
    """Return log-probabilities in float64."""
    shifted_V = logits_V - logits_V.max()
    return np.asarray(shifted_V - np.log(np.exp(shifted_V).sum()))


def truncate(logprobs_V: np.ndarray, top_p: float, top_k: int) -> np.ndarray:
    """Return log-probabilities after top-k, then top-p; -inf for the tokens that are left out."""
    order_V = np.argsort(-logprobs_V)
    left_V = np.full(len(logprobs_V), -np.inf)
    left_V[order_V[: top_k or None]] = logprobs_V[order_V[: top_k or None]]
    left_V = log_softmax(left_V)
    before_V = np.cumsum(np.exp(left_V[order_V])) - np.exp(left_V[order_V])
    left_V[order_V[before_V >= top_p]] = -np.inf
    return log_softmax(left_V)


def group_versions(versions: Sequence[int]) -> tuple[VersionSpan, ...]:
    """Return the spans of equal policy versions."""
    found: list[VersionSpan] = []
    for position, version in enumerate(versions):
        if found and found[-1].policy_version == version:
            found[-1] = VersionSpan(version, found[-1].first, position + 1)
        else:
            found.append(VersionSpan(version, position, position + 1))
    return tuple(found)
