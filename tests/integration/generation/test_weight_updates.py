"""Policy and drafter are updated together, in flight, and no state of an older version leaks into a newer one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from tests.tiny_models import Shape, make_policy
from tests.vllm_cases import (
    DRAFT_MODEL,
    EAGLE3,
    Judge,
    Models,
    ModelVersion,
    a_spec,
    collect_rollouts,
    errors_of,
    margins_of,
    running_engine,
    some_requests,
    speculation,
    z_scores,
)
from tests.weight_sender import Tensors, WeightSender, folder_tensors, manifest_of, update_weights

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
    """An engine with an untrained head of a reduced vocabulary, which recomputes unfinished rollouts on updates."""
    spec = a_spec(
        models.first.policy,
        {EAGLE3: {"numDraftTokens": 2, "draftVocabSize": 200}},
        weights={"kvCache": "Recompute"},
        generation={"maxLiveRollouts": 8},
    )
    async with running_engine(spec) as engine:
        yield engine


def reduced(version: ModelVersion) -> list[tuple[TensorMeta, torch.Tensor]]:
    """The version's drafter restricted to the last 200 of the 264 tokens, as a trainer would broadcast it."""
    tensors = load_file(version.drafter / "model.safetensors")
    first = tensors["lm_head.weight"].shape[0] - 200
    tensors["lm_head.weight"] = tensors["lm_head.weight"][first:].contiguous()
    tensors["d2t"] = torch.full((200,), first, dtype=torch.int64)
    return [
        (TensorMeta(name, WeightOwner.DRAFTER, str(t.dtype).removeprefix("torch."), tuple(t.shape)), t)
        for name, t in tensors.items()
    ]


async def until_generated(engine: VllmEngine, tokens: int, rollouts: asyncio.Task[Any]) -> None:
    """Wait until the engine has generated so many more tokens, or has finished all rollouts during a slow update."""
    goal = (await engine.get_status()).speculation.generated_tokens + tokens
    while not rollouts.done() and (await engine.get_status()).speculation.generated_tokens < goal:  # noqa: ASYNC110
        await asyncio.sleep(0.002)


async def test_an_engine_serves_version_minus_one_before_the_first_update(recompute_engine: VllmEngine) -> None:
    (rollout,) = await collect_rollouts(recompute_engine, some_requests(1))
    assert (await recompute_engine.get_status()).policy_version == -1
    assert [span.policy_version for span in rollout.versions] == [-1]


