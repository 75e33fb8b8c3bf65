"""Rollouts that call tools, in a whole run: what is trained is what was sampled, whichever part fails.

The stand-in's next token depends on the last one and on the version alone, so every log-probability can be computed
again from the table of its version and the token before it: a token that was not sampled there, or that follows others
than it was sampled after, would be found.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.engine_call import EngineCall
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape, log_softmax
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specrl.agent_tools import ToolOutput
from specrl.coordinator.members.replica_session import make_turn_settings
from specrl.errors import ToolFailed
from specrl.records import FinishReason, Prompt, Reward, Rollout, Sampling
from specrl.rpc.clients import GenerateOptions
from specrl.spec import RunSpec

MAX_TOKENS = 40
MAX_TURNS = 3


def a_run_with_tools(folder: Path, **schedule: int | str) -> RunSpec:
    """Token 7 ends a call, tokens 8 and 9 enclose an output, token 1 ends a rollout."""
    tokenizer = Tokenizer(models.WordLevel({str(token): token for token in range(VOCAB)}, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tools = {
        "answeredBy": {"python": {"function": "nobody:asks"}},
        "callStart": "3",
        "callEnd": "7",
        "outputStart": "8",
        "outputEnd": "9",
        "maxTurns": MAX_TURNS,
        "maxOutputTokens": 3,
    }
    raw = a_spec(folder, **schedule).model_dump(mode="json", by_alias=True) | {"tools": tools}
    raw["generation"]["sampling"]["maxTokens"] = MAX_TOKENS
    return RunSpec.model_validate(raw)


def answer_to(call: str) -> str:
    """An output of one to three tokens, which depend on the call."""
    digest = hashlib.blake2b(call.encode(), digest_size=4).digest()
    return " ".join(str(10 + byte % 20) for byte in digest[: 1 + digest[3] % 3])


@dataclass
class Answers:
    """A tool that answers in the event loop. fails: whether a call, by its number, fails."""

    fails: Callable[[int], bool] = lambda _: False
    breaks: bool = False
    calls: int = 0

    async def answer_call(self, prompt: Prompt, completion: str, call: str) -> ToolOutput:
        self.calls += 1
        await asyncio.sleep(0.002)
        if self.breaks:
            raise ToolFailed("tool workers must stay alive, got none; the run ends")
        if self.fails(self.calls):
            return ToolOutput("", "crash: the tool's process ended")
        return ToolOutput(answer_to(call))


def a_run(folder: Path, tool: Answers, **schedule: int | str) -> Run:
    spec = a_run_with_tools(folder, **schedule)
    return Run(folder, spec, turns=make_turn_settings(spec, tool))


def check_trained(run: Run, rollout: Rollout, prompt: tuple[int, ...]) -> None:
    """Check that each sampled token follows from exactly the tokens before it, and that outputs are the tool's."""
    rollout.check(MAX_TOKENS)
    assert run.trainer is not None
    tables = run.trainer.backend.tables
    tokens = [*prompt, *rollout.token_ids_T.tolist()]
    for span in rollout.versions:
        for place in range(span.first, span.end):
            before = tokens[len(prompt) + place - 1]
            token = tokens[len(prompt) + place]
            expected = log_softmax(tables[span.policy_version][before])[token]
            assert rollout.sampler_logprobs_T[place] == pytest.approx(expected, abs=1e-4)
    for (first, end), span in zip(rollout.turn_spans, rollout.outputs, strict=False):
        turn = [str(token) for token in rollout.token_ids_T[first:end]]
        call = " ".join(turn).partition("7")[0]
        output = rollout.token_ids_T[span.first : span.end].tolist()
        _, began, asked = call.rpartition("3")
        if began:
            assert output == [8, *map(int, answer_to(asked).split()), 9]
        else:
            assert output[0] == 8


def rollouts_of(run: Run) -> list[tuple[Rollout, tuple[int, ...]]]:
    return [(item.rollout, item.prompt_token_ids) for batch in run.trained for item in batch.rollouts]


