"""What the tests of the vLLM engine share: run specs, requests, two versions of a tiny model, transformers as judge."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import engine_fork
from tests.requirements import SUFFIX as SUFFIX_PACKAGE
from tests.tiny_models import make_bigram_drafter, make_draft_model, make_mtp_policy, make_policy, perturb
from tests.weight_sender import Tensors, WeightSender, folder_tensors, update

from specrl.generation.draft_length import batch_nodes
from specrl.generation.nodes import ONE_NODE, Nodes
from specrl.generation.vllm_backend import arguments, drafting, launch
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import Rollout, RolloutRequest, Sampling, WeightOwner
from specrl.spec import RunSpec, parse_spec
from specrl.telemetry.spans import Recorder, Span

EAGLE3, NGRAM, NONE = "eagle3", "ngram", "none"
SUFFIX, DRAFT_MODEL, MTP = "suffix", "draftModel", "mtp"
DRAFT_TOKENS = 3  # of engines that tests share
LIVE = (DRAFT_MODEL, MTP, NGRAM)
"""Mechanisms whose shared engine has a live draft length. It is held at DRAFT_TOKENS, so that what is sampled repeats.
The others have vLLM's own scheduler: draftLength Fixed."""


@dataclass(frozen=True)
class Version:
    """A policy and its drafters on disk: an EAGLE-3 head, or the policy itself where it has heads; and a model that is
    never updated."""

    policy: Path
    drafter: Path
    draft_model: Path | None = None

    def tensors(self, with_drafter: bool) -> Tensors:
        """What a trainer at this version broadcasts."""
        drafter = folder_tensors(self.drafter, WeightOwner.DRAFTER) if with_drafter else []
        return [*folder_tensors(self.policy, WeightOwner.POLICY), *drafter]


@dataclass(frozen=True)
class Models:
    """Two versions of one tiny model, far enough apart that their greedy outputs differ; and of one with heads."""

    first: Version
    second: Version
    mtp_first: Version
    mtp_second: Version

    def versions(self, kind: str) -> tuple[Version, Version]:
        """Those that a mechanism is tested on."""
        return (self.mtp_first, self.mtp_second) if kind == MTP else (self.first, self.second)


def make_models(folder: Path) -> Models:
    """Write both versions. The drafters guess right often, each for its own policy."""
    first = make_policy(folder / "policy-1", seed=1, sharpness=30, bigram=20)
    second = perturb(folder / "policy-2", first, scale=0.5, seed=2)
    draft_model = make_draft_model(folder / "draft-model", first)
    mtp = make_mtp_policy(folder / "mtp-1", seed=1, sharpness=30, bigram=20)
    mtp_second = perturb(folder / "mtp-2", mtp, scale=0.5, seed=2)
    return Models(
        Version(first, make_bigram_drafter(folder / "drafter-1", first), draft_model),
        Version(second, make_bigram_drafter(folder / "drafter-2", second, seed=3), draft_model),
        Version(mtp, mtp),
        Version(mtp_second, mtp_second),
    )


def a_spec(policy: Path, speculation: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """A run of a tiny model; `changes` replaces whole sections or, for generation, single fields."""
    generation = {
        "sampling": {"maxTokens": 64},
        "speculation": speculation or {"none": {}},
        "maxLiveRollouts": 32,
        "kvCacheMib": 64,
        "draftLength": "Fixed",  # tests of distributions have fixed seeds, and with them a fixed outcome
        **changes.pop("generation", {}),
    }
    raw = {
        "name": "test",
        "model": {"path": str(policy), "dtype": "float32", "maxLength": 512},
        "prompts": {"source": {"generated": {"family": "any", "count": 1}}, "maxTokens": 64},
        "rewards": {"exact": {}},
        "generation": generation,
        "trainer": {"optimizer": {"learningRate": "1e-4"}},
        "schedule": {"steps": 1, "promptsPerStep": 2, "groupSize": 2},
        "telemetry": {"logLevel": "warning"},
        **changes,
    }
    return parse_spec(raw)


def speculation(kind: str, version: Version, k: int = DRAFT_TOKENS) -> dict[str, Any]:
    """The `speculation` section of a mechanism."""
    if kind == NONE:
        return {NONE: {}}
    path = {EAGLE3: version.drafter, DRAFT_MODEL: version.draft_model}.get(kind)
    return {kind: {"numDraftTokens": k} | ({"path": str(path)} if path is not None else {})}


@dataclass(frozen=True)
class Served:
    """An engine with the versions that it can serve. Which one it serves, tests leave to each other."""

    kind: str
    engine: VllmEngine
    versions: tuple[Version, Version]

    async def publish(self, number: int) -> None:
        """Load version 0 or 1 under the next policy version."""
        sender = WeightSender()
        tensors = self.versions[number].tensors(self.kind == EAGLE3)
        await update(self.engine, sender, tensors, (await self.engine.status()).policy_version + 1)
        sender.close()

    async def use_full_drafts(self) -> None:
        """Hold a live draft length at its longest."""
        await drafting.fix(self.engine._llm, DRAFT_TOKENS)


class Engines:
    """Starts engines when they are asked for: eagle3 for good, of the others one at a time, since each takes 2 GB.

    spans: of all requests that were part of one.
    """

    def __init__(self, models: Callable[[], Models]) -> None:
        self._models = models
        self._started: dict[str, Served] = {}
        self.spans: list[Span] = []

    async def serving(self, kind: str) -> Served:
        """The engine of a mechanism. Skips the test when the mechanism's package is not installed."""
        if kind == SUFFIX:
            SUFFIX_PACKAGE.require()
        if kind not in self._started:
            if kind != EAGLE3:
                await self._close(self._started.keys() - {EAGLE3})
            versions = self._models().versions(kind)
            length = "Adaptive" if kind in LIVE else "Fixed"
            spec = a_spec(versions[0].policy, speculation(kind, versions[0]), generation={"draftLength": length})
            engine = VllmEngine(spec, "gen-0", Recorder(self.spans.append))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("XDG_CACHE_HOME", str(versions[0].policy.parent / "cache"))
                if kind in LIVE:
                    write_costs(spec)
                engine_fork.install()
                await engine.start()
            self._started[kind] = Served(kind, engine, versions)
            if kind in LIVE:
                await self._started[kind].use_full_drafts()
        return self._started[kind]

    async def close(self) -> None:
        """Stop them all."""
        await self._close(self._started)

    async def _close(self, kinds: Iterable[str]) -> None:
        for kind in list(kinds):
            await self._started.pop(kind).engine.close()


def made_up_costs(spec: RunSpec) -> dict[str, Any]:
    """The content of a calibration file: each draft token costs a tenth of a step."""
    nodes = batch_nodes(spec.generation.max_live_rollouts)
    seconds = {str(k): [0.01 * (1 + 0.1 * (k + 1))] * len(nodes) for k in arguments.draft_lengths(spec)}
    return {"nodes": list(nodes), "seconds": seconds}


def write_costs(spec: RunSpec) -> None:
    """Put `made_up_costs` where an engine looks for them, so that it spends no time on a calibration."""
    folders = launch.read_folders(spec)
    configs = [folder.config for folder in (folders.policy, folders.drafter) if folder is not None]
    file = drafting.calibration_file(spec, configs)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made_up_costs(spec)), encoding="utf-8")


