"""What a peer sends as its span is passed over unless it is one: never an error, never a span of somebody else's."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
from hypothesis import example, given
from hypothesis import strategies as st
from tests.integration.border.fuzzing import fuzz
from tests.stand_ins.engine import TableEngine

from specrl.api.v1 import generation_pb2, generation_pb2_grpc
from specrl.generation.service import GenerationService
from specrl.records import RolloutRequest, Sampling, wire
from specrl.rpc.server import ServerOptions, start_server
from specrl.spec.run import Weights
from specrl.telemetry.spans import Recorder, Span, SpanContext, SpanName

SOUND = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
PRINTABLE = st.characters(min_codepoint=0x20, max_codepoint=0x7E)
"""What metadata may hold; gRPC itself refuses to send anything else."""

near_misses = st.tuples(st.sampled_from(SOUND), PRINTABLE).map(lambda pair: SOUND.replace(pair[0], pair[1]))
values = st.one_of(st.text(PRINTABLE, max_size=80), near_misses, st.just(SOUND), st.just(SOUND + "0" * 4000))


def test_no_traceparent_is_refused_and_only_one_that_is_sound_is_taken_up() -> None:
    with asyncio.Runner() as runner:
        spans: list[Span] = []
        server, stub, channel = runner.run(a_replica(Recorder(spans.append)))

        @fuzz(60)
        @given(values, values)
        @example(SOUND, "")
        def play(of_call: str, of_rollout: str) -> None:
            spans.clear()
            answers = runner.run(asked(stub, (("traceparent", of_call),), of_rollout))
            assert answers == ["r"]
            calls = [span for span in spans if span.name is SpanName.CALL]
            assert [span.parent for span in calls] == [SpanContext.parse_traceparent(of_call)] * bool(
                SpanContext.parse_traceparent(of_call)
            )
            parents = [span.parent for span in spans if span.name is SpanName.GENERATE]
            above = SpanContext.parse_traceparent(of_rollout) or (calls[0].context if calls else None)
            assert parents == [above] * (above is not None)

        play()
        runner.run(channel.close(None))
        runner.run(server.stop(None))


def test_a_call_that_names_no_span_is_answered_and_is_none() -> None:
    async def play() -> None:
        spans: list[Span] = []
        server, stub, channel = await a_replica(Recorder(spans.append))
        assert await asked(stub, (), "") == ["r"]
        assert await asked(stub, (("traceparent-bin", b"\xff\x00"),), "") == ["r"]
        assert await asked(stub, (("traceparent", SOUND), ("traceparent", "another")), "") == ["r"]
        assert spans == [], "gRPC hands over the last of several"
        await channel.close(None)
        await server.stop(None)

    asyncio.run(play())


async def a_replica(recorder: Recorder) -> tuple[grpc.aio.Server, Any, grpc.aio.Channel]:
    engine = TableEngine()
    await engine.start()
    service = GenerationService(engine, Weights(), 0.0, recorder)
    server, port = await start_server(service.add_to, "127.0.0.1", 0, ServerOptions(recorder=recorder, lane="gen-0"))
    channel = grpc.aio.insecure_channel(f"127.0.0.1:{port}")
    return server, generation_pb2_grpc.GenerationServiceStub(channel), channel


async def asked(stub: Any, metadata: tuple[tuple[str, str | bytes], ...], of_rollout: str) -> list[str]:
    """Names of the rollouts that one call yields."""
    request = RolloutRequest("r", "g", 0, (3,), Sampling(2, seed=1), of_rollout)
    message = generation_pb2.GenerateRequest(requests=[wire.request_to_wire(request)], min_policy_version=-1)
    return [rollout.rollout_id async for rollout in stub.Generate(iter([message]), metadata=metadata, timeout=240)]
