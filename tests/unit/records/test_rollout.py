"""A poisoned rollout is refused where it enters a process."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specrl.errors import RecordInvalid
from specrl.records import (
    Batch,
    FinishReason,
    Group,
    OutputSpan,
    Prompt,
    Reward,
    Rollout,
    TrainRollout,
    VersionSpan,
)


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
        ({"versions": (VersionSpan(4, 0, 1), VersionSpan(3, 1, 3))}, "never fall"),
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


def test_a_rollout_has_tokens_of_the_versions_that_its_replica_served_and_of_no_other() -> None:
    for served in (range(3, 5), range(9)):
        a_rollout().check(3, served)
    for served, said in ((range(4, 5), "4 to 4"), (range(4), "0 to 3")):
        with pytest.raises(RecordInvalid, match=f"its replica served, {said}, got"):
            a_rollout().check(3, served)


def test_policy_lag_counts_from_the_oldest_token() -> None:
    rollouts = [a_rollout(), a_rollout(versions=(VersionSpan(6, 0, 2), VersionSpan(2, 2, 3)))]
    batch = Batch(8, tuple(TrainRollout((1,), rollout, 0.0) for rollout in rollouts))
    assert [rollout.oldest_version for rollout in rollouts] == [3, 2]
    assert batch.policy_lags == [4, 5]


def test_experts_must_be_the_mixtures() -> None:
    """One for each token but the last, of a prompt of two and a completion of three."""

    def check(*shape: int, highest: int = 3) -> None:
        experts_SLK = np.full(shape, highest, np.uint8)
        TrainRollout((1, 2), a_rollout(experts_SLK=experts_SLK), 0.0).check_experts((6, 2, 4))

    check(4, 6, 2)
    TrainRollout((1, 2), a_rollout(), 0.0).check_experts((6, 2, 4))
    for shape, highest in (((5, 6, 2), 3), ((4, 5, 2), 3), ((4, 6, 1), 3), ((4, 6, 2), 4)):
        with pytest.raises(RecordInvalid, match="experts must be 4 tokens x 6 layers x 2, each < 4"):
            check(*shape, highest=highest)


def test_what_is_replayed_is_known_of_every_token() -> None:
    a_rollout(experts_SLK=np.zeros((4, 6, 2), np.uint8)).check_replayed(prompt_tokens=2)
    for experts_SLK in (None, np.zeros((3, 6, 2), np.uint8)):
        with pytest.raises(RecordInvalid, match=r"experts must be those of 4 tokens, got [03]"):
            a_rollout(experts_SLK=experts_SLK).check_replayed(prompt_tokens=2)


def with_outputs(*outputs: tuple[int, int], **changes: Any) -> Rollout:
    """Seven tokens, of which a tool wrote those of `outputs`."""
    spans = tuple(OutputSpan(*span) for span in outputs)
    is_output_T = np.zeros(7, dtype=bool)
    for first, end in outputs:
        is_output_T[first:end] = True
    edges = [0, *(edge for span in outputs for edge in span), 7]
    sampled = [(first, end) for first, end in zip(edges[::2], edges[1::2], strict=True) if end > first]
    sound: dict[str, Any] = {
        "token_ids_T": np.arange(5, 12, dtype=np.int32),
        "sampler_logprobs_T": np.where(is_output_T, 0, -0.5).astype(np.float32),
        "versions": tuple(VersionSpan(3 + place, first, end) for place, (first, end) in enumerate(sampled)),
        "outputs": spans,
    }
    return a_rollout(**sound | changes)


def test_what_a_tool_wrote_is_neither_sampled_nor_of_a_version() -> None:
    rollout = with_outputs((2, 4), (5, 6))
    rollout.check(max_tokens=7)
    assert rollout.turns == ((0, 2), (4, 5), (6, 7))
    assert rollout.sampled_N.tolist() == [0, 1, 4, 6]
    assert (rollout.length, rollout.sampled_length, rollout.oldest_version) == (7, 4, 3)
    plain = a_rollout()
    assert (plain.turns, plain.sampled_length) == (((0, 3),), 3)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (with_outputs((0, 2)), "must follow what the policy sampled"),
        (with_outputs((5, 7)), "the last token must be sampled"),
        (with_outputs((2, 3), (3, 4)), "must follow what the policy sampled"),
        (with_outputs((2, 4), outputs=()), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 5),)), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 3),)), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 4), OutputSpan(4, 4))), "cover every token once"),
        (with_outputs((2, 4), sampler_logprobs_T=logprobs(*[-0.5] * 7)), "must have no log-probabilities"),
        (with_outputs((2, 4), versions=(VersionSpan(4, 0, 2), VersionSpan(3, 4, 7))), "never fall"),
        (with_outputs((2, 4), versions=(VersionSpan(3, 4, 7), VersionSpan(4, 0, 2))), "never fall"),
    ],
)
def test_outputs_that_do_not_fit_are_refused(rollout: Rollout, said: str) -> None:
    with pytest.raises(RecordInvalid, match=said):
        rollout.check(max_tokens=7)


def test_an_ungraded_rollout_is_not_a_zero() -> None:
    prompt = Prompt("p0", 0, (1,), "q", "a")
    graded = Group("g0", prompt, 1, (a_rollout(), a_rollout()), (Reward(0.0), Reward(1.0)))
    np.testing.assert_array_equal(graded.rewards_G, np.array([0, 1], np.float32))
    with pytest.raises(RecordInvalid, match="must be graded"):
        _ = replace(graded, rewards=(Reward(0.0), Reward(None, "timeout: slow"))).rewards_G
