"""vLLM's deltas become one rollout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrl.errors import EngineFailed
from specrl.records import FinishReason, RolloutRequest, Sampling, SpeculationCounters, VersionSpan

REQUEST = RolloutRequest("r", "g", 3, (5, 6), Sampling(8))


def a_delta(tokens: list[int], **fields: Any) -> Any:
    logprobs = [{token: SimpleNamespace(logprob=-0.5 * token)} for token in tokens]
    text = "".join(chr(96 + token) for token in tokens)
    given = {"token_ids": tokens, "logprobs": logprobs, "text": text, "finish_reason": None, "weight_versions": None}
    given |= {"stop_reason": None, "routed_experts": None}
    return SimpleNamespace(**(given | fields))


def a_span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


@pytest.fixture
def completion(vllm_imported: None) -> Any:
    from specrl.generation.vllm_backend.completion import Completion

    return Completion(REQUEST, collector=None)


def test_deltas_are_joined_in_order(completion: Any) -> None:
    completion.add(a_delta([1, 2]))
    completion.add(a_delta([]))
    last = a_delta([3], finish_reason="stop", weight_versions=[a_span("4", 0, 1), a_span("5", 1, 3)])
    completion.add(last)
    rollout = completion.rollout(last, "gen-0")
    rollout.check(8)
    assert rollout.token_ids_T.tolist() == [1, 2, 3]
    assert rollout.sampler_logprobs_T.tolist() == [-0.5, -1.0, -1.5]
    assert rollout.text == "abc"
    assert rollout.versions == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    assert (rollout.rollout_id, rollout.group_id, rollout.sample_index) == ("r", "g", 3)
    assert (rollout.finish_reason, rollout.replica_id) == (FinishReason.STOP, "gen-0")


def test_experts_are_those_of_every_token_but_the_last(completion: Any) -> None:
    """Of two tokens of a prompt and three that came; vLLM knows those after a stop string, too."""
    rows = np.arange(10, dtype=np.uint8).reshape(5, 2, 1)
    last = a_delta([1, 2, 3], finish_reason="stop", routed_experts=rows)
    completion.add(last)
    assert completion.rollout(last, "gen-0").experts_SLK.tolist() == rows[:4].tolist()
    with pytest.raises(EngineFailed, match="must come with the experts of 4 tokens, got 3"):
        completion.rollout(a_delta([], finish_reason="stop", routed_experts=rows[:3]), "gen-0")


def test_restart_forgets_what_came_before(completion: Any) -> None:
    completion.must_restart = True
    completion.add(a_delta([1, 2]))
    completion.restart("another queue")
    last = a_delta([3], finish_reason="length", weight_versions=[a_span("5", 0, 1)])
    completion.add(last)
    rollout = completion.rollout(last, "gen-0")
    assert (rollout.token_ids_T.tolist(), rollout.text, completion.must_restart) == ([3], "c", False)


def test_spans_are_cut_at_the_last_token_and_never_empty(vllm_imported: None) -> None:
    from specrl.generation.vllm_backend.completion import version_spans

    given = [a_span("-1", 0, 0), a_span("0", 0, 4), a_span("1", 4, 9), a_span("2", 9, 12)]
    assert version_spans(given, 6) == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6))


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_request_that_did_not_finish_is_no_rollout(completion: Any, reason: str | None) -> None:
    last = a_delta([1], finish_reason=reason)
    completion.add(last)
    with pytest.raises(EngineFailed, match="rollout r"):
        completion.rollout(last, "gen-0")


def test_steps_add_up(vllm_imported: None) -> None:
    from specrl.generation.vllm_backend.counters import CountingLogger

    logger = CountingLogger()
    drafted = SimpleNamespace(
        num_drafts=2, num_draft_tokens=6, num_accepted_tokens=3, num_accepted_tokens_per_pos=[2, 1, 0]
    )

    def stats(drafts: SimpleNamespace | None) -> SimpleNamespace:
        return SimpleNamespace(spec_decoding_stats=drafts, num_running_reqs=2)

    def tokens(count: int) -> SimpleNamespace:
        return SimpleNamespace(num_generation_tokens=count, num_prompt_tokens=0)

    logger(SimpleNamespace(), 0).record(stats(drafted), tokens(5))
    logger.record(stats(None), tokens(1))
    logger.record(None, None)
    logger.record(stats(drafted), tokens(5))
    assert logger.total == SpeculationCounters(4, 12, 6, (4, 2, 0), 11)
    assert logger.total.acceptance_length == 2.5


def test_context_is_the_mean_of_what_is_under_way(vllm_imported: None) -> None:
    from specrl.generation.vllm_backend.counters import CountingLogger

    def request(prompt_tokens: int, generated: int) -> SimpleNamespace:
        return SimpleNamespace(prompt_len=prompt_tokens, stats=SimpleNamespace(num_generation_tokens=generated))

    logger, stats = CountingLogger(), SimpleNamespace(spec_decoding_stats=None, num_running_reqs=2)
    requests = {"a": request(10, 5), "b": request(20, 1)}
    logger.watch(requests)
    for _ in range(3):
        logger.record(stats, SimpleNamespace(num_generation_tokens=2, num_prompt_tokens=0))
    (cost,) = logger.times.costs()
    assert cost.context_sum == 18 * cost.steps
