"""Helpers for tests of the vLLM engine: run specs, requests, two versions of a tiny model, reference values."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests import engine_fork, enumeration
from tests.requirements import SUFFIX as SUFFIX_PACKAGE
from tests.tiny_models import make_bigram_drafter, make_draft_model, make_mtp_policy, make_policy, perturb
from tests.weight_sender import Tensors, WeightSender, folder_tensors, update_weights

from specrl.generation.draft_lengths.step_costs import choose_batch_nodes
from specrl.generation.nodes import ONE_NODE, ReplicaNodes
from specrl.generation.vllm_backend import arguments, draft_length_client, launch
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import Rollout, RolloutRequest, Sampling, WeightOwner
from specrl.spec import RunSpec, parse_spec
from specrl.telemetry.spans import Recorder, Span

EAGLE3 = "eagle3"
NGRAM = "ngram"
NONE = "none"
SUFFIX = "suffix"
DRAFT_MODEL = "draftModel"
MTP = "mtp"
DRAFT_TOKENS = 3  # draft tokens of shared engines
LIVE_KINDS = (DRAFT_MODEL, MTP, NGRAM)
"""Mechanisms whose shared engine has a live draft length, fixed at DRAFT_TOKENS so that samples are repeatable.

The others have vLLM's own scheduler: draftLength Fixed.
"""


@dataclass(frozen=True)
class ModelVersion:
    """A policy on disk and its drafters.

    drafter: an EAGLE-3 head, or the policy itself if it has heads. draft_model: None for a policy with heads.
    """

    policy: Path
    drafter: Path
    draft_model: Path | None = None

    def tensors(self, with_drafter: bool) -> Tensors:
        """Load what a trainer at this version would broadcast; the drafter, if any, is an EAGLE-3 head."""
        return self.tensors_of(EAGLE3 if with_drafter else NONE)

    def tensors_of(self, kind: str) -> Tensors:
        """Load what a trainer at this version would broadcast in a run with a mechanism."""
        drafter = {EAGLE3: self.drafter, DRAFT_MODEL: self.draft_model}.get(kind)
        of_drafter = folder_tensors(drafter, WeightOwner.DRAFTER) if drafter is not None else []
        return [*folder_tensors(self.policy, WeightOwner.POLICY), *of_drafter]


@dataclass(frozen=True)
class Models:
    """Two versions of a tiny model whose greedy outputs differ, and two versions of a model with native heads."""

    first: ModelVersion
    second: ModelVersion
    mtp_first: ModelVersion
    mtp_second: ModelVersion

    def versions(self, kind: str) -> tuple[ModelVersion, ModelVersion]:
        """Return the two versions on which a mechanism is tested."""
        return (self.mtp_first, self.mtp_second) if kind == MTP else (self.first, self.second)


def make_models(folder: Path) -> Models:
    """Write all versions. Each drafter often guesses right for its own policy."""
    first = make_policy(folder / "policy-1", seed=1, sharpness=30, bigram=20)
    second = perturb(folder / "policy-2", first, scale=0.5, seed=2)
    mtp = make_mtp_policy(folder / "mtp-1", seed=1, sharpness=30, bigram=20)
    mtp_second = perturb(folder / "mtp-2", mtp, scale=0.5, seed=2)
    return Models(
        ModelVersion(
            first,
            make_bigram_drafter(folder / "drafter-1", first),
            make_draft_model(folder / "draft-model-1", first),
        ),
        ModelVersion(
            second,
            make_bigram_drafter(folder / "drafter-2", second, seed=3),
            make_draft_model(folder / "draft-model-2", second),
        ),
        ModelVersion(mtp, mtp),
        ModelVersion(mtp_second, mtp_second),
    )


def a_spec(policy: Path, speculation: dict[str, Any] | None = None, **changes: Any) -> RunSpec:
    """Make the spec of a run with a tiny model; `changes` replaces whole sections or, for generation, single fields."""
    generation = {
        "sampling": {"maxTokens": 64},
        "speculation": speculation or {"none": {}},
        "maxLiveRollouts": 32,
        "kvCacheMib": 64,
        "draftLength": "Fixed",  # with it, a fixed seed fixes the outcome of a test of distributions
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


def speculation(kind: str, version: ModelVersion, k: int = DRAFT_TOKENS) -> dict[str, Any]:
    """Make the `speculation` section of a mechanism."""
    if kind == NONE:
        return {NONE: {}}
    path = {EAGLE3: version.drafter, DRAFT_MODEL: version.draft_model}.get(kind)
    return {kind: {"numDraftTokens": k} | ({"path": str(path)} if path is not None else {})}


@dataclass(frozen=True)
class Served:
    """An engine and the versions that it can load. Tests may leave either of them loaded."""

    kind: str
    engine: VllmEngine
    versions: tuple[ModelVersion, ModelVersion]

    async def publish(self, number: int) -> None:
        """Load version 0 or 1 under the next policy version."""
        sender = WeightSender()
        tensors = self.versions[number].tensors_of(self.kind)
        await update_weights(self.engine, sender, tensors, (await self.engine.get_status()).policy_version + 1)
        sender.close()

    async def use_full_drafts(self) -> None:
        """Fix a live draft length at its longest."""
        await draft_length_client.fix_length(self.engine._llm, DRAFT_TOKENS)


class Engines:
    """Starts engines on demand. eagle3 runs for the whole session; of the others one at a time, as each takes 2 GB.

    spans: of all requests with a parent span.
    """

    def __init__(self, models: Callable[[], Models]) -> None:
        self._models = models
        self._started: dict[str, Served] = {}
        self.spans: list[Span] = []

    async def get_served(self, kind: str) -> Served:
        """Return the engine of a mechanism, started if necessary. Skips the test without the mechanism's package."""
        if kind == SUFFIX:
            SUFFIX_PACKAGE.require()
        if kind not in self._started:
            if kind != EAGLE3:
                await self._close(self._started.keys() - {EAGLE3})
            versions = self._models().versions(kind)
            length = "Adaptive" if kind in LIVE_KINDS else "Fixed"
            spec = a_spec(versions[0].policy, speculation(kind, versions[0]), generation={"draftLength": length})
            engine = VllmEngine(spec, "gen-0", Recorder(self.spans.append))
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("SPECRL_CACHE_DIR", str(versions[0].policy.parent / "cache"))
                if kind in LIVE_KINDS:
                    write_costs(spec)
                engine_fork.install_engine_context()
                await engine.start()
            self._started[kind] = Served(kind, engine, versions)
            if kind in LIVE_KINDS:
                await self._started[kind].use_full_drafts()
        return self._started[kind]

    async def close(self) -> None:
        """Close all engines."""
        await self._close(self._started)

    async def _close(self, kinds: Iterable[str]) -> None:
        for kind in list(kinds):
            await self._started.pop(kind).engine.close()


