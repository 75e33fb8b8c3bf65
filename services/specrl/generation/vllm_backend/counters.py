"""Accumulates vLLM's per-step statistics as SpeculationCounters and StepCostModel of one engine.

vLLM's own Prometheus counters would not do, since all engines of a process share them.

vLLM calls the logger after each step; `engine` reads the sums for the replica's status.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from specrl.generation.step_times import StepTimes
from specrl.records import SpeculationCounters


class CountingLogger(StatLoggerBase):
    """A vLLM stat logger that sums up each step's statistics. total: counters so far. times: step durations so far."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.total = SpeculationCounters()
        self.times = StepTimes()
        self._requests: Mapping[str, Any] = {}

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> CountingLogger:
        """Return this logger: vLLM expects a factory, which it calls once per engine core, and we have one core."""
        return self

    def set_requests(self, requests: Mapping[str, Any]) -> None:
        """Set the front end's table of unfinished requests, from which context lengths are read.

        KV cache usage cannot replace it: that counts whole blocks, and a shared prompt only once.
        """
        self._requests = requests

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one step's statistics. vLLM calls this."""
        if scheduler_stats is not None:
            self._record_step_time(scheduler_stats, iteration_stats)
        spec = scheduler_stats.spec_decoding_stats if scheduler_stats is not None else None
        generated = iteration_stats.num_generation_tokens if iteration_stats is not None else 0
        if spec is not None:
            step = SpeculationCounters(
                drafts=spec.num_drafts,
                draft_tokens=spec.num_draft_tokens,
                accepted_tokens=spec.num_accepted_tokens,
                accepted_per_position=tuple(spec.num_accepted_tokens_per_pos),
                generated_tokens=generated,
            )
        else:
            step = SpeculationCounters(generated_tokens=generated)
        self.total = self.total.plus(step)

    def _record_step_time(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        spec = scheduler_stats.spec_decoding_stats
        live = scheduler_stats.num_running_reqs
        drafted = round(spec.num_draft_tokens / spec.num_drafts) if spec is not None and spec.num_drafts else 0
        decodes = iteration_stats is None or iteration_stats.num_prompt_tokens == 0
        self.times.record_step_end(time.monotonic(), live, drafted, self._mean_context(), decodes=decodes)

    def _mean_context(self) -> float:
        """Mean tokens of the unfinished requests, including prompts."""
        tokens: int = sum(
            request.prompt_len + request.stats.num_generation_tokens for request in self._requests.values()
        )
        return tokens / max(1, len(self._requests))

    def log_engine_initialized(self) -> None:
        """Do nothing; our engine logs its own start."""
