"""Speculation does not change samples: in distribution at temperature 1, token by token when greedy.

These tests use the production engine on long completions. test_sampled_distribution compares counts with exact
probabilities.

False alarms: the distribution test compares three z-scores per mechanism with +-4.5. For correct code each exceeds it
with probability 6.8e-6, so 2.1e-5 per mechanism over the choice of seeds. The seeds are fixed, so the outcome is, too.

Power: the unrepaired CPU kernel must exceed twice the bound with the same model, requests and drafter
(test_sampled_distribution).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from tests import enumeration
from tests.conftest import MECHANISMS
from tests.vllm_cases import (
    NONE,
    Engines,
    Judge,
    Served,
    collect_rollouts,
    errors_of,
    margins_of,
    some_requests,
    z_scores,
)

from specrl.records import FinishReason, RolloutRequest, Sampling

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.parametrize("kind", MECHANISMS, scope="session"),
]

Z_LIMIT = 4.5
SAMPLES = 96
TOKENS = 48
GREEDY_PROMPTS = 200
CONTEXT = 512  # of vllm_cases
DRAFT_TOKENS = 3
NEAR_TIE = 1e-3  # nats: a hundred times the largest error of a log-probability seen in float32


@pytest_asyncio.fixture(loop_scope="session")
async def served(kind: str, engines: Engines) -> Served:
    """An engine of each mechanism, which serves its first version."""
    found = await engines.get_served(kind)
    await found.publish(0)
    return found


@pytest.fixture(scope="module")
def judges() -> dict[Path, Judge]:
    """Judges by policy, created on demand."""
    return {}


@pytest.fixture
def judge(served: Served, judges: dict[Path, Judge]) -> Judge:
    """The judge of the first version."""
    return judge_of(served, 0, judges)


def judge_of(served: Served, version: int, judges: dict[Path, Judge]) -> Judge:
    """Return the judge, which runs transformers, of a version."""
    policy = served.versions[version].policy
    if policy not in judges:
        judges[policy] = Judge(policy)
    return judges[policy]


async def test_sampling_at_temperature_one_has_the_policys_distribution(served: Served, judge: Judge) -> None:
    requests = some_requests(SAMPLES, TOKENS)
    before = (await served.engine.get_status()).speculation
    rollouts = await collect_rollouts(served.engine, requests)
    since = (await served.engine.get_status()).speculation.minus(before)
    if served.kind != NONE:  # a drafter that is never or always right would prove nothing
        assert 0.05 < since.accepted_tokens / since.draft_tokens < 0.95
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    print(f"{served.kind}: z {scores.round(2)}, accepted {since.accepted_tokens}/{since.draft_tokens}")  # noqa: T201
    assert np.abs(scores).max() < Z_LIMIT


@pytest.mark.deep
@pytest.mark.parametrize(
    "drawn",
    [{"temperature": 0.7}, {"top_p": 0.9}, {"top_k": 20}, {"top_p": 0.9, "top_k": 20}],
    ids=["0.7", "top-p", "top-k", "both"],
)
async def test_truncated_sampling_has_the_policys_renormalised_distribution(
    served: Served, judge: Judge, drawn: dict[str, Any]
) -> None:
    requests = [
        replace(request, sampling=replace(request.sampling, **drawn)) for request in some_requests(SAMPLES, TOKENS)
    ]
    rollouts = await collect_rollouts(served.engine, requests)
    scores = z_scores(judge, requests, [rollout.token_ids_T.tolist() for rollout in rollouts])
    print(f"{served.kind} {drawn}: z {scores.round(2)}")  # noqa: T201
    assert np.abs(scores).max() < Z_LIMIT


@pytest.mark.parametrize(
    "drawn",
    [
        {"temperature": 1.0},
        {"temperature": 0.7},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.8},
        {"temperature": 1.0, "top_k": 3},
    ],
    ids=["1", "0.7", "greedy", "top-p", "top-k"],
)
async def test_sampler_logprobs_belong_to_the_sampled_distribution(
    served: Served, judge: Judge, drawn: dict[str, Any]
) -> None:
    requests = [replace(request, sampling=replace(request.sampling, **drawn)) for request in some_requests(16, TOKENS)]
    rollouts = await collect_rollouts(served.engine, requests)
    completions = [rollout.token_ids_T.tolist() for rollout in rollouts]
    judge.read_completions((request.prompt_token_ids for request in requests), completions)
    errors = []
    for request, rollout, tokens in zip(requests, rollouts, completions, strict=True):
        expected_TV = processed_TV(judge, request, tokens)
        errors.append(np.abs(rollout.sampler_logprobs_T - expected_TV[np.arange(len(tokens)), tokens]))
    found = np.concatenate(errors)
    print(f"{served.kind} {drawn}: mean {found.mean():.1e}, max {found.max():.1e}")  # noqa: T201
    assert found.mean() < 1e-3
    assert found.max() < 1e-2


def processed_TV(judge: Judge, request: RolloutRequest, tokens: list[int]) -> np.ndarray:
    """[T, V] log-probabilities after temperature, top-k and top-p."""
    sampling = request.sampling
    logprobs_TV = judge.logprobs_TV(request.prompt_token_ids, tokens, sampling.temperature or 1.0)
    with np.errstate(divide="ignore"):  # top-k and top-p give log(0)
        return np.asarray(np.log(enumeration.apply_sampling(logprobs_TV, 1.0, sampling.top_p, sampling.top_k)))


async def test_completion_ends_at_its_last_token_and_before_a_stop_string(served: Served, judge: Judge) -> None:
    """Drafts reach past both ends; tokens there are neither returned nor counted."""
    engine, (request,) = served.engine, some_requests(1, 40, temperature=0)
    (whole,) = await collect_rollouts(engine, [request])
    assert (whole.total_length, whole.finish_reason) == (40, FinishReason.LENGTH)
    tokens = whole.token_ids_T.tolist()
    lengths = [replace(request, rollout_id=f"{n}", sampling=Sampling(n, 0.0)) for n in range(1, 9)]
    for number, rollout in enumerate(await collect_rollouts(engine, lengths), 1):
        assert rollout.token_ids_T.tolist() == tokens[:number]
    stop = whole.text[10:12]
    (cut,) = await collect_rollouts(engine, [replace(request, sampling=Sampling(40, 0.0, stop=(stop,)))])
    assert cut.finish_reason is FinishReason.STOP
    assert cut.text == whole.text[: whole.text.index(stop)]
    cut.check(40)


async def test_completion_may_fill_the_context(served: Served, judge: Judge) -> None:
    """With a long prompt and a short completion, and the reverse. Room is left for a draft past the end."""
    room = CONTEXT - (DRAFT_TOKENS + 1 if served.kind != NONE else 1)
    prompts = [tuple(10 + (7 * place) % 240 for place in range(length)) for length in (room - 9, 12)]
    requests = [
        RolloutRequest(f"r{n}", "group", n, prompt, Sampling(room - len(prompt), seed=n))
        for n, prompt in enumerate(prompts)
    ]
    for request, rollout in zip(requests, await collect_rollouts(served.engine, requests), strict=True):
        rollout.check(request.sampling.max_tokens)
        if rollout.finish_reason is FinishReason.LENGTH:
            assert rollout.total_length == request.sampling.max_tokens
        assert errors_of(judge, request, rollout).max() < 1e-2


async def test_greedy_rollouts_are_the_policys_before_and_after_an_update(
    served: Served, judges: dict[Path, Judge], greedy: dict[Path, list[list[int]]]
) -> None:
    """A near-tie is a pair of top tokens closer than NEAR_TIE, whose order depends on rounding.

    There may be a few near-ties where the engine differs from transformers or from another mechanism. Any other
    difference fails.
    """
    requests = [
        replace(request, prompt_token_ids=(*request.prompt_token_ids, 10 + number))
        for number, request in enumerate(some_requests(GREEDY_PROMPTS, 24, temperature=0))
    ]
    outputs = []
    for version in (0, 1):
        await served.publish(version)
        outputs.append([rollout.token_ids_T.tolist() for rollout in await collect_rollouts(served.engine, requests)])
        judge = judge_of(served, version, judges)
        judge.read_completions((request.prompt_token_ids for request in requests), outputs[-1])
        margins = np.concatenate(
            [margins_of(judge, request, tokens) for request, tokens in zip(requests, outputs[-1], strict=True)]
        )
        assert margins.max() < NEAR_TIE
        assert (margins > 0).mean() < 1e-3
        same = outputs[-1] == greedy.setdefault(served.versions[version].policy, outputs[-1])
        print(f"{served.kind} v{version}: same={same}, near-ties {(margins > 0).sum()} of {margins.size}")  # noqa: T201
        assert same or (margins > 0).any()
    assert outputs[0] != outputs[1]


@pytest.fixture(scope="module")
def greedy() -> dict[Path, list[list[int]]]:
    """Greedy outputs of the first mechanism, by policy. `mtp` has a policy of its own: see sampled_distribution."""
    return {}
