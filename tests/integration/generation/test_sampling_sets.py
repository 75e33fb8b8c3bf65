"""With top-p or top-k a rollout carries the ids that could be sampled, and its log-probabilities are over these.

The sets are compared with those that transformers computes. They may differ where a token lies at the edge: the engine
and transformers round differently. So the mass that both have, and the log-probabilities, are compared as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests import enumeration
from tests.requirements import SUFFIX as SUFFIX_PACKAGE
from tests.vllm_cases import (
    DRAFT_MODEL,
    EAGLE3,
    MTP,
    NGRAM,
    NONE,
    SUFFIX,
    Judge,
    Models,
    a_spec,
    collect_rollouts,
    running_engine,
    some_requests,
    speculation,
)
from tests.weight_sender import WeightSender, update_weights

from specrl.records import FinishReason, Rollout, RolloutRequest, Sampling, TrainRollout

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="session")]

SETTINGS: tuple[dict[str, Any], ...] = ({"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20})
TEMPERATURE = 0.7
TOKENS = 40


def check_sets(judge: Judge, request: RolloutRequest, rollout: Rollout) -> tuple[float, int, float]:
    """Compare a rollout's sets and log-probabilities with transformers, and the latter with its own sets.

    Returns the mean absolute error of log-probabilities, renormalised over the rollout's sets, the largest set, and the
    share of tokens whose set differs.
    """
    rollout.check(TOKENS)
    sets = rollout.sets
    assert sets is not None
    tokens = rollout.token_ids_T.tolist()
    sampling = request.sampling
    logprobs_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, sampling.temperature)
    mass_TV = enumeration.apply_sampling(logprobs_TV, 1.0, sampling.top_p, sampling.top_k)
    is_in_TV = np.zeros(mass_TV.shape, dtype=bool)
    is_in_TV[sets.owner_M, sets.ids_M] = True
    differs_TV = is_in_TV != (mass_TV > 0)
    assert differs_TV.sum(-1).max() <= 1  # of a set's tokens, only the last one is at its edge
    kept_TV = np.where(is_in_TV, logprobs_TV, -np.inf)
    renormalised_TV = kept_TV - np.logaddexp.reduce(kept_TV, axis=-1, keepdims=True)
    error_T = np.abs(rollout.sampler_logprobs_T - renormalised_TV[np.arange(len(tokens)), tokens])
    return float(error_T.mean()), int(sets.sizes_N.max()), float(differs_TV.any(-1).mean())


def compare_with_trainer(policy: Path, requests: Sequence[RolloutRequest], rollouts: Sequence[Rollout]) -> None:
    """Compare log-probabilities with those of the trainer, which must differ from those of the whole vocabulary."""
    from specrl.trainer.megatron_backend import MegatronBackend

    sampling = {"maxTokens": 64, "temperature": str(TEMPERATURE), "topP": "0.9"}
    backend = MegatronBackend(a_spec(policy, generation={"sampling": sampling}))
    backend.load_model(None)
    items = [
        TrainRollout(request.prompt_token_ids, rollout, 0.0)
        for request, rollout in zip(requests, rollouts, strict=True)
    ]
    found, whole = (
        np.concatenate(backend.score_rollouts(some))
        for some in (items, [replace(item, rollout=replace(item.rollout, sets=None)) for item in items])
    )
    backend.close()
    sampled = np.concatenate([rollout.sampler_logprobs_T for rollout in rollouts])
    print(f"trainer: {np.abs(found - sampled).mean():.1e}, {np.abs(whole - sampled).mean():.1e} without sets")  # noqa: T201
    assert np.abs(found - sampled).mean() < 1e-5
    assert np.abs(found - sampled).max() < 1e-3
    assert np.abs(whole - sampled).mean() > 1e-2


DEEP = pytest.mark.deep
PROBABILISTIC = {"draftSampling": "Probabilistic"}


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (NONE, {}),
        (NGRAM, {}),
        (EAGLE3, {}),
        pytest.param(EAGLE3, PROBABILISTIC, marks=DEEP),
        pytest.param(SUFFIX, {}, marks=DEEP),
        pytest.param(MTP, {}, marks=DEEP),
        pytest.param(MTP, PROBABILISTIC, marks=DEEP),
        pytest.param(DRAFT_MODEL, {}, marks=DEEP),
        pytest.param(DRAFT_MODEL, PROBABILISTIC, marks=DEEP),
    ],
)
async def test_rollouts_carry_the_sets_that_they_were_sampled_from(
    kind: str, options: dict[str, str], models: Models
) -> None:
    """Accepted, recovered and bonus tokens alike, before and after an update of the weights."""
    if kind == SUFFIX:
        SUFFIX_PACKAGE.require()
    first, second = models.versions(kind)
    sampling = {"maxTokens": 64, "temperature": str(TEMPERATURE), "topP": "0.9"}
    section = {kind: speculation(kind, first)[kind] | options}
    spec = a_spec(first.policy, section, generation={"sampling": sampling})
    requests = [
        replace(request, sampling=replace(request.sampling, temperature=TEMPERATURE, **SETTINGS[number % 3]))
        for number, request in enumerate(some_requests(12, TOKENS))
    ]
    sender = WeightSender()
    async with running_engine(spec) as engine:
        for version, folder in enumerate((first, second)):
            await update_weights(engine, sender, folder.tensors_of(kind), version)
            judge = Judge(folder.policy)
            before = (await engine.get_status()).speculation
            rollouts = await collect_rollouts(engine, requests)
            found = [check_sets(judge, *pair) for pair in zip(requests, rollouts, strict=True)]
            errors, sizes, shares = zip(*found, strict=True)
            print(f"{kind} {options}: mean error {np.mean(errors):.1e}, sets up to {sizes}, differ {shares}")  # noqa: T201
            assert max(errors) < 1e-4
            assert min(sizes) > 2
            # Of all rollouts: one token at an edge is more than this share of a single rollout.
            assert np.mean(shares) < 0.02
            if kind != MTP:
                compare_with_trainer(folder.policy, requests, rollouts)
            since = (await engine.get_status()).speculation.minus(before)
            if kind != NONE:
                assert 0.02 < since.accepted_tokens / since.draft_tokens < 0.95
    sender.close()


async def test_other_requests_of_such_an_engine(models: Models) -> None:
    """Greedy ones, as of a validation, have the policy's most likely tokens. A stop string cuts the sets, too. A set
    may be the whole vocabulary.
    """
    first, _ = models.versions(NGRAM)
    sampling = {"maxTokens": 64, "topP": "0.9"}
    spec = a_spec(first.policy, speculation(NGRAM, first), generation={"sampling": sampling})
    (request,) = some_requests(1, TOKENS)
    greedy = replace(request, rollout_id="greedy", sampling=Sampling(TOKENS, 0.0, 0.9, seed=1))
    sender = WeightSender()
    async with running_engine(spec) as engine:
        await update_weights(engine, sender, first.tensors(with_drafter=False), 0)
        judge = Judge(first.policy)
        (found,) = await collect_rollouts(engine, [greedy])
        logprobs_TV = judge.logprobs_TV(greedy.prompt_token_ids, found.token_ids_T.tolist())
        assert (logprobs_TV.max(-1) - logprobs_TV[np.arange(TOKENS), found.token_ids_T] < 1e-3).all()

        plain = replace(request, sampling=Sampling(TOKENS, 1.0, seed=5))
        (untouched,) = await collect_rollouts(engine, [plain])
        assert untouched.sets is None

        wide = replace(plain, rollout_id="wide", sampling=Sampling(TOKENS, 1.0, 1.0, top_k=10**9, seed=5))
        (whole,) = await collect_rollouts(engine, [wide])
        assert whole.sets is not None
        assert set(whole.sets.sizes_N.tolist()) == {logprobs_TV.shape[1]}
        assert whole.token_ids_T.tolist() == untouched.token_ids_T.tolist()

        some = replace(request, sampling=Sampling(TOKENS, 1.0, 0.9, seed=5))
        (long,) = await collect_rollouts(engine, [some])
        stop = long.text[6:8]
        (cut,) = await collect_rollouts(
            engine, [replace(some, rollout_id="cut", sampling=replace(some.sampling, stop=(stop,)))]
        )
        assert cut.finish_reason is FinishReason.STOP
        cut.check(TOKENS)
        assert cut.sets is not None
        assert cut.total_length < long.total_length
    sender.close()
