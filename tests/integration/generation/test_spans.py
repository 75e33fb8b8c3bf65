"""vLLM's timings of a request become spans below the request's span."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.vllm_cases import Engines, collect_rollouts, some_requests

from specrl.generation.vllm_backend.engine import VllmEngine
from specrl.telemetry.spans import SpanContext, SpanName

pytestmark = [pytest.mark.asyncio(loop_scope="session")]


async def test_the_time_of_a_rollout_is_split_into_queue_prefill_and_decode(
    eagle3_engine: VllmEngine, engines: Engines
) -> None:
    asked = [SpanContext(7, number) for number in (1, 2)]
    requests = [
        replace(request, traceparent=context.traceparent)
        for request, context in zip(some_requests(2, 24), asked, strict=True)
    ]
    engines.spans.clear()
    rollouts = {rollout.rollout_id: rollout for rollout in await collect_rollouts(eagle3_engine, requests)}
    await collect_rollouts(eagle3_engine, some_requests(1, 4))  # without a parent span nothing is recorded
    assert {span.parent for span in engines.spans} == set(asked)
    for request, context in zip(requests, asked, strict=True):
        told = (span for span in engines.spans if span.parent == context)
        parts = sorted(told, key=lambda span: (span.began_s, span.ended_s))  # a request that did not wait has no queue
        assert [span.name for span in parts] == [SpanName.QUEUE, SpanName.PREFILL, SpanName.DECODE]
        assert {span.lane for span in parts} == {"gen-0"}
        assert parts[0].ended_s == parts[1].began_s
        assert parts[1].ended_s == parts[2].began_s
        assert 0 < parts[2].ended_s - parts[0].began_s <= rollouts[request.rollout_id].seconds + 1e-3
        assert parts[1].ended_s > parts[1].began_s, "a prompt takes time"
