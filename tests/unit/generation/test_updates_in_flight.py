"""What VllmEngine asks of vLLM when weights change in flight. vLLM itself is a stand-in here, which computes nothing.

That vLLM then does what it was asked: tests/integration/generation/test_weight_updates.py.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.run_files import a_run

from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.records import Rollout, RolloutRequest, Sampling, WeightChecksums
from specrl.spec import parse_spec

SENT = WeightChecksums(1, (5,))


class Collector:
    """A request's queue of outputs, as vLLM's."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()

    def put(self, tokens: list[int], versions: list[tuple[str, int, int]], finish: str | None = None) -> None:
        delta = SimpleNamespace(
            token_ids=tokens,
            logprobs=[{token: SimpleNamespace(logprob=-1.0)} for token in tokens],
            text="",
            finish_reason=finish,
            stop_reason=None,
            weight_versions=[SimpleNamespace(version=v, start=first, end=end) for v, first, end in versions],
            routed_experts=None,
        )
        self._outputs.put_nowait(SimpleNamespace(finished=finish is not None, outputs=[delta], metrics=None))

    def get_nowait(self) -> Any:
        return None if self._outputs.empty() else self._outputs.get_nowait()

    async def get(self) -> Any:
        return await self._outputs.get()


class StandInLlm:
    """AsyncLLM's interface. `calls` are what was asked of it, in order; unfinished requests hold blocks."""

    errored = False

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.requests: list[tuple[str, str, Collector]] = []

    async def add_request(self, request_id: str, prompt: Any, _params: Any) -> Collector:
        collector = Collector(request_id)
        self.requests.append((request_id, prompt["cache_salt"], collector))
        return collector

    async def abort(self, request_id: str, *, internal: bool) -> None:
        self.calls.append(f"abort {request_id}")
        next(c for name, _, c in reversed(self.requests) if name == request_id).put([], [], "abort")

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(f"pause {mode} clear={clear_cache}")

    async def resume_generation(self) -> None:
        self.calls.append("resume")

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
    engine, llm = VllmEngine(spec, "gen-0"), StandInLlm()
    engine._llm = llm
    engine._folders = SimpleNamespace(policy=SimpleNamespace(config={"vocab_size": 64}))  # type: ignore[assignment]
    engine._counters = CountingLogger()
    return engine, llm


async def update(engine: VllmEngine) -> None:
    """Load what was staged; the transfer itself is left out."""
    engine._staged, engine._staged_names = SENT, ["policy.weight"]
    await engine.load(SENT)


async def collect(engine: VllmEngine, *names: str) -> list[Rollout]:
    requests = [RolloutRequest(name, "g", 0, (3, 4), Sampling(8)) for name in names]
    return [rollout async for rollout in engine.generate(requests, False)]


async def taken_in() -> None:
    """Have every task go on as far as it can: nothing here waits for anything but other tasks."""
    for _ in range(50):
        await asyncio.sleep(0)


async def until_asked(llm: StandInLlm, count: int) -> None:
    await taken_in()
    assert len(llm.requests) >= count


async def test_an_update_keeps_what_is_under_way_and_resumes_last(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    await update(engine)
    assert llm.calls == ["pause keep clear=False", "specrl_load", "version 1", "reset running=False", "resume"]
    assert (await engine.status()).policy_version == 1


async def test_no_request_finds_a_prefix_that_another_version_computed(vllm_imported: None) -> None:
    engine, llm = an_engine("Keep")
    waiting = asyncio.create_task(collect(engine, "a", "b"))
    await until_asked(llm, 2)
    for _, _, collector in llm.requests:
        collector.put([7], [("0", 0, 1)], "stop")
    await waiting
    await update(engine)
    waiting = asyncio.create_task(collect(engine, "c"))
    await until_asked(llm, 3)
    llm.requests[2][2].put([7], [("1", 0, 1)], "stop")
    await waiting
    salts = [salt for _, salt, _ in llm.requests]
    assert salts[0] == salts[1] != salts[2]


async def test_kept_rollouts_go_on_and_those_without_a_token_begin_again_under_the_new_salt(
    vllm_imported: None,
) -> None:
    engine, llm = an_engine("Keep")
    waiting = asyncio.create_task(collect(engine, "begun", "new"))
    await until_asked(llm, 2)
    llm.requests[0][2].put([7], [("0", 0, 1)])
    await taken_in()
    await update(engine)
    await until_asked(llm, 3)
    assert "abort new" in llm.calls
    assert "abort begun" not in llm.calls
    assert [name for name, _, _ in llm.requests] == ["begun", "new", "new"]
    assert llm.requests[2][1] != llm.requests[1][1]
    llm.requests[0][2].put([8], [("0", 0, 1), ("1", 1, 2)], "stop")
    llm.requests[2][2].put([9], [("1", 0, 1)], "stop")
    found = {rollout.rollout_id: rollout for rollout in await waiting}
    assert [span.policy_version for span in found["begun"].versions] == [0, 1]
    assert [span.policy_version for span in found["new"].versions] == [1]
    for rollout in found.values():
        rollout.check(8, range(2))


async def test_recompute_has_every_unfinished_rollout_computed_again_and_aborts_none(vllm_imported: None) -> None:
    engine, llm = an_engine("Recompute")
    waiting = asyncio.create_task(collect(engine, "begun", "new"))
    await until_asked(llm, 2)
    await update(engine)
    assert "reset running=True" in llm.calls
    assert not any(call.startswith("abort") for call in llm.calls)
    assert llm.calls.index("reset running=True") < llm.calls.index("resume")
    for _, _, collector in llm.requests:
        collector.put([7], [("1", 0, 1)], "stop")
    assert len(await waiting) == 2
