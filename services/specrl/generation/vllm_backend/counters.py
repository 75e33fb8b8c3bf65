"""vLLM's per-step statistics as running SpeculationCounters and StepCosts of one engine.

A stat logger of our own rather than vLLM's Prometheus counters, since those are shared by all engines of a process.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from specrl.generation.step_times import StepTimes
from specrl.records import SpeculationCounters


class CountingLogger(StatLoggerBase):
    """Sums up what vLLM reports after each step; `total` is read by the engine."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.total = SpeculationCounters()
        self.times = StepTimes()
        self._requests: Mapping[str, Any] = {}

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> CountingLogger:
        """vLLM calls a factory for each engine core; we have one core, and this is its logger."""
        return self

    def watch(self, requests: Mapping[str, Any]) -> None:
        """requests: what vLLM's front end knows of each request under way, from which contexts are read. The use of the
        KV cache does not tell them: it counts whole blocks, and a prompt that several share once."""
        self._requests = requests

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one step's numbers."""
        if scheduler_stats is not None:
            self._time(scheduler_stats, iteration_stats)
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

    def _time(self, scheduler_stats: Any, iteration_stats: Any) -> None:
        spec, live = scheduler_stats.spec_decoding_stats, scheduler_stats.num_running_reqs
        drafted = round(spec.num_draft_tokens / spec.num_drafts) if spec is not None and spec.num_drafts else 0
        decodes = iteration_stats is None or iteration_stats.num_prompt_tokens == 0
        self.times.ended(time.monotonic(), live, drafted, self._context(), decodes=decodes)

    def _context(self) -> float:
        """Mean tokens of the requests under way, prompts included."""
        tokens: int = sum(
            request.prompt_len + request.stats.num_generation_tokens for request in self._requests.values()
        )
        return tokens / max(1, len(self._requests))

    def log_engine_initialized(self) -> None:
        """Nothing to say; the engine logs its own start."""
