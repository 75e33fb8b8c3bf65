"""vLLM's outputs and statistics become a rollout and counters."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from specrl.errors import EngineFailed
from specrl.records import FinishReason, RolloutRequest, Sampling, SpeculationCounters, VersionSpan

REQUEST = RolloutRequest("r", "g", 3, (5, 6), Sampling(8))


def an_output(tokens: list[int], **fields: Any) -> Any:
    """A finished output as vLLM returns it, with flat log-probabilities."""
    logprobs = SimpleNamespace(token_ids=list(tokens), logprobs=[-0.5 * token for token in tokens])
    given = {"token_ids": tokens, "logprobs": logprobs, "text": "", "finish_reason": "stop", "weight_versions": None}
    given |= {"stop_reason": None, "routed_experts": None, "sampling_mask": None}
    return SimpleNamespace(**(given | fields))


def a_span(version: str, start: int, end: int) -> Any:
    return SimpleNamespace(version=version, start=start, end=end)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer whose words carry a leading space, which a decoder drops at the start of a text."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = {f"\u2581{letter}": number for number, letter in enumerate("_abcdefgh")}
    own = Tokenizer(models.WordLevel(words | {"<end>": 9}, unk_token="<end>"))
    own.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=own, eos_token="<end>")


@pytest.fixture
def pending(vllm_imported: None) -> Any:
    from specrl.generation.vllm_backend.completion import PendingRollout

    return PendingRollout(REQUEST, collector=None)


def test_an_output_becomes_a_rollout(pending: Any, tokenizer: Any) -> None:
    output = an_output([1, 2, 9], weight_versions=[a_span("4", 0, 1), a_span("5", 1, 3)])
    rollout = pending.build_rollout(output, "gen-0", tokenizer)
    rollout.check(10)
    assert rollout.token_ids_T.tolist() == [1, 2, 9]
    assert rollout.sampler_logprobs_T.tolist() == [-0.5, -1.0, -4.5]
    assert rollout.versions == (VersionSpan(4, 0, 1), VersionSpan(5, 1, 3))
    assert (rollout.rollout_id, rollout.group_id, rollout.sample_index) == ("r", "g", 3)
    assert (rollout.finish_reason, rollout.replica_id) == (FinishReason.STOP, "gen-0")


def test_a_text_follows_the_prompt_and_has_no_end_token(pending: Any, tokenizer: Any) -> None:
    """The leading space of the first word is part of the completion, though decoding it alone would drop it."""
    assert tokenizer.decode([1, 2]) == "a b"
    assert pending.build_rollout(an_output([1, 2, 9]), "gen-0", tokenizer).text == " a b"
    assert pending.build_rollout(an_output([1, 2], finish_reason="length"), "gen-0", tokenizer).text == " a b"


def test_a_text_with_stop_strings_is_the_engines(vllm_imported: None, tokenizer: Any) -> None:
    """vLLM has cut it at the stop string, which may lie inside a token."""
    from specrl.generation.vllm_backend.completion import PendingRollout, convert_sampling

    stopping = PendingRollout(replace(REQUEST, sampling=Sampling(8, stop=("b",))), collector=None)
    rollout = stopping.build_rollout(an_output([1, 2], text=" a ", stop_reason="b"), "gen-0", tokenizer)
    assert (rollout.text, rollout.stop) == (" a ", "b")
    assert convert_sampling(stopping.request.sampling, with_sets=False).detokenize
    assert not convert_sampling(REQUEST.sampling, with_sets=False).detokenize


def test_log_probabilities_of_other_tokens_are_an_error(pending: Any, tokenizer: Any) -> None:
    for wrong in (None, an_output([1]).logprobs, an_output([1, 3]).logprobs):
        with pytest.raises(EngineFailed, match="log-probabilities of other tokens than those of rollout r"):
            pending.build_rollout(an_output([1, 2], logprobs=wrong), "gen-0", tokenizer)


@pytest.mark.parametrize("reason", ["abort", "error", None])
def test_a_request_that_did_not_finish_is_an_error(pending: Any, tokenizer: Any, reason: str | None) -> None:
    with pytest.raises(EngineFailed, match=f"rollout r ended with {reason} instead of stop or length"):
        pending.build_rollout(an_output([1], finish_reason=reason), "gen-0", tokenizer)


def test_experts_belong_to_every_token_but_the_last(pending: Any, tokenizer: Any) -> None:
    """With two prompt tokens and three sampled ones. vLLM also returns experts of tokens after a stop string."""
    rows = np.arange(10, dtype=np.uint8).reshape(5, 2, 1)
    output = an_output([1, 2, 3], routed_experts=rows)
    assert pending.build_rollout(output, "gen-0", tokenizer).experts_SLK.tolist() == rows[:4].tolist()
    with pytest.raises(EngineFailed, match="returned the experts of 3 instead of 4 tokens"):
        pending.build_rollout(an_output([1, 2, 3], routed_experts=rows[:3]), "gen-0", tokenizer)


def masks(*sets: list[int]) -> SimpleNamespace:
    return SimpleNamespace(token_ids=list(sets))


@pytest.fixture
def truncated(vllm_imported: None) -> Any:
    """A rollout that is sampled with top-p."""
    from specrl.generation.vllm_backend.completion import PendingRollout

    return PendingRollout(replace(REQUEST, sampling=Sampling(8, top_p=0.9)), collector=None)


def test_sampling_sets_are_those_of_each_token(truncated: Any, tokenizer: Any) -> None:
    output = an_output([1, 2, 3], weight_versions=[a_span("4", 0, 3)], sampling_mask=masks([0, 1], [2], [1, 3, 9]))
    rollout = truncated.build_rollout(output, "gen-0", tokenizer)
    rollout.check(10)
    assert rollout.sets.sizes_N.tolist() == [2, 1, 3]
    assert rollout.sets.ids_M.tolist() == [0, 1, 2, 1, 3, 9]


def test_tokens_without_a_sampling_set_are_an_error(truncated: Any, tokenizer: Any) -> None:
    with pytest.raises(EngineFailed, match="returned the sampling sets of 1 instead of 2 tokens of rollout r"):
        truncated.build_rollout(an_output([1, 2], sampling_mask=masks([1])), "gen-0", tokenizer)


def test_a_request_of_the_whole_distribution_has_no_sets(pending: Any, tokenizer: Any) -> None:
    """Such as a greedy one of a validation, for which an engine with top-p returns sets of one token."""
    assert pending.build_rollout(an_output([1], sampling_mask=masks([1])), "gen-0", tokenizer).sets is None


def test_an_engine_with_sets_gets_no_request_that_vllm_would_refuse(vllm_imported: None) -> None:
    """Its front end refuses a temperature of 0 and a top_k of 0, for fear of large sets."""
    from specrl.generation.vllm_backend.completion import WHOLE_VOCABULARY, convert_sampling

    def parts(sampling: Sampling, *, with_sets: bool = True) -> tuple[float, float, int]:
        found = convert_sampling(sampling, with_sets=with_sets)
        return found.temperature, found.top_p, found.top_k

    assert parts(Sampling(8, 0.7, top_p=0.9)) == (0.7, 0.9, WHOLE_VOCABULARY)
    assert parts(Sampling(8, 0.7, top_p=0.9, top_k=20)) == (0.7, 0.9, 20)
    assert parts(Sampling(8, 0.0, top_p=0.9, top_k=20)) == (1.0, 1.0, 1)
    assert parts(Sampling(8, 0.7), with_sets=False) == (0.7, 1.0, 0)
    assert parts(Sampling(8, 0.0), with_sets=False)[0] == 0


def test_end_tokens_end_a_completion_and_stay_in_it(pending: Any, tokenizer: Any) -> None:
    from specrl.generation.vllm_backend.completion import convert_sampling

    found = convert_sampling(Sampling(8, stop=("x",)), (7, 9), with_sets=False)
    assert (found.stop_token_ids, found.stop) == ([7, 9], ["x"])
    rollout = pending.build_rollout(an_output([4, 9], stop_reason=9), "gen-0", tokenizer)
    assert (rollout.token_ids_T.tolist(), rollout.finish_reason, rollout.stop) == ([4, 9], FinishReason.STOP, "")


def test_a_stop_string_that_is_a_token_is_named_as_other_stop_strings(vllm_imported: None, tokenizer: Any) -> None:
    from specrl.generation.vllm_backend.completion import PendingRollout

    for reason, stop in ((9, "<end>"), (7, ""), ("x", "x"), (None, "")):
        found = PendingRollout(REQUEST, None, {9: "<end>"})
        assert found.build_rollout(an_output([4], stop_reason=reason), "gen-0", tokenizer).stop == stop


def test_a_restart_waits_for_another_queue(pending: Any) -> None:
    pending.mark_for_restart()
    assert pending.must_restart
    pending.restart_with("another queue")
    assert (pending.collector, pending.must_restart) == ("another queue", False)


def test_version_spans_are_cut_at_the_last_token_and_never_empty(vllm_imported: None) -> None:
    from specrl.generation.vllm_backend.completion import convert_version_spans

    given = [a_span("-1", 0, 0), a_span("0", 0, 4), a_span("1", 4, 9), a_span("2", 9, 12)]
    assert convert_version_spans(given, 6) == (VersionSpan(0, 0, 4), VersionSpan(1, 4, 6))


def test_counters_sum_over_steps(vllm_imported: None) -> None:
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


def test_the_context_is_the_mean_over_unfinished_requests(vllm_imported: None) -> None:
    from specrl.generation.vllm_backend.counters import CountingLogger

    def request(prompt_tokens: int, generated: int) -> SimpleNamespace:
        return SimpleNamespace(prompt_len=prompt_tokens, stats=SimpleNamespace(num_generation_tokens=generated))

    logger = CountingLogger()
    stats = SimpleNamespace(spec_decoding_stats=None, num_running_reqs=2)
    requests = {"a": request(10, 5), "b": request(20, 1)}
    logger.set_requests(requests)
    for _ in range(3):
        logger.record(stats, SimpleNamespace(num_generation_tokens=2, num_prompt_tokens=0))
    (cost,) = logger.times.list_costs()
    assert cost.context_sum == 18 * cost.steps