@asynccontextmanager
async def running(spec: RunSpec, replica_id: str = "gen-0", nodes: Nodes = ONE_NODE) -> AsyncIterator[VllmEngine]:
    """A started engine, closed at the end."""
    engine_fork.install()
    engine = VllmEngine(spec, replica_id, nodes=nodes)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def a_prompt(number: int) -> tuple[int, ...]:
    """A prompt that repeats itself, so that n-gram look-up finds something; different for each number below 150."""
    return tuple([10 + number, 30 + number, 20 + number, 50 + number] * 3 + [10 + number % 240])


def some_requests(
    count: int, max_tokens: int = 32, temperature: float = 1.0, seed: int | None = 0
) -> list[RolloutRequest]:
    """Requests in groups of two, seeded one by one unless seed is None."""
    return [
        RolloutRequest(
            rollout_id=f"rollout-{number}",
            group_id=f"group-{number // 2}",
            sample_index=number % 2,
            prompt_token_ids=a_prompt(number // 2),
            sampling=Sampling(max_tokens, temperature, seed=None if seed is None else 1000 * seed + number),
        )
        for number in range(count)
    ]


async def collect(engine: Any, requests: Sequence[RolloutRequest], together: bool = False) -> list[Rollout]:
    """All rollouts, in the order of the requests."""
    found = {rollout.rollout_id: rollout async for rollout in engine.generate(requests, together)}
    return [found[request.rollout_id] for request in requests]


class Judge:
    """transformers on a policy folder."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs_TV(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """[T, V] float64: log-probabilities before each token, given all before it."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.no_grad():
            logits = self._model(ids).logits[0, len(prompt) - 1 : -1].double() / temperature
        return np.asarray(logits.log_softmax(-1))


def errors_of(judge: Judge, request: RolloutRequest, rollout: Rollout) -> np.ndarray:
    """[T] absolute differences between the sampler's log-probabilities and the judge's."""
    tokens = rollout.token_ids_T.tolist()
    expected_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, request.sampling.temperature or 1.0)
    return np.abs(rollout.sampler_logprobs_T - expected_TV[np.arange(len(tokens)), tokens])


def margins_of(judge: Judge, request: RolloutRequest, tokens: Sequence[int]) -> np.ndarray:
    """[T] how far each token's log-probability lies below the best one's; 0 where it is the judge's own choice."""
    expected_TV = judge.logprobs_TV(request.prompt_token_ids, tokens)
    return np.asarray(expected_TV.max(-1) - expected_TV[np.arange(len(tokens)), list(tokens)])


def z_scores(judge: Judge, requests: Sequence[RolloutRequest], completions: Sequence[Sequence[int]]) -> np.ndarray:
    """Are tokens drawn from the judge's distribution? Three z-scores, each standard normal if they are.

    For a statistic f of a token (its log-probability; whether it is the likeliest; whether it is among the ten
    likeliest) the sum of f(token) - E[f | what came before] is a martingale, whatever the length or the correlation of
    the completions, and its variance is the sum of the conditional ones.
    """
    excess, variance = np.zeros(3), np.zeros(3)
    for request, tokens in zip(requests, completions, strict=True):
        logprobs_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, request.sampling.temperature)
        probs_TV, rank_TV = np.exp(logprobs_TV), (-logprobs_TV).argsort(-1).argsort(-1)
        for number, f_TV in enumerate((np.maximum(logprobs_TV, -40), rank_TV < 1, rank_TV < 10)):
            mean_T = (probs_TV * f_TV).sum(-1)
            variance[number] += ((probs_TV * f_TV**2).sum(-1) - mean_T**2).sum()
            excess[number] += (f_TV[np.arange(len(tokens)), list(tokens)] - mean_T).sum()
    return np.asarray(excess / np.sqrt(variance))
