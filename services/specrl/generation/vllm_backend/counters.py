"""vLLM's per-step statistics as running SpeculationCounters of one engine.

A stat logger of our own rather than vLLM's Prometheus counters, since those are shared by all engines of a process.
"""

from __future__ import annotations

from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from specrl.records import SpeculationCounters


class CountingLogger(StatLoggerBase):
    """Sums up what vLLM reports after each step; `total` is read by the engine."""

    def __init__(self, vllm_config: Any = None, engine_index: int = 0) -> None:
        self.total = SpeculationCounters()

    def __call__(self, vllm_config: Any, engine_index: int = 0) -> CountingLogger:
        """vLLM calls a factory for each engine core; we have one core, and this is its logger."""
        return self

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Add one step's numbers."""
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

    def log_engine_initialized(self) -> None:
        """Nothing to say; the engine logs its own start."""
