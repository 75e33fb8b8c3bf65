"""Turns on the real engine, with drafts: each continues the very tokens sampled before, under the policy it says."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

import pytest
from tests.engine_call import EngineCall
from tests.vllm_cases import EAGLE3, NGRAM, Engines, Judge, collect, errors_of, some_requests
from tests.weight_sender import WeightSender, update

from specrl.coordinator.turns import Talk, Turns
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import Prompt, Rollout, RolloutRequest, Sampling, WeightChecksums
from specrl.rpc.clients import Terms
from specrl.spec.tools import AnsweredBy, CodeTool, Tools
from specrl.tools import Delimiters, Output

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

LARGEST_ERROR = 1e-2  # nats, as in test_weight_updates; another context gives nats
PROMPT = Prompt("p", 0, (), "", "")


class Echo:
    """Answers with the call, backwards."""

    async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
        return Output(call[::-1] or "nothing")


async def turns_that_happen(engine: VllmEngine, model: str, requests: Sequence[RolloutRequest]) -> Turns:
    """Calls begin and end with letters that this policy, which is random, writes often."""
    texts = "".join(rollout.text for rollout in await collect(engine, requests))
    (start, _), (end, _) = Counter(letter for letter in texts if letter != "\ufffd").most_common(2)
    tools = Tools(answered_by=AnsweredBy(code=CodeTool()), call_start=start, call_end=end, max_output_tokens=12)
    return Turns("test", Delimiters(tools, model), Echo(), max_turns=4)


async def whole(turns: Turns, call: EngineCall, requests: Sequence[RolloutRequest]) -> dict[str, Rollout]:
    """Rollouts of several turns, by name."""
    talk = Talk(turns, call)
    talk.begin([(request, PROMPT) for request in requests], Terms(admit_together=True, min_policy_version=-1))
    talk.end()
    return {ended.rollout.rollout_id: ended.rollout async for ended in talk.rollouts()}


@pytest.mark.parametrize("kind", [EAGLE3, NGRAM], scope="session")
async def test_every_turn_continues_the_tokens_that_were_sampled(kind: str, engines: Engines) -> None:
    served = await engines.serving(kind)
    await served.publish(0)
    requests = some_requests(24, 96)
    turns = await turns_that_happen(served.engine, str(served.versions[0].policy), requests)
    call, judge = EngineCall(served.engine), Judge(served.versions[0].policy)
    before = (await served.engine.status()).speculation
    found = await whole(turns, call, requests)
    drafted = (await served.engine.status()).speculation.minus(before)
    assert drafted.accepted_tokens > 0, "with drafts"
    asked = {request.rollout_id: request for request in call.asked}
    for request in requests:
        rollout = found[request.rollout_id]
        rollout.check(96)
        sampled = rollout.sampled_N
        assert errors_of(judge, request, rollout)[sampled].max() < LARGEST_ERROR
        tokens = [*request.prompt_token_ids, *rollout.token_ids_T.tolist()]
        for number, span in enumerate(rollout.outputs):
            prefix = asked[f"{request.rollout_id}/turn-{number + 2}"].prompt_token_ids
            assert list(prefix) == tokens[: len(request.prompt_token_ids) + span.end]
    assert sum(len(rollout.outputs) for rollout in found.values()) > 12


async def test_a_turn_after_an_update_is_of_the_new_policy_and_reads_no_cache_of_the_old(
    eagle3_engine: VllmEngine, engines: Engines
) -> None:
    """New weights arrive while the first tool is at work; the others answer after that."""
    served = await engines.serving(EAGLE3)
    await served.publish(0)
    first, second = served.versions
    version = (await eagle3_engine.status()).policy_version
    sender = WeightSender()
    prompt = tuple(10 + (7 * number) % 240 for number in range(300))  # vLLM caches blocks of 128 tokens on CPUs
    requests = [RolloutRequest(f"r{n}", "group", n, prompt, Sampling(96, seed=n)) for n in range(8)]
    turns = await turns_that_happen(eagle3_engine, str(first.policy), requests)

    class Publisher(Echo):
        """Answers under the version after the one that called."""

        publication: asyncio.Task[WeightChecksums] | None = None

        async def answer(self, prompt: Prompt, completion: str, call: str) -> Output:
            if self.publication is None:
                publish = update(eagle3_engine, sender, second.tensors(True), version + 1)
                self.publication = asyncio.create_task(publish)
            await self.publication
            return await super().answer(prompt, completion, call)

    turns = Turns("test", turns.delimiters, Publisher(), turns.max_turns)
    found = await whole(turns, EngineCall(eagle3_engine), requests)
    sender.close()
    judge, turns_of_new = Judge(second.policy), 0
    for request in requests:
        rollout = found[request.rollout_id]
        rollout.check(96, range(version, version + 2))
        errors_T = errors_of(judge, request, rollout)
        for begin, end in rollout.turns[1:]:
            spans = [span for span in rollout.versions if span.first < end and span.end > begin]
            if {span.policy_version for span in spans} == {version + 1}:
                turns_of_new += 1
                assert errors_T[begin:end].max() < LARGEST_ERROR
        assert rollout.oldest_version in (version, version + 1)
    assert turns_of_new > 2
    assert any(rollout.oldest_version == version for rollout in found.values())
