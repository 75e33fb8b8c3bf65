"""Step times that NeMo-RL publishes, and what `specrl simulate` predicts for their configurations.

Rows: docs/about/performance-summary.md of NeMo-RL (releases 0.4 and 0.6; GRPO on OpenMathInstruct-2, bfloat16). The
recipes in its examples/configs/recipes/llm/performance say which nodes generate. DeepSeek-V3 (latent attention), SWE
(tools) and FP8 are left out, because they are not simulated.

Mean lengths are published; their spread and the phases of a step are not. So each member of an ensemble (spread of
lengths, correlation within a group, achieved memory bandwidth) is calibrated by itself on the first synchronous row of
each release, GPU and model: the trainer's share of peak floating-point operations is chosen to match that row.
Everything else is the simulator's own set of efficiencies. The other rows are predicted.
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
from specrl.simulator.scenarios.lengths import log_normal
from specrl.simulator.scenarios.models import MODELS
from specrl.simulator.scenarios.scenario import Scenario
from specrl.simulator.scenarios.scenario_file import parse_scenario
from specrl.simulator.simulate import average_steps, prepare_scenario, simulate_events

PROMPT_TOKENS = 105
"""Tokens that published tokens per second count beyond the mean completion."""
GENERATIONS = 32
"""Rollouts per prompt in every recipe."""
MEMBERS = tuple(itertools.product((0.3, 0.6, 0.9), (0.3, 0.7), (0.75, 0.9)))
"""Sigma of lengths, correlation within a group, share of memory bandwidth."""


@dataclass(frozen=True)
class Row:
    """One published run.

    generating: GPUs that only generate; None: all, alternating with training. lag: policy lag in steps.
    """

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
    """Parallelism of generation."""
    step_s: float

    @property
    def calibrated_together(self) -> tuple[str, str, str]:
        return self.release, self.gpu, self.model

    @property
    def overlaps_host(self) -> bool:
        """Whether vLLM schedules asynchronously.

        It was not the default yet in release 0.4, and it does not with Ray, which executes replicas of several GPUs.
        """
        return self.release != "0.4" and self.tensor == 1

    @property
    def name(self) -> str:
        how = "sync" if self.generating is None else f"lag {self.lag}, {self.generating} generate"
        return f"{self.release} {self.gpu} {self.model} {self.gpus} GPUs, {how}"

    def scenario(self, sigma: float, correlation: float, bandwidth: float) -> Scenario:
        """Make the simulator's workload for one member of the ensemble."""
        longest = self.longest - PROMPT_TOKENS

        def quantiles(median: float) -> np.ndarray:
            return log_normal(median, sigma, longest, correlation).quantiles_Q

        median = brentq(lambda tokens: quantiles(tokens).mean() - self.mean_tokens, 10, 100 * longest)
        return parse_scenario(
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
                "engine": {"overlapsHost": self.overlaps_host},
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
    """Predict seconds per step by row: median and band over members; and why a row cannot be simulated."""
    found: dict[str, Any] = {}
    for group in track(sorted({row.calibrated_together for row in ROWS}), "predicting NeMo-RL", transient=True):
        first, *others = [row for row in ROWS if row.calibrated_together == group]
        values: dict[Row, list[float]] = {row: [] for row in others}
        shares = []
        refused = ""
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
    """Rows that were predicted, with their stored predictions."""
    for row in ROWS:
        if stored[row.name]["kind"] == "predicted":
            yield row, stored[row.name]


def _step_s(row: Row, member: tuple[float, float, float], share: float) -> float:
    field = "train_flops_experts" if MODELS[row.model].experts else "train_flops"
    prepared = prepare_scenario(row.scenario(*member).with_fields(efficiency={field: share}))
    return average_steps(prepared, simulate_events(prepared)).step_s


def _trainer_share(row: Row, member: tuple[float, float, float]) -> float:
    """Find the share of floating-point operations at which a synchronous step takes its published time.

    The step's time is a + b / share. Raises ValueError if no share from 0 to 1 fits.
    """
    low = 0.1
    high = 0.5
    slow = _step_s(row, member, low)
    fast = _step_s(row, member, high)
    b = (slow - fast) / (1 / low - 1 / high)
    rest = row.step_s - (slow - b / low)
    if not 0 < b / rest <= 1:
        raise ValueError(f"{row.name} takes {row.step_s} s, of which {rest:.0f} s would be left for training")
    return b / rest


def band(values: list[float]) -> dict[str, float]:
    """p10, median and p90."""
    low, middle, high = np.quantile(values, [0.1, 0.5, 0.9])
    return {"p10": round(float(low), 3), "median": round(float(middle), 3), "p90": round(float(high), 3)}
