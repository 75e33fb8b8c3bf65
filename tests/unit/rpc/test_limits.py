"""No legal message exceeds its limit, and larger ones are not sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.run_files import a_run

from specrl.errors import MessageTooLarge
from specrl.records import (
    Batch,
    FinishReason,
    Rollout,
    RolloutRequest,
    Sampling,
    TrainRollout,
    VersionSpan,
    wire,
)
from specrl.rpc.clients import TrainerClient
from specrl.rpc.limits import FRAME_BYTES, LARGEST_BYTES, WIDEST_LIMITS, message_limits
from specrl.spec import RunSpec, parse_spec


def a_spec(prompts: int = 2, group: int = 2, **schedule: int) -> RunSpec:
    steps = {"steps": 2, "promptsPerStep": prompts, "groupSize": group} | schedule
    return parse_spec(a_run(Path("/none"), schedule=steps))


def largest(spec: RunSpec) -> TrainRollout:
    """Make the largest legal rollout: ids of five bytes, a version span per token, long text."""
    length = spec.generation.sampling.max_tokens
    spans = tuple(VersionSpan(2**62, place, place + 1) for place in range(length))
    ids_T = np.full(length, 2**31 - 1, np.int32)
    logprobs_T = np.full(length, -1.5, np.float32)
    name = "x" * 40
    text = " " * 128 * length
    rollout = Rollout(name, name, 99, ids_T, logprobs_T, spans, FinishReason.LENGTH, "gen-0", text, 1.5)
    return TrainRollout((2**31 - 1,) * spec.prompts.max_tokens, rollout, 0.1)


@given(prompts=st.integers(1, 8), group=st.integers(2, 8))
def test_largest_batch_of_a_run_is_within_the_limit(prompts: int, group: int) -> None:
    spec = a_spec(prompts, group)
    batch = Batch(2, (largest(spec),) * (prompts * group), tuple(range(prompts)))
    assert wire.batch_to_wire(batch).ByteSize() <= message_limits(spec).trainer - FRAME_BYTES


def test_largest_call_for_rollouts_is_within_the_limit() -> None:
    spec = a_spec(maxPolicyLag=3)
    sampling = Sampling(16, 0.7, 0.9, 50, 2**62, ("stop here",) * 8)
    request = RolloutRequest("x" * 40, "x" * 40, 99, (2**31 - 1,) * spec.prompts.max_tokens, sampling)
    size = wire.request_to_wire(request).ByteSize() + 8
    assert size * 2 * 2 * 4 <= message_limits(spec).generation - FRAME_BYTES


def test_no_limit_exceeds_the_largest_protobuf_message() -> None:
    assert message_limits(a_spec(100_000, 100)).trainer == LARGEST_BYTES


def test_runs_that_replay_experts_have_the_widest_limits() -> None:
    run = a_run(Path("/none"))
    assert (
        message_limits(parse_spec(run | {"trainer": run["trainer"] | {"routing": "Replay"}})).trainer == LARGEST_BYTES
    )


@pytest.mark.parametrize("sampling", [{"topP": "0.9"}, {"topK": 20}])
def test_runs_with_sampling_sets_have_the_widest_limits(sampling: dict[str, Any]) -> None:
    """A set may be the whole vocabulary, whose size the run file does not have."""
    run = a_run(Path("/none"))
    generation = run["generation"] | {"sampling": run["generation"]["sampling"] | sampling}
    assert message_limits(parse_spec(run | {"generation": generation})) == WIDEST_LIMITS


async def test_message_beyond_the_limit_is_not_sent() -> None:
    spec = a_spec()
    async with TrainerClient("127.0.0.1:1", limit_bytes=1000) as client:
        with pytest.raises(MessageTooLarge, match=r"at most 1000 bytes.*lower schedule\.promptsPerStep"):
            await client.train_step(Batch(1, (largest(spec),) * 4), 5.0)
