"""Step times that NeMo-RL publishes of itself, and what `specrl simulate` makes of their configurations.

Rows: its docs/about/performance-summary.md (releases 0.4 and 0.6; GRPO on OpenMathInstruct-2, bfloat16); which nodes
generate: the recipes in its examples/configs/recipes/llm/performance. DeepSeek-V3 (latent attention), SWE (tools) and
FP8 are not simulated, and left out.

Published are mean lengths, not their spread, and stages are not. So every member of an ensemble (spread of lengths,
likeness of a group's, memory bandwidth reached) is calibrated by itself on the first synchronous row of each release,
GPU and model: the share of its floating-point figures that the trainer reaches is chosen to meet that row. All else is
the simulator's one set of efficiencies. The other rows are predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.progress import track
from scipy.optimize import brentq

from specrl.errors import SpecInvalid
from specrl.simulator.lengths import log_normal
from specrl.simulator.models import MODELS
from specrl.simulator.scenario import Scenario
from specrl.simulator.scenario_file import parse
from specrl.simulator.simulate import means, prepare, run

PROMPT_TOKENS = 105
"""What published tokens a second count beyond the mean length of completions."""
GENERATIONS = 32
"""Rollouts of a prompt, in every recipe."""
MEMBERS = tuple(itertools.product((0.3, 0.6, 0.9), (0.3, 0.7), (0.75, 0.9)))
"""Sigma of lengths, correlation in a group, share of memory bandwidth."""


@dataclass(frozen=True)
class Row:
    """One published run. generating: its GPUs that generate; None: all do, in turn with training. lag: in steps."""

    release: str
    gpu: str
    model: str
    gpus: int
    generating: int | None
    lag: int
    rollouts: int
    mean_tokens: int
    longest: int
    tensor: int
    """Parallel, in generation."""
    step_s: float

    @property
    def calibrated_together(self) -> tuple[str, str, str]:
        return self.release, self.gpu, self.model

    @property
    def name(self) -> str:
        how = "sync" if self.generating is None else f"lag {self.lag}, {self.generating} generate"
        return f"{self.release} {self.gpu} {self.model} {self.gpus} GPUs, {how}"

    def scenario(self, sigma: float, correlation: float, bandwidth: float) -> Scenario:
        """As one member of the ensemble sees it."""
        longest = self.longest - PROMPT_TOKENS

        def quantiles(median: float) -> np.ndarray:
            return log_normal(median, sigma, longest, correlation).quantiles_Q

        median = brentq(lambda tokens: quantiles(tokens).mean() - self.mean_tokens, 10, 100 * longest)
        return parse(
            {
                "name": self.name,
                "model": {"name": self.model},
                "cluster": {"gpu": self.gpu, "gpus": self.gpus},
                "layout": {
                    "colocated": self.generating is None,
                    "generationGpus": self.generating or self.gpus,
                    "trainingGpus": self.gpus - (self.generating or 0),
                    "tensorParallel": self.tensor,
                },
                "workload": {
                    "quantiles": quantiles(median)[::8].tolist(),
                    "maxTokens": longest,
                    "groupCorrelation": correlation,
                    "promptTokens": PROMPT_TOKENS,
                },
                "schedule": {
                    "steps": 2 * (self.lag + 2),
                    "promptsPerStep": self.rollouts // GENERATIONS,
                    "groupSize": GENERATIONS,
                    "maxPolicyLag": self.lag,
                },
                "efficiency": {"memoryBandwidth": bandwidth},
            }
        )


ROWS = (
    Row("0.4", "H100", "llama-3.1-8b", 16, None, 0, 2048, 1060, 4096, 1, 97.7),
    Row("0.4", "H100", "llama-3.1-8b", 16, 8, 1, 2048, 1129, 4096, 1, 74.6),
    Row("0.4", "H100", "qwen3-32b", 32, None, 0, 2048, 3206, 4096, 4, 393),
    Row("0.4", "H100", "qwen3-32b", 64, 32, 1, 2048, 3207, 4096, 4, 215),
    Row("0.4", "H100", "qwen3-30b-a3b", 32, None, 0, 2048, 3154, 4096, 4, 225),
    Row("0.4", "H100", "qwen3-30b-a3b", 32, 16, 1, 2048, 3158, 4096, 2, 244),
    Row("0.4", "H100", "qwen3-235b-a22b", 128, None, 0, 512, 5671, 8192, 16, 506),
    Row("0.4", "H100", "qwen3-235b-a22b", 256, 128, 1, 512, 5691, 8192, 8, 241),
    Row("0.6", "H100", "qwen3-30b-a3b", 32, None, 0, 2048, 3203, 4096, 2, 192),
    Row("0.6", "H100", "qwen3-30b-a3b", 32, 16, 1, 2048, 3201, 4096, 2, 152),
    Row("0.6", "H100", "qwen3-30b-a3b", 192, 64, 8, 2048, 3206, 4096, 2, 34.5),
    Row("0.6", "H100", "qwen3-235b-a22b", 128, None, 0, 512, 5698, 8192, 16, 395),
    Row("0.6", "H100", "qwen3-235b-a22b", 256, None, 0, 512, 5713, 8192, 16, 312),
    Row("0.6", "H100", "qwen3-235b-a22b", 256, 128, 1, 512, 5721, 8192, 8, 231),
    Row("0.6", "GB200", "qwen3-30b-a3b", 16, None, 0, 2048, 3199, 4096, 1, 221),
    Row("0.6", "GB200", "qwen3-30b-a3b", 16, 8, 1, 2048, 3197, 4096, 1, 301),
    Row("0.6", "GB200", "qwen3-235b-a22b", 64, None, 0, 512, 5709, 8192, 8, 286),
    Row("0.6", "GB200", "qwen3-235b-a22b", 128, None, 0, 512, 5693, 8192, 8, 345),
    Row("0.6", "GB200", "qwen3-235b-a22b", 128, 64, 1, 512, 5705, 8192, 8, 278),
)


def predict() -> dict[str, Any]:
    """Seconds of a step, by row: median and band over members, and what cannot be simulated with its reason."""
    found: dict[str, Any] = {}
    for group in track(sorted({row.calibrated_together for row in ROWS}), "predicting NeMo-RL", transient=True):
        first, *others = [row for row in ROWS if row.calibrated_together == group]
        values: dict[Row, list[float]] = {row: [] for row in others}
        shares, refused = [], ""
        for member in MEMBERS:
            try:
                share = _trainer_share(first, member)
                shares.append(share)
                for row in others:
                    values[row].append(_step_s(row, member, share))
            except (SpecInvalid, ValueError) as error:
                refused = str(error)
        found[first.name] = {"kind": "calibrated", "members": len(shares), "dropped": refused} | (
            {"trainerShare": band(shares)} if shares else {}
        )
        for row, seconds in values.items():
            found[row.name] = {"kind": "predicted"} | ({"stepS": band(seconds)} if seconds else {"dropped": refused})
    return found


def scored(stored: dict[str, Any]) -> Iterator[tuple[Row, dict[str, Any]]]:
    """Rows that were predicted, with what was stored of them."""
    for row in ROWS:
        if stored[row.name]["kind"] == "predicted":
            yield row, stored[row.name]


def _step_s(row: Row, member: tuple[float, float, float], share: float) -> float:
    field = "train_flops_experts" if MODELS[row.model].experts else "train_flops"
    prepared = prepare(row.scenario(*member).with_(efficiency={field: share}))
    return means(prepared, run(prepared)).step_s


def _trainer_share(row: Row, member: tuple[float, float, float]) -> float:
    """The share of floating-point figures with which a synchronous step takes what is published.

    Its time is a + b / share. Raises ValueError when no share from 0 to 1 does.
    """
    low, high = 0.1, 0.5
    slow, fast = _step_s(row, member, low), _step_s(row, member, high)
    b = (slow - fast) / (1 / low - 1 / high)
    rest = row.step_s - (slow - b / low)
    if not 0 < b / rest <= 1:
        raise ValueError(f"{row.name} takes {row.step_s} s, of which {rest:.0f} s would be left for training")
    return b / rest


def band(values: list[float]) -> dict[str, float]:
    """p10, median and p90."""
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"p10": round(float(low), 3), "median": round(float(middle), 3), "p90": round(float(high), 3)}
