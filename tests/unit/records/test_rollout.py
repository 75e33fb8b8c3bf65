"""A poisoned rollout is refused where it enters a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrl.errors import RecordInvalid
from specrl.records import Batch, FinishReason, Group, Prompt, Reward, Rollout, TrainRollout, VersionSpan


def a_rollout(**changes: Any) -> Rollout:
    sound = Rollout(
        rollout_id="r0",
        group_id="g0",
        sample_index=0,
        token_ids_T=np.array([5, 6, 7], np.int32),
        sampler_logprobs_T=np.array([-0.5, 0.0, -2.0], np.float32),
        versions=(VersionSpan(3, 0, 1), VersionSpan(4, 1, 3)),
        finish_reason=FinishReason.STOP,
        replica_id="a",
        text="text",
        seconds=1.0,
    )
    return replace(sound, **changes)


def logprobs(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def test_a_sound_rollout_passes_at_its_limit() -> None:
    a_rollout().check(max_tokens=3)
    a_rollout(sampler_logprobs_T=logprobs(-1, 5e-5, -1)).check(max_tokens=3)  # rounding of log(1)


EMPTY = {"token_ids_T": np.array([], np.int32), "sampler_logprobs_T": logprobs(), "versions": ()}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (EMPTY, "must not be empty"),
        ({"sampler_logprobs_T": logprobs()}, "one per token, got 0 for 3"),
        ({"sampler_logprobs_T": logprobs(-1, -1)}, "one per token, got 2 for 3"),
        ({"sampler_logprobs_T": logprobs(-1, np.nan, -1)}, "must be finite"),
        ({"sampler_logprobs_T": logprobs(-1, -np.inf, -1)}, "must be finite"),
        ({"sampler_logprobs_T": logprobs(-1, np.inf, -1)}, "must be finite"),
        ({"sampler_logprobs_T": logprobs(-1, 0.5, -1)}, "must be <= 0"),
        ({"token_ids_T": np.array([5, -1, 7], np.int32)}, "must be >= 0"),
        ({"versions": ()}, "cover all 3 tokens"),
        ({"versions": (VersionSpan(3, 0, 2),)}, "cover all 3 tokens"),
        ({"versions": (VersionSpan(3, 0, 4),)}, "cover all 3 tokens"),
        ({"versions": (VersionSpan(3, 1, 3),)}, "cover every token once"),
        ({"versions": (VersionSpan(3, 0, 2), VersionSpan(4, 1, 3))}, "cover every token once"),
        ({"versions": (VersionSpan(3, 0, 1), VersionSpan(4, 2, 3))}, "cover every token once"),
        ({"versions": (VersionSpan(3, 0, 0), VersionSpan(4, 0, 3))}, "cover every token once"),
    ],
)
def test_every_kind_of_poison_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordInvalid, match=said) as caught:
        a_rollout(**changes).check(max_tokens=3)
    assert "rollout r0: " in str(caught.value)
    assert "generated again" in str(caught.value)


def test_an_over_long_rollout_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="at most max_tokens=2, got length=3"):
        a_rollout().check(max_tokens=2)


def test_policy_lag_counts_from_the_oldest_token() -> None:
    rollouts = [a_rollout(), a_rollout(versions=(VersionSpan(6, 0, 2), VersionSpan(2, 2, 3)))]
    batch = Batch(8, tuple(TrainRollout((1,), rollout, 0.0) for rollout in rollouts))
    assert [rollout.oldest_version for rollout in rollouts] == [3, 2]
    assert batch.policy_lags == [4, 5]


def test_an_ungraded_rollout_is_not_a_zero() -> None:
    prompt = Prompt("p0", 0, (1,), "q", "a")
    graded = Group("g0", prompt, 1, (a_rollout(), a_rollout()), (Reward(0.0), Reward(1.0)))
    np.testing.assert_array_equal(graded.rewards_G, np.array([0, 1], np.float32))
    with pytest.raises(RecordInvalid, match="must be graded"):
        _ = replace(graded, rewards=(Reward(0.0), Reward(None, "timeout: slow"))).rewards_G