def made_up_costs(spec: RunSpec) -> dict[str, Any]:
    """Make the content of a file of step costs in which each draft token costs a tenth of a step."""
    nodes = choose_batch_nodes(spec.generation.max_live_rollouts)
    seconds = {str(k): [0.01 * (1 + 0.1 * (k + 1))] * len(nodes) for k in arguments.list_adaptive_lengths(spec)}
    return {"nodes": list(nodes), "seconds": seconds}


def write_costs(spec: RunSpec) -> None:
    """Write `made_up_costs` where an engine looks for it."""
    with ExitStack() as cleanup:
        folders = launch.read_folders(spec, cleanup)
    configs = [folder.config for folder in (folders.policy, folders.drafter) if folder is not None]
    file = draft_length_client.costs_file(spec, configs)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made_up_costs(spec)), encoding="utf-8")


@asynccontextmanager
async def running_engine(
    spec: RunSpec, replica_id: str = "gen-0", nodes: ReplicaNodes = ONE_NODE
) -> AsyncIterator[VllmEngine]:
    """Start an engine, and close it at the end."""
    engine_fork.install_engine_context()
    engine = VllmEngine(spec, replica_id, nodes=nodes)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def a_prompt(number: int) -> tuple[int, ...]:
    """Make a repetitive prompt, in which n-gram lookup finds matches. Prompts differ for numbers below 150."""
    return tuple([10 + number, 30 + number, 20 + number, 50 + number] * 3 + [10 + number % 240])


