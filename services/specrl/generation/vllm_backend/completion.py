"""One request on its way through vLLM: sampling parameters in, deltas collected, a Rollout out."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from specrl.errors import EngineFailed
from specrl.records import ExpertArray, FinishReason, Rollout, RolloutRequest, Sampling, VersionSpan
from specrl.telemetry.spans import Recorder, SpanContext, SpanName

_FINISH = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


def sampling_params(sampling: Sampling) -> SamplingParams:
    """vLLM's parameters: log-probability of each sampled token, text without special tokens, deltas."""
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        stop=list(sampling.stop),
        logprobs=0,  # the sampled token's own, and no others
        skip_special_tokens=True,
        output_kind=RequestOutputKind.DELTA,
    )


@dataclass(eq=False)
class Completion:
    """What has come back of one request. `collector` is vLLM's queue of its outputs; a restart replaces it."""

    request: RolloutRequest
    collector: Any
    began: float = field(default_factory=time.monotonic)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    must_restart: bool = False

    def add(self, output: Any) -> None:
        """Take one delta (a vllm CompletionOutput)."""
        self.token_ids += output.token_ids
        self.text.append(output.text)
        for token, entry in zip(output.token_ids, output.logprobs or (), strict=True):
            self.logprobs.append(entry[token].logprob)

    def mark_for_restart(self) -> None:
        """Its request is aborted; what `restart` begins comes after that."""
        self.must_restart = True

    def restart(self, collector: Any) -> None:
        """Begin again with another queue of outputs; what came before is forgotten."""
        self.collector, self.must_restart = collector, False
        self.token_ids, self.logprobs, self.text = [], [], []

    def rollout(self, output: Any, replica_id: str) -> Rollout:
        """The finished rollout; `output` is the last delta, which has been added. Raises EngineFailed otherwise."""
        if output.finish_reason not in _FINISH:
            raise EngineFailed(
                f"rollout {self.request.rollout_id} must end by stop or length, got {output.finish_reason}; "
                "it is generated again"
            )
        return Rollout(
            rollout_id=self.request.rollout_id,
            group_id=self.request.group_id,
            sample_index=self.request.sample_index,
            token_ids_T=np.asarray(self.token_ids, dtype=np.int32),
            sampler_logprobs_T=np.asarray(self.logprobs, dtype=np.float32),
            versions=version_spans(output.weight_versions or (), len(self.token_ids)),
            finish_reason=_FINISH[output.finish_reason],
            replica_id=replica_id,
            text="".join(self.text),
            seconds=time.monotonic() - self.began,
            stop=output.stop_reason if isinstance(output.stop_reason, str) else "",
            experts_SLK=self._experts(output.routed_experts),
        )

    def _experts(self, rows: Any) -> ExpertArray | None:
        """Of every token but the last; vLLM gives them with the last delta, of tokens after a stop string, too."""
        if rows is None:
            return None
        tokens = len(self.request.prompt_token_ids) + len(self.token_ids) - 1
        if len(rows) < tokens:
            raise EngineFailed(
                f"rollout {self.request.rollout_id} must come with the experts of {tokens} tokens, got {len(rows)}; it "
                "is generated again"
            )
        found: ExpertArray = rows[:tokens]
        return found

    def tell(self, recorder: Recorder, lane: str, stats: Any) -> None:
        """Record where the time of a finished request went, below the span that asked for it.

        stats: vLLM's RequestStateStats, seconds of the engine core's clock; None where it keeps none.
        """
        caller = SpanContext.parse(self.request.traceparent)
        if not recorder.is_heard or caller is None or stats is None:
            return
        now = recorder.now()
        parts = (
            (SpanName.QUEUE, stats.scheduled_ts - stats.queued_ts),
            (SpanName.PREFILL, stats.first_token_ts - stats.scheduled_ts),
            (SpanName.DECODE, stats.last_token_ts - stats.first_token_ts),
        )
        recorder.lay_out(parts, lane, caller, (now - (time.monotonic() - self.began), now))


def version_spans(spans: Any, length: int) -> tuple[VersionSpan, ...]:
    """vLLM's spans as ours: integers, cut at `length` (a stop string may end a rollout early), none of them empty."""
    cut = [VersionSpan(int(span.version), span.start, min(span.end, length)) for span in spans]
    return tuple(span for span in cut if span.first < span.end)
