"""An invalid rollout is refused where it enters a process."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
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
    Sampling,
    SamplingSets,
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


def test_a_valid_rollout_of_the_longest_length_passes() -> None:
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
        ({"versions": (VersionSpan(4, 0, 1), VersionSpan(3, 1, 3))}, "must not decrease"),
    ],
)
def test_every_invalid_rollout_is_refused_with_its_reason(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(RecordInvalid, match=said) as caught:
        a_rollout(**changes).check(max_tokens=3)
    assert "rollout r0: " in str(caught.value)
    assert "generating it again" in str(caught.value)


def test_an_over_long_rollout_is_refused() -> None:
    with pytest.raises(RecordInvalid, match="at most max_tokens=2, got length=3"):
        a_rollout().check(max_tokens=2)


def test_versions_that_the_replica_did_not_serve_are_refused() -> None:
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


def test_experts_that_the_model_does_not_have_are_refused() -> None:
    """Make experts of all tokens but the last, for a prompt of two tokens and a completion of three."""
    mixture = (6, 2, 4)

    def with_experts(*shape: int, highest: int = 3) -> Rollout:
        return a_rollout(experts_SLK=np.full(shape, highest, np.uint8))

    for sound in (with_experts(4, 6, 2), a_rollout()):
        sound.check_policy(2, 8, mixture)
        TrainRollout((1, 2), sound, 0.0).check(5, 8, mixture)
    for shape, highest in (((5, 6, 2), 3), ((4, 5, 2), 3), ((4, 6, 1), 3), ((4, 6, 2), 4)):
        unfit = with_experts(*shape, highest=highest)
        for check in (partial(unfit.check_policy, 2), partial(TrainRollout((1, 2), unfit, 0.0).check, 5)):
            with pytest.raises(RecordInvalid, match="experts must be 4 tokens x 6 layers x 2, each < 4"):
                check(8, mixture)
    with pytest.raises(RecordInvalid, match="experts must be 4 tokens x 0 layers x 0"):
        with_experts(4, 6, 2).check_policy(2, 8, (0, 0, 0))


def test_tokens_that_the_policy_does_not_have_are_refused() -> None:
    a_rollout().check_policy(2, 8, (0, 0, 0))
    with pytest.raises(RecordInvalid, match="token ids must be < 7, got 7"):
        a_rollout().check_policy(2, 7, (0, 0, 0))
    for prompt, wrong in (((8, 1), 8), ((1, -1), -1)):
        with pytest.raises(RecordInvalid, match=f"the prompt's token ids must be >= 0 and < 8, got {wrong}; tokenize"):
            TrainRollout(prompt, a_rollout(), 0.0).check(5, 8, (0, 0, 0))


def test_replay_needs_the_experts_of_every_token_but_the_last() -> None:
    a_rollout(experts_SLK=np.zeros((4, 6, 2), np.uint8)).check_replayed_experts(prompt_tokens=2)
    for experts_SLK in (None, np.zeros((3, 6, 2), np.uint8)):
        with pytest.raises(RecordInvalid, match=r"experts must be recorded for 4 tokens .*, got [03]"):
            a_rollout(experts_SLK=experts_SLK).check_replayed_experts(prompt_tokens=2)


def sets(*ids: Sequence[int]) -> SamplingSets:
    return SamplingSets.from_lists(ids)


def test_sampling_sets_of_any_size_pass_and_tool_outputs_have_none() -> None:
    a_rollout(sets=sets([5], [0, 6, 9], range(100_000))).check(max_tokens=3)
    whole = with_outputs((2, 4), (5, 6), sets=sets([5], [6, 7], [9], [1, 11]))
    whole.check(max_tokens=7)
    TrainRollout((1,), whole, 0.0).check(max_length=8, vocab_size=12, experts=(0, 0, 0))


def misshaped(sizes: Sequence[int], ids: Sequence[int]) -> SamplingSets:
    return SamplingSets(np.array(sizes, np.int32), np.array(ids, np.int32))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (sets([5], [6]), "one per sampled token, got 2 for 3"),
        (sets([5], [6], [7], [8]), "one per sampled token, got 4 for 3"),
        (misshaped([1, 0, 1], [5, 7]), "at least one id"),
        (misshaped([2, -1, 2], [5, 6, 7]), "at least one id"),
        (misshaped([1, 1, 1], [5, 6]), "as many ids as their sizes sum to, 3, got 2"),
        (misshaped([1, 1, 1], [5, 6, 7, 8]), "as many ids as their sizes sum to, 3, got 4"),
        (sets([-1, 5], [6], [7]), "must be >= 0"),
        (sets([5, 4], [6], [7]), "must ascend"),
        (sets([5, 5], [6], [7]), "must ascend"),
        (sets([5], [4, 7], [7]), "must be in its sampling set, got 1 of 3 that are not"),
    ],
)
def test_invalid_sampling_sets_are_refused(given: SamplingSets, said: str) -> None:
    with pytest.raises(RecordInvalid, match=said):
        a_rollout(sets=given).check(max_tokens=3)


def test_sampling_sets_of_another_vocabulary_are_refused() -> None:
    item = TrainRollout((1,), a_rollout(sets=sets([5], [6], [7, 8])), 0.0)
    item.check(max_length=4, vocab_size=9, experts=(0, 0, 0))
    with pytest.raises(RecordInvalid, match="ids of sampling sets must be < 8"):
        item.check(max_length=4, vocab_size=8, experts=(0, 0, 0))


def test_a_truncated_rollout_without_sampling_sets_is_refused() -> None:
    assert [Sampling(1, 1.0, p, k).is_truncated for p, k in ((1.0, 0), (0.9, 0), (1.0, 2))] == [False, True, True]
    a_rollout(sets=sets([5], [6], [7])).check_recorded_sets()
    with pytest.raises(RecordInvalid, match=r"r0: sampling sets must be recorded .*, got none"):
        a_rollout().check_recorded_sets()


def with_outputs(*outputs: tuple[int, int], **changes: Any) -> Rollout:
    """Make a rollout of seven tokens, where `outputs` are tool outputs."""
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


def test_tool_outputs_are_not_sampled_and_have_no_version() -> None:
    rollout = with_outputs((2, 4), (5, 6))
    rollout.check(max_tokens=7)
    assert rollout.turn_spans == ((0, 2), (4, 5), (6, 7))
    assert rollout.sampled_N.tolist() == [0, 1, 4, 6]
    assert (rollout.total_length, rollout.sampled_length, rollout.oldest_version) == (7, 4, 3)
    plain = a_rollout()
    assert (plain.turn_spans, plain.sampled_length) == (((0, 3),), 3)


@pytest.mark.parametrize(
    ("rollout", "said"),
    [
        (with_outputs((0, 2)), "must follow sampled tokens"),
        (with_outputs((5, 7)), "the last token must be sampled"),
        (with_outputs((2, 3), (3, 4)), "must follow sampled tokens"),
        (with_outputs((2, 4), outputs=()), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 5),)), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 3),)), "cover every token once"),
        (with_outputs((2, 4), outputs=(OutputSpan(2, 4), OutputSpan(4, 4))), "cover every token once"),
        (with_outputs((2, 4), sampler_logprobs_T=logprobs(*[-0.5] * 7)), "log-probabilities of tool outputs must be 0"),
        (with_outputs((2, 4), versions=(VersionSpan(4, 0, 2), VersionSpan(3, 4, 7))), "must not decrease"),
        (with_outputs((2, 4), versions=(VersionSpan(3, 4, 7), VersionSpan(4, 0, 2))), "must not decrease"),
    ],
)
def test_misplaced_tool_outputs_are_refused(rollout: Rollout, said: str) -> None:
    with pytest.raises(RecordInvalid, match=said):
        rollout.check(max_tokens=7)


def test_an_ungraded_rollout_is_refused_instead_of_counted_as_zero() -> None:
    prompt = Prompt("p0", 0, (1,), "q", "a")
    graded = Group("g0", prompt, 1, (a_rollout(), a_rollout()), (Reward(0.0), Reward(1.0)))
    np.testing.assert_array_equal(graded.rewards_G, np.array([0, 1], np.float32))
    with pytest.raises(RecordInvalid, match="must be graded"):
        _ = replace(graded, rewards=(Reward(0.0), Reward(None, "timeout: slow"))).rewards_G