def check_all(run: Run, lag: int) -> list[Rollout]:
    """Check that every prompt is trained once, within the lag bound, as sampled. Returns rollouts with calls."""
    steps = [batch.step for batch in run.trained]
    assert steps == sorted(set(steps)) == list(range(1, run.spec.schedule.steps + 1))
    positions = [position for batch in run.trained for position in batch.positions]
    assert sorted(positions) == list(range(run.spec.schedule.steps * run.spec.schedule.prompts_per_step))
    for batch in run.trained:
        assert all(0 <= found <= lag for found in batch.policy_lags)
    found = rollouts_of(run)
    for rollout, prompt in found:
        check_trained(run, rollout, prompt)
    return [rollout for rollout, _ in found if rollout.outputs]


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_what_is_trained_is_what_was_sampled(tmp_path: Path, lag: int) -> None:
    run = a_run(tmp_path, Answers(), maxPolicyLag=lag)
    async with run:
        await run.finish()
    called = check_all(run, lag)
    assert len(called) > 10, "tools were called"
    reasons = {rollout.finish_reason for rollout, _ in rollouts_of(run)}
    assert reasons == set(FinishReason), "rollouts end in every way"
    assert max(len(rollout.outputs) for rollout in called) == MAX_TURNS - 1
    assert run.loop.rollouts.unaccounted_rollouts == 0


async def test_a_failing_tool_causes_neither_a_reward_of_zero_nor_an_output(tmp_path: Path) -> None:
    run = a_run(tmp_path, Answers(fails=lambda call: call in (7, 14, 21)))
    async with run:
        await run.finish()
        rollouts = run.loop.rollouts
    assert rollouts.counters["ungraded"] > 0  # two failing calls may be of rollouts that are sampled again together
    assert rollouts.counters["poisoned"] == 0
    assert check_all(run, 1)


async def test_a_broken_tool_pool_ends_the_run_and_makes_no_replica_stale(tmp_path: Path) -> None:
    run = a_run(tmp_path, Answers(breaks=True))
    async with run:
        with pytest.raises(ToolFailed, match="tool workers must stay alive"):
            await run.finish()
        assert set(run.registry.replicas) == {"gen-0", "gen-1"}


@pytest.mark.parametrize("who", ["replica", "coordinator"])
async def test_no_prompt_is_lost_whichever_process_dies_between_turns(tmp_path: Path, who: str) -> None:
    tool = Answers()
    run = a_run(tmp_path, tool, steps=8)
    async with run:
        for calls in (10, 60):
            await run.until(lambda calls=calls: tool.calls >= calls)  # type: ignore[misc]
            await (run.restart_replica("gen-0") if who == "replica" else run.restart_coordinator())
        await run.finish()
    check_all(run, 1)


async def test_closing_aborts_turns_and_calls(tmp_path: Path) -> None:
    """After a session is closed, nothing runs at the replica, and nothing waits for a tool."""
    from specrl.coordinator.members.replica_session import ReplicaSession
    from specrl.coordinator.rollouts.side_rollouts import make_side_requests

    spec = a_run_with_tools(tmp_path)
    engine = TableEngine("gen-0", seed=7, shape=TableShape(VOCAB, 128, 0.001))
    await engine.start()

    prompts = [Prompt(f"p{place}", place, (2 + place, 5), "", "3") for place in range(8)]
    requests = make_side_requests("side", prompts, 4, lambda place, sample: Sampling(60, seed=place * 10 + sample))
    talk = ReplicaSession(make_turn_settings(spec, Answers()), EngineCall(engine))
    talk.begin_rollouts(requests, GenerateOptions(admit_together=True, min_policy_version=-1))
    stream = talk.receive_finished()
    await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.05)
    assert (await engine.get_status()).live_requests == 0
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_reward_is_of_what_the_policy_wrote(tmp_path: Path) -> None:
    """The grader sees the text of the turns, calls included, but never that of an output."""
    run = a_run(tmp_path, Answers(), steps=2)
    seen: list[str] = []

    class Listener:
        async def grade(self, prompt: Prompt, text: str) -> Reward:
            seen.append(text)
            return Reward(float(len(seen) % 2))

    run.grader = Listener()  # type: ignore[assignment]
    async with run:
        await run.finish()
    for rollout, _ in rollouts_of(run):
        sampled = [str(token) for token in rollout.token_ids_T[rollout.sampled_N] if token != 1]
        assert "".join(sampled) in {text.replace(" ", "") for text in seen}
    assert any(rollout.outputs for rollout, _ in rollouts_of(run))
