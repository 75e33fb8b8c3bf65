"""Policy and drafter change together, in flight, and nothing of an older version leaks into a newer one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tests.vllm_cases import (
    EAGLE3,
    Judge,
    Models,
    Version,
    a_spec,
    collect,
    errors_of,
    margins_of,
    running,
    some_requests,
    speculation,
    z_scores,
)
from tests.weight_sender import Tensors, WeightSender, manifest_of, update

from specrl.errors import EngineFailed
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import RolloutRequest, Sampling, TensorMeta, WeightOwner

pytestmark = [pytest.mark.asyncio(loop_scope="session")]


@pytest_asyncio.fixture(loop_scope="session")
async def sender() -> AsyncIterator[WeightSender]:
    found = WeightSender()
    yield found
    found.close()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def recompute_engine(models: Models) -> AsyncIterator[VllmEngine]:
    """No head on disk: an untrained one of a part of the vocabulary; unfinished rollouts are computed again."""
    spec = a_spec(
        models.first.policy,
        {EAGLE3: {"numDraftTokens": 2, "draftVocabSize": 200}},
        weights={"kvCache": "Recompute"},
        generation={"maxLiveRollouts": 8},
    )
    async with running(spec) as engine:
        yield engine


def reduced(version: Version) -> list[tuple[TensorMeta, torch.Tensor]]:
    """The version's drafter restricted to the last 200 of the 264 tokens, as a trainer would broadcast it."""
    tensors = load_file(version.drafter / "model.safetensors")
    first = tensors["lm_head.weight"].shape[0] - 200
    tensors["lm_head.weight"] = tensors["lm_head.weight"][first:].contiguous()
    tensors["d2t"] = torch.full((200,), first, dtype=torch.int64)
    return [
        (TensorMeta(name, WeightOwner.DRAFTER, str(t.dtype).removeprefix("torch."), tuple(t.shape)), t)
        for name, t in tensors.items()
    ]


async def until_generated(engine: VllmEngine, tokens: int) -> None:
    """Wait for so many tokens more."""
    goal = (await engine.status()).speculation.generated_tokens + tokens
    while (await engine.status()).speculation.generated_tokens < goal:  # noqa: ASYNC110 - a counter
        await asyncio.sleep(0.002)


async def test_engine_without_weights_of_a_trainer_serves_version_minus_one(recompute_engine: VllmEngine) -> None:
    (rollout,) = await collect(recompute_engine, some_requests(1))
    assert (await recompute_engine.status()).policy_version == -1
    assert [span.policy_version for span in rollout.versions] == [-1]


