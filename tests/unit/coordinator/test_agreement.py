"""Sampler and trainer agree if their log-probabilities differ by no more than rounding can explain."""

from __future__ import annotations

import math
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.members.agreement import (
    DEFAULT_BOUNDS,
    AgreementBound,
    LogprobComparison,
    choose_bound,
    compare_logprobs,
)
from specrl.errors import ERRORS_BY_NAME, SamplerDisagrees
from specrl.records import FinishReason, Rollout, TrainRollout, VersionSpan
from specrl.spec.run import Canary, Dtype

BOUND = AgreementBound(mean_abs=1e-3, max_abs=1e-2)
nats = st.floats(0, 10)


def a_rollout(logprobs: list[float], version: int = 7) -> TrainRollout:
    rollout = Rollout(
        rollout_id="canary-7-gen-0",
        group_id="canary",
        sample_index=0,
        token_ids_T=np.arange(len(logprobs), dtype=np.int32),
        sampler_logprobs_T=np.asarray(logprobs, np.float32),
        versions=(VersionSpan(version, 0, len(logprobs)),),
        finish_reason=FinishReason.LENGTH,
        replica_id="gen-0",
        text="",
        seconds=0.0,
    )
    return TrainRollout((3, 4), rollout, 0.0)


def test_differences_are_taken_token_by_token_over_all_rollouts() -> None:
    found = compare_logprobs(7, [a_rollout([-1.0, -2.0, -3.0]), a_rollout([-4.0])], [[-1.0, -2.5, -3.0], [-4.25]])
    assert (found.tokens, found.mean_abs, found.max_abs) == (4, 0.1875, 0.5)
    assert found.other_versions == frozenset()


def test_tokens_of_another_version_are_named() -> None:
    found = compare_logprobs(7, [a_rollout([-1.0]), a_rollout([-1.0], version=6)], [[-1.0], [-1.0]])
    assert found.other_versions == {6}
    assert not found.is_within(BOUND)


@pytest.mark.parametrize(
    ("mean_abs", "max_abs", "agrees"),
    [
        (0.0, 0.0, True),
        (1e-3, 1e-2, True),
        (1.1e-3, 2e-3, False),
        (5e-4, 1.1e-2, False),
        (math.nan, math.nan, False),
        (math.inf, math.inf, False),
    ],
)
def test_a_replica_agrees_if_both_differences_are_within_the_bound(
    mean_abs: float, max_abs: float, agrees: bool
) -> None:
    assert LogprobComparison(32, mean_abs, max_abs).is_within(BOUND) is agrees


@given(mean_abs=nats, max_abs=nats, more=nats)
def test_a_greater_difference_never_agrees_where_a_smaller_one_does_not(
    mean_abs: float, max_abs: float, more: float
) -> None:
    smaller = LogprobComparison(8, mean_abs, max_abs)
    greater = LogprobComparison(8, mean_abs + more, max_abs + more)
    assert smaller.is_within(BOUND) or not greater.is_within(BOUND)


@given(st.lists(st.lists(st.floats(-20, 0, width=32), min_size=1, max_size=5), min_size=2, max_size=4))
def test_comparisons_add_up_to_the_comparison_of_all(logprobs: list[list[float]]) -> None:
    rollouts = [a_rollout(values) for values in logprobs]
    scores = [[value - 0.5 * place for place, value in enumerate(values)] for values in logprobs]
    total = LogprobComparison()
    for rollout, score in zip(rollouts, scores, strict=True):
        total = total.plus(compare_logprobs(7, [rollout], [score]))
    whole = compare_logprobs(7, rollouts, scores)
    assert (total.tokens, total.max_abs) == (whole.tokens, whole.max_abs)
    assert math.isclose(total.mean_abs, whole.mean_abs, abs_tol=1e-12)


def test_bounds_are_those_of_the_precision_unless_the_run_file_gives_others() -> None:
    assert choose_bound(Canary(), Dtype.FLOAT32) == DEFAULT_BOUNDS[Dtype.FLOAT32] == BOUND
    assert choose_bound(Canary(), Dtype.BFLOAT16).mean_abs > BOUND.mean_abs
    assert choose_bound(Canary.model_validate({"maxMeanAbs": "0.2"}), Dtype.FLOAT32) == AgreementBound(0.2, 1e-2)
    assert choose_bound(Canary.model_validate({"maxAbs": "0.5"}), Dtype.BFLOAT16).max_abs == 0.5


def test_the_error_ends_a_run_for_good_and_pickles() -> None:
    error = SamplerDisagrees("gen-0 must sample from policy version 7, got another; change the engine")
    assert (error.retryable, error.exit_code) == (False, 2)
    assert ERRORS_BY_NAME["SamplerDisagrees"] is SamplerDisagrees
    copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(copy), str(copy)) == (SamplerDisagrees, str(error))
