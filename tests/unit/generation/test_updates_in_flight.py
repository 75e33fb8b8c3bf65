"""The calls that VllmEngine makes to vLLM when weights change in flight. vLLM is a stand-in here.

tests/integration/generation/test_weight_updates.py tests the same with a real vLLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import pytest_asyncio
from tests.run_files import a_run

from specrl.errors import DeadlineExceeded, EngineFailed
from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import (
    Rollout,
    RolloutRequest,
    Sampling,
    TensorMeta,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
    WeightOwner,
)
from specrl.spec import parse_spec
from specrl.weights.arrival import notify_listener

MANIFEST = WeightManifest((TensorMeta("policy.weight", WeightOwner.POLICY, "float32", (1,)),), 1)
SENT = WeightChecksums(1, (5,))


class Collector:
    """A stand-in for vLLM's output queue of a request."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, tokens: list[int], versions: list[tuple[str, int, int]], finish: str) -> None:
        output = SimpleNamespace(
            token_ids=tokens,
            logprobs=SimpleNamespace(token_ids=list(tokens), logprobs=[-1.0] * len(tokens)),
            text="",
            finish_reason=finish,
            stop_reason=None,
            weight_versions=[SimpleNamespace(version=v, start=first, end=end) for v, first, end in versions],
            routed_experts=None,
            sampling_mask=None,
        )
        self._outputs.put_nowait(SimpleNamespace(finished=True, outputs=[output], metrics=None))

    def get_nowait(self) -> Any:
        return None if self._outputs.empty() else self._outputs.get_nowait()

    async def get(self) -> Any:
        return await self._outputs.get()