def some_requests(
    count: int, max_tokens: int = 32, temperature: float = 1.0, seed: int | None = 0
) -> list[RolloutRequest]:
    """Make requests in groups of two, each with its own seed unless seed is None."""
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


async def collect_rollouts(engine: Any, requests: Sequence[RolloutRequest], together: bool = False) -> list[Rollout]:
    """Generate all rollouts. Returns them in the order of the requests."""
    found = {rollout.rollout_id: rollout async for rollout in engine.generate(requests, together)}
    return [found[request.rollout_id] for request in requests]


class Judge:
    """Computes reference log-probabilities with transformers, once for each completion."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._known: dict[tuple[tuple[int, ...], tuple[int, ...]], torch.Tensor] = {}

    def logprobs_TV(self, prompt: Sequence[int], tokens: Sequence[int], temperature: float = 1.0) -> np.ndarray:
        """[T, V] float64: log-probabilities before each token, given all before it."""
        self.read_completions([prompt], [tokens])
        logits_TV = self._known[tuple(prompt), tuple(tokens)].double() / temperature
        return np.asarray(logits_TV.log_softmax(-1))

    def read_completions(self, prompts: Iterable[Sequence[int]], completions: Iterable[Sequence[int]]) -> None:
        """Read completions in one pass of the model, which costs little more than reading a single one."""
        pairs = {(tuple(prompt), tuple(tokens)) for prompt, tokens in zip(prompts, completions, strict=True)}
        new = sorted(pairs - self._known.keys())
        if not new:
            return
        rows = [torch.tensor([*prompt, *tokens]) for prompt, tokens in new]
        with torch.no_grad():  # a token sees none after it, so the padding at the end needs no mask
            logits_BSV = self._model(torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)).logits
        for (prompt, tokens), logits_SV in zip(new, logits_BSV, strict=True):
            last = len(prompt) + len(tokens) - 1
            self._known[prompt, tokens] = logits_SV[len(prompt) - 1 : last].clone()


def errors_of(judge: Judge, request: RolloutRequest, rollout: Rollout) -> np.ndarray:
    """[T] absolute differences between the sampler's log-probabilities and the reference."""
    tokens = rollout.token_ids_T.tolist()
    expected_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, request.sampling.temperature or 1.0)
    return np.abs(rollout.sampler_logprobs_T - expected_TV[np.arange(len(tokens)), tokens])


def margins_of(judge: Judge, request: RolloutRequest, tokens: Sequence[int]) -> np.ndarray:
    """[T] distance of each log-probability from the best one; 0 if the token is the reference's choice."""
    expected_TV = judge.logprobs_TV(request.prompt_token_ids, tokens)
    return np.asarray(expected_TV.max(-1) - expected_TV[np.arange(len(tokens)), list(tokens)])


def z_scores(judge: Judge, requests: Sequence[RolloutRequest], completions: Sequence[Sequence[int]]) -> np.ndarray:
    """Compare sampled tokens with the reference distribution. Returns three z-scores, standard normal if they match.

    For a statistic f of a token (its log-probability; whether it is the likeliest; whether it is among the ten
    likeliest), the sum of f(token) - E[f | tokens before] is a martingale, whatever the lengths and correlations of the
    completions. Its variance is the sum of the conditional variances.
    """
    excess = np.zeros(3)
    variance = np.zeros(3)
    judge.read_completions((request.prompt_token_ids for request in requests), completions)
    for request, tokens in zip(requests, completions, strict=True):
        sampling = request.sampling
        logprobs_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, sampling.temperature)
        probs_TV = enumeration.apply_sampling(logprobs_TV, 1.0, sampling.top_p, sampling.top_k)
        rank_TV = (-logprobs_TV).argsort(-1).argsort(-1)
        for number, f_TV in enumerate((np.maximum(logprobs_TV, -40), rank_TV < 1, rank_TV < 10)):
            mean_T = (probs_TV * f_TV).sum(-1)
            variance[number] += ((probs_TV * f_TV**2).sum(-1) - mean_T**2).sum()
            excess[number] += (f_TV[np.arange(len(tokens)), list(tokens)] - mean_T).sum()
    return np.asarray(excess / np.sqrt(variance))