async def test_an_update_replaces_the_untrained_head(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    async def acceptance() -> float:
        before = (await recompute_engine.get_status()).speculation
        await collect_rollouts(recompute_engine, some_requests(8))
        since = (await recompute_engine.get_status()).speculation.minus(before)
        return since.accepted_tokens / since.draft_tokens

    assert await acceptance() < 0.1
    await update_weights(recompute_engine, sender, [*models.first.tensors(False), *reduced(models.first)], 0)
    assert await acceptance() > 0.2


async def test_recomputed_rollouts_continue_with_the_new_policy(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    before = (await recompute_engine.get_status()).policy_version
    await update_weights(recompute_engine, sender, [*models.first.tensors(False), *reduced(models.first)], before + 1)
    requests = some_requests(4, 200, temperature=0)
    waiting = asyncio.create_task(collect_rollouts(recompute_engine, requests))
    await until_generated(recompute_engine, 100, waiting)
    await update_weights(recompute_engine, sender, [*models.second.tensors(False), *reduced(models.second)], before + 2)
    old = Judge(models.first.policy)
    new = Judge(models.second.policy)
    crossed = 0
    for request, rollout in zip(requests, await waiting, strict=True):
        tokens = rollout.token_ids_T.tolist()
        cut = rollout.versions[0].end
        assert margins_of(old, request, tokens[:cut]).max() < 1e-3
        if cut < len(tokens):
            continued = replace(request, prompt_token_ids=(*request.prompt_token_ids, *tokens[:cut]))
            assert margins_of(new, continued, tokens[cut:]).max() < 1e-3
            crossed += 1
    assert crossed


async def test_tokens_follow_the_policy_of_their_version_through_every_update(
    recompute_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """Two policies alternate during rollouts at temperature 1; drafts made before an update are verified after it."""
    base = (await recompute_engine.get_status()).policy_version + 1
    policies = (models.first, models.second)
    requests = some_requests(24, 100)
    swaps = 5
    for number in range(swaps + 1):
        version = policies[number % 2]
        await update_weights(recompute_engine, sender, [*version.tensors(False), *reduced(version)], base + number)
        if number == 0:
            waiting = asyncio.create_task(collect_rollouts(recompute_engine, requests))
        await until_generated(recompute_engine, 200, waiting)
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
        assert np.abs(z_scores(judge, *others)).max() > 9, "the test must detect tokens of the other policy"


async def test_updated_engine_equals_one_that_started_from_the_new_checkpoint(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """Compares outputs, log-probabilities and counts of accepted drafts; the counts show that the drafter is new."""

    async def observe(engine: VllmEngine) -> tuple[list[bytes], object]:
        before = (await engine.get_status()).speculation
        requests = [*some_requests(16), *some_requests(16, temperature=0)]
        requests = [replace(request, rollout_id=str(number)) for number, request in enumerate(requests)]
        rollouts = await collect_rollouts(engine, requests, together=True)
        seen = [rollout.token_ids_T.tobytes() + rollout.sampler_logprobs_T.tobytes() for rollout in rollouts]
        return seen, (await engine.get_status()).speculation.minus(before)

    number = (await eagle3_engine.get_status()).policy_version + 1
    await update_weights(eagle3_engine, sender, models.first.tensors(True), number)
    old = await observe(eagle3_engine)
    await update_weights(eagle3_engine, sender, models.second.tensors(True), number + 1)
    updated = await observe(eagle3_engine)
    async with running_engine(a_spec(models.second.policy, speculation(EAGLE3, models.second))) as fresh:
        assert updated == await observe(fresh)
    assert updated != old


async def test_prefix_of_an_older_version_is_never_used_by_a_later_rollout(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    """Some rollouts of one long prompt still wait when new weights arrive (kvCache Keep)."""
    version = (await eagle3_engine.get_status()).policy_version
    await update_weights(eagle3_engine, sender, models.first.tensors(True), version + 1)
    prompt = tuple(10 + (7 * number) % 240 for number in range(300))  # vLLM caches blocks of 128 tokens on CPUs
    requests = [RolloutRequest(f"r{n}", "group", n, prompt, Sampling(48, seed=n)) for n in range(200)]
    waiting = asyncio.create_task(collect_rollouts(eagle3_engine, requests))
    await until_generated(eagle3_engine, 200, waiting)
    await update_weights(eagle3_engine, sender, models.second.tensors(True), version + 2)
    rollouts = await waiting
    requests += [replace(requests[0], rollout_id="later")]
    rollouts += await collect_rollouts(eagle3_engine, requests[-1:])
    new = Judge(models.second.policy)
    begun_later = 0
    for request, rollout in zip(requests, rollouts, strict=True):
        rollout.check(48)
        if rollout.oldest_version == version + 2:
            assert errors_of(new, request, rollout).max() < 1e-2
            begun_later += 1
    assert begun_later > 1  # the one requested later, and some that waited during the update


async def test_an_update_without_a_tensor_is_refused_before_the_transfer(
    eagle3_engine: VllmEngine, models: Models, sender: WeightSender
) -> None:
    whole: Tensors = models.first.tensors(True)
    lacking = [(meta, tensor) for meta, tensor in whole if meta.name != "midlayer.mlp.up_proj.weight"]
    with pytest.raises(EngineFailed, match=r"layers\.0\.mlp\.up_proj\.weight missing"):
        await eagle3_engine.receive_weights(sender.group(), manifest_of(lacking), 99)
    with pytest.raises(EngineFailed, match="tensors of the policy in the weight manifest differ"):
        await eagle3_engine.receive_weights(sender.group(), manifest_of(lacking[1:]), 99)
    assert len(await collect_rollouts(eagle3_engine, some_requests(2))) == 2


async def test_eagle3_rollouts_repeat_bit_for_bit_on_a_used_engine(
    eagle3_engine: VllmEngine,
) -> None:
    requests = some_requests(40, 48)  # more than run at once
    first = await collect_rollouts(eagle3_engine, requests, together=True)
    await collect_rollouts(eagle3_engine, some_requests(5, seed=9))
    second = await collect_rollouts(eagle3_engine, requests, together=True)
    for mine, other in zip(first, second, strict=True):
        assert mine.token_ids_T.tobytes() == other.token_ids_T.tobytes()
        assert mine.sampler_logprobs_T.tobytes() == other.sampler_logprobs_T.tobytes()
    different = await collect_rollouts(eagle3_engine, some_requests(40, 48, seed=1), together=True)
    assert any(not np.array_equal(a.token_ids_T, b.token_ids_T) for a, b in zip(first, different, strict=True))


async def test_a_head_with_the_policys_output_layer_is_refused(models: Models, tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    tensors = load_file(models.first.drafter / "model.safetensors")
    tensors["lm_head.weight"] = load_file(models.first.policy / "model.safetensors")["lm_head.weight"]
    save_file(tensors, head / "model.safetensors", metadata={"format": "pt"})
    (head / "config.json").write_bytes((models.first.drafter / "config.json").read_bytes())
    engine = VllmEngine(a_spec(models.first.policy, {EAGLE3: {"path": str(head)}}), "gen-0")
    with pytest.raises(ValueError, match="must have an lm_head of its own"):
        await engine.start()


async def test_an_updated_draft_model_that_equals_the_policy_is_always_accepted(
    tmp_path: Path, sender: WeightSender
) -> None:
    """Every weight of the draft model counts: joined projections, and an output layer that is tied to the embedding."""
    shape = Shape(heads=4, groups=2, is_tied=True)
    first, second, other = (make_policy(tmp_path / f"{seed}", seed=seed, shape=shape) for seed in (1, 2, 3))
    async with running_engine(a_spec(first, {DRAFT_MODEL: {"path": str(other)}})) as engine:

        async def acceptance() -> float:
            before = (await engine.get_status()).speculation
            await collect_rollouts(engine, some_requests(8, temperature=0))
            since = (await engine.get_status()).speculation.minus(before)
            return since.accepted_tokens / since.draft_tokens

        assert await acceptance() < 0.5
        for number, policy in enumerate((second, first)):
            as_drafter = folder_tensors(policy, WeightOwner.DRAFTER)
            await update_weights(engine, sender, [*folder_tensors(policy, WeightOwner.POLICY), *as_drafter], number)
            assert await acceptance() > 0.97  # drafts beyond a completion's end count as rejected