class StandInLlm:
    """The interface of AsyncLLM. It records its calls in order, and unfinished requests hold blocks."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[tuple[str, str, Collector]] = []
        self.output_processor = SimpleNamespace(request_states={})  # of unfinished requests

    async def add_request(self, request_id: str, prompt: Any, _params: Any) -> Collector:
        collector = Collector(request_id)
        self.requests.append((request_id, prompt["cache_salt"], collector))
        stats = SimpleNamespace(num_generation_tokens=0)
        self.output_processor.request_states[request_id] = SimpleNamespace(stats=stats)
        return collector

    def count_token(self, request_id: str) -> None:
        """Have a request generated a token."""
        self.output_processor.request_states[request_id].stats.num_generation_tokens += 1

    def get_tokenizer(self) -> None:
        """Return no tokenizer: vLLM then makes no text."""
        return

    async def abort(self, request_id: str, *, internal: bool) -> None:
        self.calls.append(f"abort {request_id}")
        del self.output_processor.request_states[request_id]
        next(c for name, _, c in reversed(self.requests) if name == request_id).put([], [], "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} clear={clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def is_paused(self) -> bool:
        self.calls.append("is paused")
        return False

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(f"version {version}")

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        self.calls.append(f"reset running={reset_running_requests}")
        return reset_running_requests

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        return []


def an_engine(kv_cache: str) -> tuple[VllmEngine, StandInLlm]:
    """An engine that serves version 0 on the stand-in, with a fixed draft length."""
    from specrl.generation.vllm_backend.counters import CountingLogger  # imports vllm

    generation = {"sampling": {"maxTokens": 16}, "speculation": {"none": {}}, "draftLength": "Fixed"}
    spec = parse_spec(a_run(Path("run"), generation=generation, weights={"kvCache": kv_cache}))
    engine = VllmEngine(spec, "gen-0")
    llm = StandInLlm()
    engine._llm = llm
    engine._folders = SimpleNamespace(policy=SimpleNamespace(config={"vocab_size": 64}, vocabulary=None))  # type: ignore[assignment]
    engine._counters = CountingLogger()
    return engine, llm


async def update(engine: VllmEngine) -> None:
    """Load staged weights; the transfer itself is skipped."""
    engine._staged = (MANIFEST, SENT)
    await engine.load_weights(SENT)


async def collect(engine: VllmEngine, *names: str) -> list[Rollout]:
    requests = [RolloutRequest(name, "g", 0, (3, 4), Sampling(8)) for name in names]
    return [rollout async for rollout in engine.generate(requests, False)]


async def run_all_tasks() -> None:
    """Let every task run until it is blocked. Tasks here wait only for other tasks."""
    for _ in range(50):
        await asyncio.sleep(0)


async def wait_for_requests(llm: StandInLlm, count: int) -> None:
    await run_all_tasks()
    assert len(llm.requests) >= count


class ReceivingLlm(StandInLlm):
    """One rank that receives weights. The shares are there once `arrive` was called."""

    def __init__(self) -> None:
        super().__init__()
        self.has_arrived = False
        self.listener = b""

    async def collective_rpc(self, method: str, *, args: tuple[Any, ...]) -> list[Any]:
        self.calls.append(method)
        if method == "specrl_receive":
            self.listener = args[2]
        share = {"checksums": [5], "address": None} if self.has_arrived else None
        return [{"value": share if method == "specrl_received" else None}]

    def arrive(self) -> None:
        self.has_arrived = True
        notify_listener(self.listener)


def a_receiving_engine() -> tuple[VllmEngine, ReceivingLlm]:
    engine, _ = an_engine("Keep")
    llm = ReceivingLlm()
    engine._llm = llm
    engine._expected = MANIFEST
    return engine, llm


async def test_the_ranks_are_asked_for_weights_when_these_have_arrived(vllm_imported: None) -> None:
    """Once they were asked every 10 ms. vLLM does not schedule ahead meanwhile, so a GPU waited in every step."""
    engine, llm = a_receiving_engine()
    group = WeightGroup("g", "127.0.0.1", 1, 0, 2, 60.0, "gloo")
    receiving = asyncio.create_task(engine.receive_weights(group, MANIFEST, 1))
    await asyncio.sleep(0.2)  # twenty questions of old; a slow machine asks fewer, which is as good
    assert llm.calls == ["specrl_receive"]
    llm.arrive()
    assert await receiving == SENT
    assert llm.calls == ["specrl_receive", "specrl_received", "specrl_gather"]


async def test_weights_arrive_although_the_notification_is_lost(
    vllm_imported: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specrl.generation.vllm_backend.engine.ARRIVAL_CHECK_S", 0.01)
    engine, llm = a_receiving_engine()
    llm.has_arrived = True
    group = WeightGroup("g", "127.0.0.1", 1, 0, 2, 60.0, "gloo")
    assert await engine.receive_weights(group, MANIFEST, 1) == SENT


async def test_weights_that_do_not_arrive_are_an_error(vllm_imported: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("specrl.generation.vllm_backend.engine.COLLECTIVE_MARGIN_S", 0.0)
    engine, llm = a_receiving_engine()
    group = WeightGroup("g", "127.0.0.1", 1, 0, 2, 0.02, "gloo")
    with pytest.raises(DeadlineExceeded, match=r"did not arrive at all ranks of gen-0 within 0\.04 s"):
        await engine.receive_weights(group, MANIFEST, 1)
    llm.arrive()  # the listener is closed, and nobody is told


async def test_an_update_keeps_unfinished_requests_and_resumes_last(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    await update(engine)
    assert llm.calls == ["pause keep clear=False", "specrl_load", "version 1", "reset running=False", "resume"]
    assert (await engine.get_status()).policy_version == 1


async def test_prompts_of_different_versions_have_different_salts(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    waiting = asyncio.create_task(collect(engine, "a", "b"))
    await wait_for_requests(llm, 2)
    for _, _, collector in llm.requests:
        collector.put([7], [("0", 0, 1)], "stop")
    await waiting
    await update(engine)
    waiting = asyncio.create_task(collect(engine, "c"))
    await wait_for_requests(llm, 3)
    llm.requests[2][2].put([7], [("1", 0, 1)], "stop")
    await waiting
    salts = [salt for _, salt, _ in llm.requests]
    assert salts[0] == salts[1] != salts[2]


async def test_kept_rollouts_continue_and_those_without_a_token_restart_with_the_new_salt(
    vllm_imported: None,
) -> None:
    engine, llm = an_engine("Keep")
    waiting = asyncio.create_task(collect(engine, "begun", "new"))
    await wait_for_requests(llm, 2)
    llm.count_token("begun")
    await update(engine)
    await wait_for_requests(llm, 3)
    assert "abort new" in llm.calls
    assert "abort begun" not in llm.calls
    assert [name for name, _, _ in llm.requests] == ["begun", "new", "new"]
    assert llm.requests[2][1] != llm.requests[1][1]
    llm.requests[0][2].put([7, 8], [("0", 0, 1), ("1", 1, 2)], "stop")
    llm.requests[2][2].put([9], [("1", 0, 1)], "stop")
    found = {rollout.rollout_id: rollout for rollout in await waiting}
    assert [span.policy_version for span in found["begun"].versions] == [0, 1]
    assert [span.policy_version for span in found["new"].versions] == [1]
    for rollout in found.values():
        rollout.check(8, range(2))


async def test_requests_that_waited_for_a_failed_load_are_refused(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    is_broken = asyncio.Event()

    async def fail(method: str, *, args: tuple[Any, ...]) -> list[Any]:
        await is_broken.wait()
        raise RuntimeError("a worker died")

    llm.collective_rpc = fail  # type: ignore[method-assign]
    loading = asyncio.create_task(update(engine))
    await run_all_tasks()
    waiting = asyncio.create_task(collect(engine, "late"))
    await run_all_tasks()
    is_broken.set()
    with pytest.raises(EngineFailed, match="specrl_load: RuntimeError: a worker died"):
        await loading
    with pytest.raises(EngineFailed, match="the engine of gen-0 failed and must be restarted"):
        await waiting
    assert llm.requests == []
    assert "resume" not in llm.calls


async def cancel_load(engine: VllmEngine, llm: StandInLlm, failure: Exception | None = None) -> None:
    """Cancel `load_weights` while the workers load; let them finish afterwards, or raise `failure`."""
    may_finish = asyncio.Event()

    async def load(method: str, *, args: tuple[Any, ...]) -> list[Any]:
        llm.calls.append(method)
        await may_finish.wait()
        if failure is not None:
            raise failure
        return []

    llm.collective_rpc = load  # type: ignore[method-assign]
    loading = asyncio.create_task(update(engine))
    await run_all_tasks()
    assert (await engine.get_status()).is_paused
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    may_finish.set()
    await run_all_tasks()


async def test_a_load_whose_caller_is_gone_ends_with_the_new_version(vllm_imported: None) -> None:
    """Once a coordinator that died during a commit left the engine paused, with new weights under the old version."""
    engine, llm = an_engine("Keep")
    await cancel_load(engine, llm)
    status = await engine.get_status()
    assert (status.policy_version, status.is_paused) == (1, False)
    assert llm.calls[-1] == "resume"


async def test_a_load_that_fails_after_its_caller_is_gone_fails_the_engine(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    await cancel_load(engine, llm, RuntimeError("a worker died"))
    with pytest.raises(EngineFailed, match="a worker died"):
        await engine.get_status()


@pytest.mark.parametrize("call", ["pause_generation", "resume_generation"])
async def test_an_update_that_cannot_pause_or_resume_fails_the_engine(
    vllm_imported: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    engine, llm = an_engine("Keep")

    async def fail(**_: Any) -> None:
        raise RuntimeError("an error in the engine core")

    monkeypatch.setattr(llm, call, fail)
    with pytest.raises(EngineFailed, match="an error in the engine core"):
        await update(engine)
    with pytest.raises(EngineFailed, match="the engine of gen-0 failed and must be restarted"):
        await engine.get_status()


@pytest.mark.parametrize("call", ["pause_generation", "reset_prefix_cache", "resume_generation"])
async def test_an_admission_that_is_cancelled_resumes_scheduling_and_leaves_no_request(
    vllm_imported: None, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """Once a cancelled pause was never resumed, and a cancelled resumption left its requests running unread."""
    engine, llm = an_engine("Keep")
    answer = getattr(llm, call)

    async def answer_late(**keywords: Any) -> None:
        await answer(**keywords)
        await asyncio.sleep(0)
        monkeypatch.undo()
        admitting.cancel()
        await asyncio.sleep(0)

    monkeypatch.setattr(llm, call, answer_late)
    requests = [RolloutRequest("a", "g", 0, (3, 4), Sampling(8))]
    admitting = asyncio.create_task(engine._admit_requests(requests, True))
    with pytest.raises(asyncio.CancelledError):
        await admitting
    assert "resume" in llm.calls
    assert llm.output_processor.request_states == {}


@pytest_asyncio.fixture
async def watched(vllm_imported: None, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[VllmEngine, StandInLlm]]:
    """An engine whose core is asked for signs of life all the time, and may take 10 ms."""
    monkeypatch.setattr("specrl.generation.vllm_backend.engine.CORE_CHECK_S", 0.0)
    monkeypatch.setattr("specrl.generation.vllm_backend.engine.CORE_ANSWER_S", 0.01)
    engine, llm = an_engine("Keep")
    watch = asyncio.create_task(engine._watch_core())
    yield engine, llm
    watch.cancel()


async def ask_until_failed(engine: VllmEngine) -> None:
    async with asyncio.timeout(20):
        while True:
            await engine.get_status()
            await asyncio.sleep(0.01)


async def test_an_engine_core_that_hangs_fails_the_engine(watched: tuple[VllmEngine, StandInLlm]) -> None:
    """Once a kernel that never ended was noticed by nobody, and every update of all replicas failed because of it."""
    engine, llm = watched
    while llm.calls.count("is paused") < 2:  # noqa: ASYNC110 - a list
        await asyncio.sleep(0)
    assert (await engine.get_status()).policy_version == -1
    is_hanging = asyncio.Event()

    async def hang() -> bool:
        is_hanging.set()
        await asyncio.Event().wait()
        return False

    llm.is_paused = hang  # type: ignore[method-assign]
    await asyncio.wait_for(is_hanging.wait(), 20)
    with pytest.raises(EngineFailed, match=r"did not answer within 0\.01 s and seems to hang"):
        await ask_until_failed(engine)


async def test_an_engine_core_that_loads_weights_may_take_longer(watched: tuple[VllmEngine, StandInLlm]) -> None:
    engine, llm = watched
    engine._expected = WeightManifest((TensorMeta("policy.weight", WeightOwner.POLICY, "float32", (10**12,)),), 1)
    has_loaded = asyncio.Event()

    async def answer_late() -> bool:
        await asyncio.sleep(0.1)
        has_loaded.set()
        return False

    llm.is_paused = answer_late  # type: ignore[method-assign]
    await asyncio.wait_for(has_loaded.wait(), 20)
    await run_all_tasks()
    assert (await engine.get_status()).policy_version == -1


async def test_recompute_resets_running_requests_and_aborts_none(vllm_imported: None) -> None:
    engine, llm = an_engine("Recompute")
    waiting = asyncio.create_task(collect(engine, "begun", "new"))
    await wait_for_requests(llm, 2)
    await update(engine)
    assert "reset running=True" in llm.calls
    assert not any(call.startswith("abort") for call in llm.calls)
    assert llm.calls.index("reset running=True") < llm.calls.index("resume")
    for _, _, collector in llm.requests:
        collector.put([7], [("1", 0, 1)], "stop")
    assert len(await waiting) == 2