async def test_untrained_head_becomes_the_one_that_is_sent(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    async def acceptance() -> float:
        before = (await recompute_engine.status()).speculation
        await collect(recompute_engine, some_requests(8))
        since = (await recompute_engine.status()).speculation.minus(before)
        return since.accepted_tokens / since.draft_tokens

    assert await acceptance() < 0.1
    await update(recompute_engine, sender, [*models.first.tensors(False), *reduced(models.first)], 0)
    assert await acceptance() > 0.2


async def test_recomputed_rollouts_continue_as_the_new_policy_would(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    before = (await recompute_engine.status()).policy_version
    await update(recompute_engine, sender, [*models.first.tensors(False), *reduced(models.first)], before + 1)
    requests = some_requests(4, 200, temperature=0)
    waiting = asyncio.create_task(collect(recompute_engine, requests))
    await until_generated(recompute_engine, 100)
    await update(recompute_engine, sender, [*models.second.tensors(False), *reduced(models.second)], before + 2)
    old, new = Judge(models.first.policy), Judge(models.second.policy)
    crossed = 0
    for request, rollout in zip(requests, await waiting, strict=True):
        tokens, cut = rollout.token_ids_T.tolist(), rollout.versions[0].end
        assert margins_of(old, request, tokens[:cut]).max() < 1e-3
        if cut < len(tokens):
            continued = replace(request, prompt_token_ids=(*request.prompt_token_ids, *tokens[:cut]))
            assert margins_of(new, continued, tokens[cut:]).max() < 1e-3
            crossed += 1
    assert crossed


async def test_samples_follow_the_policy_of_their_own_version_through_every_swap(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """Two policies in turn, under rollouts at temperature 1 whose next drafts were made before the swap."""
    base, policies = (await recompute_engine.status()).policy_version + 1, (models.first, models.second)
    requests, swaps = some_requests(24, 100), 5
    for number in range(swaps + 1):
        version = policies[number % 2]
        await update(recompute_engine, sender, [*version.tensors(False), *reduced(version)], base + number)
        if number == 0:
            waiting = asyncio.create_task(collect(recompute_engine, requests))
        await until_generated(recompute_engine, 200)
    parts: list[list[tuple[RolloutRequest, list[int]]]] = [[], []]
    crossed = 0
    for request, rollout in zip(requests, await waiting, strict=True):
        tokens = rollout.token_ids_T.tolist()
        crossed += len(rollout.versions) - 1
        for span in rollout.versions:
            begun = replace(request, prompt_token_ids=(*request.prompt_token_ids, *tokens[: span.first]))
            parts[(span.policy_version - base) % 2].append((begun, tokens[span.first : span.end]))
    assert crossed >= swaps
    judges = [Judge(version.policy) for version in policies]
    for number, judge in enumerate(judges):
        mine, others = (tuple(zip(*parts[place], strict=True)) for place in (number, 1 - number))
        assert np.abs(z_scores(judge, *mine)).max() < 4.5
        assert np.abs(z_scores(judge, *others)).max() > 9, "the other policy's tokens would be seen"


async def test_updated_engine_equals_one_that_started_from_the_new_checkpoint(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """Outputs, log-probabilities and every count of accepted drafts: the last shows that the drafter is new too."""

    async def observe(engine: VllmEngine) -> tuple[list[bytes], object]:
        before = (await engine.status()).speculation
        requests = [*some_requests(16), *some_requests(16, temperature=0)]
        requests = [replace(request, rollout_id=str(number)) for number, request in enumerate(requests)]
        rollouts = await collect(engine, requests, together=True)
        seen = [rollout.token_ids_T.tobytes() + rollout.sampler_logprobs_T.tobytes() for rollout in rollouts]
        return seen, (await engine.status()).speculation.minus(before)

    number = (await eagle3_engine.status()).policy_version + 1
    await update(eagle3_engine, sender, models.first.tensors(True), number)
    old = await observe(eagle3_engine)
    await update(eagle3_engine, sender, models.second.tensors(True), number + 1)
    updated = await observe(eagle3_engine)
    async with running(a_spec(models.second.policy, speculation(EAGLE3, models.second))) as fresh:
        assert updated == await observe(fresh)
    assert updated != old


async def test_prefix_of_an_older_version_is_never_used_by_a_later_rollout(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """More rollouts of one long prompt than run at once, and new weights while some still wait (kvCache Keep)."""
    version = (await eagle3_engine.status()).policy_version
    await update(eagle3_engine, sender, models.first.tensors(True), version + 1)
    prompt = tuple(10 + (7 * number) % 240 for number in range(300))  # vLLM caches blocks of 128 tokens on CPUs
    requests = [RolloutRequest(f"r{n}", "group", n, prompt, Sampling(48, seed=n)) for n in range(40)]
    waiting = asyncio.create_task(collect(eagle3_engine, requests))
    await until_generated(eagle3_engine, 200)
    await update(eagle3_engine, sender, models.second.tensors(True), version + 2)
    rollouts = await waiting
    requests += [replace(requests[0], rollout_id="later")]
    rollouts += await collect(eagle3_engine, requests[-1:])
    new = Judge(models.second.policy)
    begun_later = 0
    for request, rollout in zip(requests, rollouts, strict=True):
        rollout.check(48)
        if rollout.oldest_version == version + 2:
            assert errors_of(new, request, rollout).max() < 1e-2
            begun_later += 1
    assert begun_later > 1  # beside the one that was asked for later, some that waited when the weights changed


async def test_update_that_lacks_a_tensor_is_refused_before_it_is_sent(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    whole: Tensors = models.first.tensors(True)
    lacking = [(meta, tensor) for meta, tensor in whole if meta.name != "midlayer.mlp.up_proj.weight"]
    with pytest.raises(EngineFailed, match=r"layers\.0\.mlp\.up_proj\.weight missing"):
        await eagle3_engine.receive(sender.group(), manifest_of(lacking), 99)
    with pytest.raises(EngineFailed, match="must hold the policy's tensors"):
        await eagle3_engine.receive(sender.group(), manifest_of(lacking[1:]), 99)
    assert len(await collect(eagle3_engine, some_requests(2))) == 2


async def test_speculation_by_eagle3_repeats_bit_for_bit_however_the_engine_was_used_before(
    eagle3_engine: VllmEngine,
) -> None:
    requests = some_requests(40, 48)  # more than run at once
    first = await collect(eagle3_engine, requests, together=True)
    await collect(eagle3_engine, some_requests(5, seed=9))
    second = await collect(eagle3_engine, requests, together=True)
    for mine, other in zip(first, second, strict=True):
        assert mine.token_ids_T.tobytes() == other.token_ids_T.tobytes()
        assert mine.sampler_logprobs_T.tobytes() == other.sampler_logprobs_T.tobytes()
    different = await collect(eagle3_engine, some_requests(40, 48, seed=1), together=True)
    assert any(not np.array_equal(a.token_ids_T, b.token_ids_T) for a, b in zip(first, different, strict=True))


async def test_head_that_would_share_the_policys_output_layer_is_refused(models: Models, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    tensors = load_file(models.first.drafter / "model.safetensors")
    tensors["lm_head.weight"] = load_file(models.first.policy / "model.safetensors")["lm_head.weight"]
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_bytes((models.first.drafter / "config.json").read_bytes())
    engine = VllmEngine(a_spec(models.first.policy, {EAGLE3: {"path": str(head)}}), "gen-0")
    with pytest.raises(ValueError, match="must own its lm_head"):
        await engine.start()
