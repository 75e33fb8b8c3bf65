"""Every gRPC method of every service, under malformed, truncated, repeated and out-of-order requests.

What is refused is refused in words, with the error's own status, and counted; state stays, and the service goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.message import Message
from hypothesis import given
from hypothesis import strategies as st
from tests.integration.border.fuzzing import fuzz
from tests.integration.border.messages import Call, damaged
from tests.integration.border.worlds import WORLDS, World, full_names, run

from specrl.api.v1 import coordinator_pb2, generation_pb2, rollout_pb2, trainer_pb2, weights_pb2

PROTOS: list[FileDescriptor] = [
    module.DESCRIPTOR for module in (coordinator_pb2, generation_pb2, rollout_pb2, trainer_pb2, weights_pb2)
]


@contextmanager
def served(kind: type[World], folder: Path) -> Iterator[tuple[World, asyncio.Runner]]:
    with asyncio.Runner() as runner:
        world = kind(folder)
        runner.run(world.__aenter__())
        try:
            yield world, runner
        finally:
            runner.run(world.__aexit__())


def answered(world: World, runner: asyncio.Runner, method: str, legal: Message) -> set[str]:
    """How requests to one method, most of them damaged, are answered."""
    answers: set[str] = set()

    @fuzz(40)
    @given(damaged(legal))
    def play(request: bytes) -> None:
        answers.update(run(world, runner, [(method, request)]))

    play()
    return answers


def test_every_service_is_fuzzed() -> None:
    found = {service.full_name for proto in PROTOS for service in proto.services_by_name.values()}
    assert found == {world.service.full_name for world in WORLDS}
    written = {path.stem for path in Path("protos/specrl/api/v1").glob("*.proto")}
    assert written == {Path(proto.name).stem for proto in PROTOS}


@pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.__name__)
def test_legal_requests_are_answered(kind: type[World], tmp_path: Path) -> None:
    with served(kind, tmp_path) as (world, runner):
        for method, request in full_names(world).items():
            (answer,) = run(world, runner, [(method, request.SerializeToString())])
            may_refuse = method.endswith(
                ("/ReceiveWeights", "/CommitUpdate", "/BroadcastWeights", "/SaveCheckpoint", "/TrainParts")
            )  # the last because its step is trained by then; the world's work calls it, too
            assert answer == "OK" or (may_refuse and answer in ("VersionConflict", "DeadlineExceeded"))


@pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.__name__)
def test_damaged_requests_are_refused_in_words_and_change_nothing(kind: type[World], tmp_path: Path) -> None:
    with served(kind, tmp_path) as (world, runner):
        for method, legal in full_names(world).items():
            answers = answered(world, runner, method, legal)
            assert answers - {"OK"}, f"no request to {method} was refused: what was tried?"


@pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.__name__)
def test_calls_repeated_and_out_of_order_leave_a_service_that_works(kind: type[World], tmp_path: Path) -> None:
    """Legal and damaged calls in any order, each once or twice."""
    with served(kind, tmp_path) as (world, runner):
        one = st.one_of(
            [
                st.tuples(st.just(method), st.one_of(st.just(legal.SerializeToString()), damaged(legal)))
                for method, legal in full_names(world).items()
            ]
        )
        calls = st.lists(st.tuples(one, st.integers(1, 2)), min_size=1, max_size=6)

        @fuzz(25)
        @given(calls)
        def play(drawn: list[tuple[Call, int]]) -> None:
            run(world, runner, [call for call, times in drawn for _ in range(times)])

        play()


@pytest.mark.parametrize("kind", WORLDS, ids=lambda kind: kind.__name__)
def test_request_beyond_the_limit_is_refused_and_the_service_goes_on(kind: type[World], tmp_path: Path) -> None:
    from tests.integration.border.worlds import a_border_spec

    from specrl.rpc.limits import message_limits

    limits = message_limits(a_border_spec(tmp_path))
    limit = {"CoordinatorWorld": limits.coordinator, "GenerationWorld": limits.generation}.get(
        kind.__name__, limits.trainer
    )
    with served(kind, tmp_path) as (world, runner):
        method = next(iter(full_names(world)))
        assert run(world, runner, [(method, bytes(limit + 1))]) == ["MessageTooLarge"]
