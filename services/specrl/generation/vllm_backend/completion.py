"""Converts between one rollout and one request in vLLM: sampling parameters in, the finished output out.

vLLM returns a request's output once, at its end. Nothing reads tokens before that, and an output for each step would
cost the front end more CPU time than everything else that it does.

Called by `engine` for each request.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer

from specrl.errors import EngineFailed
from specrl.records import ExpertArray, FinishReason, Rollout, RolloutRequest, Sampling, SamplingSets, VersionSpan
from specrl.records.rollout import FloatArray
from specrl.telemetry.spans import Recorder, SpanContext, SpanName

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


WHOLE_VOCABULARY = (1 << 31) - 1
"""A top_k larger than any vocabulary, which keeps all of it."""


def convert_sampling(sampling: Sampling, end_token_ids: Sequence[int] = (), *, with_sets: bool) -> SamplingParams:
    """Convert sampling parameters to vLLM's.

    vLLM returns the output once, with the log-probability of each sampled token. It makes text, without special tokens,
    only if there are stop strings to find in it; `PendingRollout.build_rollout` makes it otherwise.

    end_token_ids: tokens that end the completion and are part of it, beside the tokenizer's own end token. They include
    the stop strings that are tokens. Those are looked for in the text as well: a policy may spell them in other tokens.
    with_sets: the engine returns sampling sets. Its front end then refuses a temperature of 0 and a top_k of 0
    (v1/engine/input_processor.py `_validate_params`, 0.32 and 0.33). So a greedy request becomes one that keeps only
    the most likely token. It differs from a greedy one where several tokens are equally likely: one of them is drawn.
    """
    is_greedy = with_sets and sampling.temperature == 0
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=1.0 if is_greedy else sampling.temperature,
        top_p=1.0 if is_greedy else sampling.top_p,
        top_k=1 if is_greedy else sampling.top_k or (WHOLE_VOCABULARY if with_sets else 0),
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=list(end_token_ids),
        logprobs=0,  # of the sampled token only
        flat_logprobs=True,
        detokenize=bool(sampling.stop),
        skip_special_tokens=True,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,  # nothing else uses these parameters, and a deep copy takes longer than all conversions here
    )


@dataclass(eq=False)
class PendingRollout:
    """A rollout that vLLM generates, and how its finished output becomes a Rollout.

    collector: vLLM's queue of the request's output; a restart replaces it. began: monotonic time.
    stop_tokens: the request's stop strings that are tokens, by token id.
    """

    request: RolloutRequest
    collector: Any
    stop_tokens: Mapping[int, str] = field(default_factory=dict)
    began: float = field(default_factory=time.monotonic)
    must_restart: bool = False

    def mark_for_restart(self) -> None:
        """Note that the request is being aborted. `restart_with` follows when vLLM has confirmed it."""
        self.must_restart = True

    def restart_with(self, collector: Any) -> None:
        """Continue with the queue of a new request."""
        self.collector = collector
        self.must_restart = False

    def build_rollout(self, output: Any, replica_id: str, tokenizer: Any) -> Rollout:
        """Build the rollout from its output (a vLLM CompletionOutput). tokenizer: the engine's.

        Raises EngineFailed if the request ended for another reason than a stop or its length, or if vLLM did not return
        one log-probability, and one sampling set where they were asked for, per token.
        """
        if output.finish_reason not in _FINISH:
            raise EngineFailed(
                f"rollout {self.request.rollout_id} ended with {output.finish_reason} instead of stop or length; it is "
                "sampled again"
            )
        finish_reason = _FINISH[output.finish_reason]
        token_ids = list(output.token_ids)
        text = output.text if self.request.sampling.stop else self._decode_text(tokenizer, token_ids, finish_reason)
        return Rollout(
            rollout_id=self.request.rollout_id,
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            token_ids_T=np.asarray(token_ids, dtype=np.int32),
            sampler_logprobs_T=self._read_logprobs(output.logprobs, token_ids),
            versions=convert_version_spans(output.weight_versions or (), len(token_ids)),
            finish_reason=finish_reason,
            replica_id=replica_id,
            text=text,
            seconds=time.monotonic() - self.began,
            stop=self._name_stop(output.stop_reason),
            experts_SLK=self._cut_experts(output.routed_experts, len(token_ids)),
            sets=self._build_sets(output.sampling_mask, len(token_ids)),
        )

    def _name_stop(self, reason: int | str | None) -> str:
        """Return the stop string that ended the rollout. reason: vLLM's: that string, or the id of an end token."""
        if isinstance(reason, int):
            return self.stop_tokens.get(reason, "")
        return reason or ""

    def _decode_text(self, tokenizer: Any, token_ids: list[int], finish_reason: FinishReason) -> str:
        """Decode a completion without stop strings, with the detokenizer that vLLM has for its own streams.

        `tokenizer.decode` differs from it: some tokenizers drop a leading space unless the prompt precedes it.
        """
        request = EngineCoreRequest(
            request_id=self.request.rollout_id,
            prompt_token_ids=list(self.request.prompt_token_ids),
            mm_features=None,
            sampling_params=SamplingParams(skip_special_tokens=True),
            pooling_params=None,
            arrival_time=self.began,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
        detokenizer.update(token_ids, finish_reason is FinishReason.STOP)
        return detokenizer.get_next_output_text(finished=True, delta=False)

    def _read_logprobs(self, found: Any, token_ids: list[int]) -> FloatArray:
        """Return the log-probability of each token. found: vLLM's FlatLogprobs."""
        if found is None or found.token_ids != token_ids:
            raise EngineFailed(
                f"vLLM returned log-probabilities of other tokens than those of rollout {self.request.rollout_id}; it "
                "is sampled again"
            )
        return np.asarray(found.logprobs, dtype=np.float32)

    def _build_sets(self, mask: Any, length: int) -> SamplingSets | None:
        """Return the tokens that could be sampled at each of `length` tokens; None without top-p and top-k.

        mask: vLLM's SamplingMask; None if the engine was not started with them (`arguments`).
        """
        if mask is None or not self.request.sampling.is_truncated:
            return None
        if len(mask.token_ids) != length:
            raise EngineFailed(
                f"vLLM returned the sampling sets of {len(mask.token_ids)} instead of {length} tokens of rollout "
                f"{self.request.rollout_id}; it is sampled again"
            )
        return SamplingSets.from_lists(mask.token_ids)

    def _cut_experts(self, rows: Any, length: int) -> ExpertArray | None:
        """Return the routed experts of every token but the last, which is sampled and never computed.

        rows: of the prompt's tokens and at least `length` more. Tokens after a stop string are cut off.
        """
        if rows is None:
            return None
        tokens = len(self.request.prompt_token_ids) + length - 1
        if len(rows) < tokens:
            raise EngineFailed(
                f"vLLM returned the experts of {len(rows)} instead of {tokens} tokens of rollout "
                f"{self.request.rollout_id}; it is sampled again"
            )
        found: ExpertArray = rows[:tokens]
        return found

    def record_spans(self, recorder: Recorder, lane: str, stats: Any) -> None:
        """Record spans for queueing, prefill and decoding of a finished request, as children of the request's span.

        stats: vLLM's RequestStateStats in seconds of the engine core's clock; None if vLLM keeps none.
        """
        caller = SpanContext.parse_traceparent(self.request.traceparent)
        if not recorder.has_sinks or caller is None or stats is None:
            return
        now = recorder.now()
        parts = (
            (SpanName.QUEUE, stats.scheduled_ts - stats.queued_ts),
            (SpanName.PREFILL, stats.first_token_ts - stats.scheduled_ts),
            (SpanName.DECODE, stats.last_token_ts - stats.first_token_ts),
        )
        # The engine core's clock has another origin, so only durations are taken from it.
        recorder.record_parts(parts, lane, caller, (now - (time.monotonic() - self.began), now))


def convert_version_spans(spans: Any, length: int) -> tuple[VersionSpan, ...]:
    """Convert vLLM's version spans, cut to `length` tokens, without empty ones.

    A stop string may end a rollout before its last tokens.
    """
    cut = [VersionSpan(int(span.version), span.start, min(span.end, length)) for span in spans]
    return tuple(span for span in cut if span.first < span.end)
