"""Multi-turn rollouts on a real engine with drafts: each turn continues the sampled tokens, with the right policy.

Also how a stop string that is a special token ends a turn.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from tests.engine_call import EngineCall
from tests.vllm_cases import EAGLE3, NGRAM, Engines, Judge, collect_rollouts, errors_of, some_requests
from tests.weight_sender import WeightSender, update_weights

from specrl.agent_tools import CallDelimiters, ToolOutput
from specrl.coordinator.members.replica_session import ReplicaSession, TurnSettings
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.models import read_model_folder
from specrl.models.end_tokens import find_stop_tokens
from specrl.records import FinishReason, Prompt, Rollout, RolloutRequest, Sampling, WeightChecksums
from specrl.rpc.clients import GenerateOptions
from specrl.spec.tools import AnsweredBy, CodeTool, Tools

pytestmark = [pytest.mark.asyncio(loop_scope="session")]

LARGEST_ERROR = 1e-2  # nats, as in test_weight_updates; another context gives nats
PROMPT = Prompt("p", 0, (), "", "")


class Echo:
    """A tool that answers with the call reversed."""

    async def answer_call(self, prompt: Prompt, completion: str, call: str) -> ToolOutput:
        return ToolOutput(call[::-1] or "nothing")


async def build_likely_turns(engine: VllmEngine, model: str, requests: Sequence[RolloutRequest]) -> TurnSettings:
    """Build turns whose calls begin and end with letters that this random policy often writes."""
    texts = "".join(rollout.text for rollout in await collect_rollouts(engine, requests))
    (start, _), (end, _) = Counter(letter for letter in texts if letter != "\ufffd").most_common(2)
    tools = Tools(answered_by=AnsweredBy(code=CodeTool()), call_start=start, call_end=end, max_output_tokens=12)
    return TurnSettings("test", CallDelimiters(tools, model), Echo(), max_turns=4)


async def sample_rollouts(
    turns: TurnSettings, call: EngineCall, requests: Sequence[RolloutRequest]
) -> dict[str, Rollout]:
    """Sample multi-turn rollouts; returns them by id."""
    talk = ReplicaSession(turns, call)
    talk.begin_rollouts(
        [(request, PROMPT) for request in requests], GenerateOptions(admit_together=True, min_policy_version=-1)
    )
    talk.close_requests()
    return {ended.rollout.rollout_id: ended.rollout async for ended in talk.receive_finished()}


@pytest.mark.parametrize("kind", [EAGLE3, NGRAM], scope="session")
async def test_every_turn_continues_the_tokens_that_were_sampled(kind: str, engines: Engines) -> None:
    served = await engines.get_served(kind)
    await served.publish(0)
    requests = some_requests(24, 96)
    turns = await build_likely_turns(served.engine, str(served.versions[0].policy), requests)
    call = EngineCall(served.engine)
    judge = Judge(served.versions[0].policy)
    before = (await served.engine.get_status()).speculation
    found = await sample_rollouts(turns, call, requests)
    drafted = (await served.engine.get_status()).speculation.minus(before)
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


async def test_a_turn_after_an_update_uses_the_new_policy_and_no_old_cache(
    eagle3_engine: VllmEngine, engines: Engines
) -> None:
    """New weights arrive while the first tool call runs; the other calls are answered after the update."""
    served = await engines.get_served(EAGLE3)
    await served.publish(0)
    first, second = served.versions
    version = (await eagle3_engine.get_status()).policy_version
    sender = WeightSender()
    prompt = tuple(10 + (7 * number) % 240 for number in range(300))  # vLLM caches blocks of 128 tokens on CPUs
    requests = [RolloutRequest(f"r{n}", "group", n, prompt, Sampling(96, seed=n)) for n in range(8)]
    turns = await build_likely_turns(eagle3_engine, str(first.policy), requests)

    class Publisher(Echo):
        """A tool that publishes the next version before it answers."""

        publication: asyncio.Task[WeightChecksums] | None = None

        async def answer_call(self, prompt: Prompt, completion: str, call: str) -> ToolOutput:
            if self.publication is None:
                publish = update_weights(eagle3_engine, sender, second.tensors(True), version + 1)
                self.publication = asyncio.create_task(publish)
            await self.publication
            return await super().answer_call(prompt, completion, call)

    turns = TurnSettings("test", turns.delimiters, Publisher(), turns.max_turns)
    found = await sample_rollouts(turns, EngineCall(eagle3_engine), requests)
    sender.close()
    judge = Judge(second.policy)
    turns_of_new = 0
    for request in requests:
        rollout = found[request.rollout_id]
        rollout.check(96, range(version, version + 2))
        errors_T = errors_of(judge, request, rollout)
        for begin, end in rollout.turn_spans[1:]:
            spans = [span for span in rollout.versions if span.first < end and span.end > begin]
            if {span.policy_version for span in spans} == {version + 1}:
                turns_of_new += 1
                assert errors_T[begin:end].max() < LARGEST_ERROR
        assert rollout.oldest_version in (version, version + 1)
    assert turns_of_new > 2
    assert any(rollout.oldest_version == version for rollout in found.values())


async def test_a_stop_string_that_is_a_special_token_ends_a_completion_at_the_token(
    eagle3_engine: VllmEngine, engines: Engines
) -> None:
    """It was looked for in the text, which has no special tokens, so every completion had maxTokens.

    Drafts may reach past it. The prompt is the one after which this policy most likely writes the token.
    """
    stop = "<|im_end|>"
    policy = (await engines.get_served(EAGLE3)).versions[0].policy
    ((number, _),) = find_stop_tokens((stop,), read_model_folder(policy, "model.path")).items()
    tokens = tuple(range(10, 250))
    likely = int(Judge(policy).logprobs_TV(tokens[:1], tokens[1:])[:, number].argmax())
    sampling = Sampling(64, 2.0, stop=("never said", stop))
    requests = [
        replace(request, prompt_token_ids=tokens[: likely + 1], sampling=replace(sampling, seed=place))
        for place, request in enumerate(some_requests(24))
    ]
    ended = [it for it in await collect_rollouts(eagle3_engine, requests) if number in it.token_ids_T]
    assert ended
    for rollout in ended:
        assert rollout.token_ids_T.tolist().index(number) == rollout.total_length - 1
        assert (rollout.finish_reason, rollout.stop) == (FinishReason.STOP, stop)
        assert stop not in rollout.text
        rollout.check(64)
