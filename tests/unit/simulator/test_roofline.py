"""What a step costs on GPUs: which parts overlap, and what a verification pays beside its products."""

from __future__ import annotations

import numpy as np
import pytest
from tests.unit.simulator.scenarios import a_scenario

from specrl.simulator.costs.roofline import RooflineCosts
from specrl.simulator.scenarios.hardware import GPUS
from specrl.simulator.scenarios.models import MODELS

NO_HOST = ("efficiency.hostStepMs=0", "efficiency.hostSequenceUs=0")
SLOW_HOST = ("efficiency.hostStepMs=50", "efficiency.hostSequenceUs=0")
BATCH = 64


def step_s(k: int, context: float, *overrides: str) -> float:
    scenario = a_scenario(f"speculation.k={max(1, k)}", "speculation.acceptanceLength=1.5", *overrides)
    costs = RooflineCosts(scenario, MODELS["qwen3-8b"], GPUS["GB200"])
    return float(costs.step_s(np.array([float(BATCH)]), k, context)[0])


@pytest.mark.parametrize("k", [0, 3])
def test_a_step_takes_the_longer_of_host_and_gpu(k: int) -> None:
    gpu = step_s(k, 2000.0, *NO_HOST)
    assert 0 < gpu < 0.05
    assert step_s(k, 2000.0, *SLOW_HOST) == pytest.approx(0.05)
    assert step_s(k, 2000.0, "efficiency.hostStepMs=0.1", "efficiency.hostSequenceUs=0") == pytest.approx(gpu)


def test_ngram_drafts_are_looked_up_between_steps_so_host_and_gpu_add_up() -> None:
    ngram = "speculation.mechanism=ngram"
    gpu = step_s(3, 2000.0, ngram, *NO_HOST)
    assert step_s(3, 2000.0, ngram, *SLOW_HOST) == pytest.approx(gpu + 0.05)
    assert step_s(0, 2000.0, ngram, *SLOW_HOST) == pytest.approx(0.05)  # without drafts nothing is looked up


def test_without_async_scheduling_host_and_gpu_add_up() -> None:
    gpu = step_s(0, 2000.0, *NO_HOST)
    assert step_s(0, 2000.0, "engine.overlapsHost=false", *SLOW_HOST) == pytest.approx(gpu + 0.05)


def test_each_verified_draft_reads_a_share_of_the_kv_cache_again() -> None:
    def context_s(k: int) -> float:
        fields = ("speculation.mechanism=ngram", "efficiency.kvRereadShare=0.53", *NO_HOST)
        return step_s(k, 6000.0, *fields) - step_s(k, 2000.0, *fields)

    assert context_s(3) / context_s(0) == pytest.approx(1 + 3 * 0.53)


def test_a_step_that_no_cuda_graph_covers_launches_every_layer() -> None:
    fields = ("efficiency.eagerUsPerLayer=100", *NO_HOST)
    covered = step_s(3, 2000.0, f"engine.captureTokens={BATCH * 4}", *fields)
    uncovered = step_s(3, 2000.0, f"engine.captureTokens={BATCH * 4 - 1}", *fields)
    assert uncovered - covered == pytest.approx(36 * 100e-6)


def test_each_attention_group_is_an_engine_with_its_own_host_and_graphs() -> None:
    """All rollouts of a replica used to be charged to one host, which made large replicas of experts host-bound."""
    fields = ("model.name=qwen3-235b-a22b", "model.precision=fp8", "layout.tensorParallel=2")
    host = ("efficiency.hostStepMs=0", "efficiency.hostSequenceUs=10000")
    seconds = {}
    for degree in (2, 8):  # 1 and 4 groups
        scenario = a_scenario(*fields, f"layout.expertParallel={degree}", *host, "engine.captureTokens=64")
        costs = RooflineCosts(scenario, MODELS["qwen3-235b-a22b"], GPUS["GB200"])
        seconds[degree] = costs.step_s(np.array([float(BATCH)]), 3, 2000.0)[0]
    eager_s = 94 * 440e-6
    assert seconds[2] == pytest.approx(BATCH * 0.01 + eager_s)  # 256 query tokens
    assert seconds[8] == pytest.approx(BATCH * 0.01 / 4)  # 64 query tokens
