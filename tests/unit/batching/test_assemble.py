"""A batch holds every rollout of its groups, in stream order, and none beyond the policy lag bound."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.batching import assemble_batch
from specrl.errors import RecordInvalid
from specrl.records import FinishReason, Group, Prompt, Reward, Rollout, VersionSpan
from specrl.spec import RunSpec, parse_spec


def a_spec(prompts: int = 2, size: int = 2, lag: int = 1, **loss: Any) -> RunSpec:
    return parse_spec(
        {
            "name": "test",
            "model": {"path": "policy"},
            "prompts": {"source": {"generated": {"family": "ledger", "count": 8}}},
            "rewards": {"exact": {}},
            "generation": {"sampling": {"maxTokens": 16}},
            "trainer": {"optimizer": {"learningRate": "1e-3"}, "loss": loss},
            "schedule": {"steps": 9, "promptsPerStep": prompts, "groupSize": size, "maxPolicyLag": lag},
        }
    )


def a_group(position: int, rewards: tuple[float | None, ...] = (0, 1), step: int = 5, version: int = 4) -> Group:
    name = f"g{position}"
    rollouts = tuple(
        Rollout(
            rollout_id=f"{name}/{index}",
            group_id=name,
            sample_index=index,
            token_ids_T=np.array([index, position], np.int32),
            sampler_logprobs_T=np.zeros(2, np.float32),
            versions=(VersionSpan(version, 0, 2),),
            finish_reason=FinishReason.STOP,
            replica_id="r",
            text="",
            seconds=0.0,
        )
        for index in range(len(rewards))
    )
    prompt = Prompt(f"p{position}", position, (position, 1), "q", "a")
    graded = tuple(Reward(value, "" if value is not None else "crash: lost") for value in rewards)
    return Group(name, prompt, step, rollouts, graded)


def aged(group: Group, *versions: int) -> Group:
    """Return the group with its first rollout sampled under these versions, one token each."""
    spans = tuple(VersionSpan(version, index, index + 1) for index, version in enumerate(versions))
    return replace(group, rollouts=(replace(group.rollouts[0], versions=spans), *group.rollouts[1:]))


@given(
    positions=st.lists(st.integers(0, 10**6), min_size=1, max_size=8, unique=True),
    size=st.integers(2, 5),
    lag=st.integers(0, 3),
    data=st.data(),
)
def test_batch_holds_every_rollout_once_in_stream_order(
    positions: list[int], size: int, lag: int, data: st.DataObject
) -> None:
    versions = [data.draw(st.integers(4 - lag, 4)) for _ in positions]
    groups = [
        a_group(position, tuple(float(i == 0) for i in range(size)), version=version)
        for position, version in zip(positions, versions, strict=True)
    ]
    batch = assemble_batch(5, groups, a_spec(len(positions), size, lag))
    assert batch.step == 5
    expected = [rollout.rollout_id for position in sorted(positions) for rollout in a_group_named(groups, position)]
    assert [item.rollout.rollout_id for item in batch.rollouts] == expected
    assert max(batch.policy_lags) <= lag
    assert [item.prompt_token_ids[0] for item in batch.rollouts] == [p for p in sorted(positions) for _ in range(size)]


def a_group_named(groups: list[Group], position: int) -> tuple[Rollout, ...]:
    return next(group.rollouts for group in groups if group.prompt.position == position)


def test_advantages_are_computed_per_group() -> None:
    batch = assemble_batch(5, [a_group(7, (1, 1)), a_group(3, (0, 1))], a_spec())
    assert [item.advantage for item in batch.rollouts] == [-0.5, 0.5, 0.0, 0.0]
    normalised = assemble_batch(5, [a_group(7, (1, 1)), a_group(3, (0, 1))], a_spec(advantages="GroupStandardised"))
    expected = 0.5 / (0.5**0.5 + 1e-4)
    assert [item.advantage for item in normalised.rollouts] == pytest.approx([-expected, expected, 0, 0])


def test_a_rollout_at_the_lag_bound_is_accepted_and_one_beyond_it_is_rejected() -> None:
    within = aged(a_group(0), 3, 4)
    beyond = aged(a_group(0), 4, 2)
    assert assemble_batch(5, [within, a_group(1)], a_spec(lag=1)).policy_lags == [1, 0, 0, 0]
    with pytest.raises(RecordInvalid, match="policy lag must be <= maxPolicyLag=1, got lag=2 for g0/0"):
        assemble_batch(5, [beyond, a_group(1)], a_spec(lag=1))
    with pytest.raises(RecordInvalid, match="maxPolicyLag=0, got lag=1"):
        assemble_batch(5, [within, a_group(1)], a_spec(lag=0))


def test_a_rollout_of_a_future_version_is_rejected() -> None:
    with pytest.raises(RecordInvalid, match="policy versions must be <= 4, got 5"):
        assemble_batch(5, [aged(a_group(0), 4, 5), a_group(1)], a_spec())


def swapped(group: Group) -> Group:
    return replace(group, rollouts=group.rollouts[::-1])


def of_another(group: Group) -> Group:
    return replace(group, rollouts=(replace(group.rollouts[0], group_id="other"), *group.rollouts[1:]))


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda group: replace(group, target_step=6), "target_step must be 5"),
        (lambda group: replace(group, rollouts=group.rollouts[:1]), "samples must be 0 to 1 in order"),
        (lambda group: replace(group, rollouts=group.rollouts * 2), "samples must be 0 to 1 in order"),
        (swapped, "samples must be 0 to 1 in order"),
        (lambda group: replace(group, rewards=group.rewards[:1]), "rewards must be 2"),
        (of_another, "rollouts must belong to the group"),
        (aged, "must name its policy versions"),
        (lambda group: a_group(0, (1, None)), "every rollout must be graded"),
        (lambda group: a_group(0, (1, float("nan"))), "rewards must be finite"),
        (lambda group: a_group(1), "must differ in id and position"),
    ],
)
def test_an_invalid_group_is_rejected(spoil: Callable[[Group], Group], said: str) -> None:
    with pytest.raises(RecordInvalid, match=said):
        assemble_batch(5, [spoil(a_group(0)), a_group(1)], a_spec())


@pytest.mark.parametrize("count", [0, 1, 3])
def test_a_step_needs_all_of_its_groups(count: int) -> None:
    with pytest.raises(RecordInvalid, match=f"minus the failed prompts, 2, got {count}"):
        assemble_batch(5, [a_group(position) for position in range(count)], a_spec())


def test_a_failed_prompt_removes_only_its_own_group() -> None:
    batch = assemble_batch(5, [a_group(3)], a_spec(), failed=[5])
    assert batch.positions == (3, 5)
    assert [item.rollout.rollout_id for item in batch.rollouts] == ["g3/0", "g3/1"]
    with pytest.raises(RecordInvalid, match="minus the failed prompts, 1, got 2;"):
        assemble_batch(5, [a_group(3), a_group(4)], a_spec(), failed=[5])


def test_a_group_without_signal_is_dropped_and_its_position_is_kept() -> None:
    groups = [a_group(7, (1, 1)), a_group(3, (0, 1)), a_group(5, (0, 0))]
    left_out = assemble_batch(5, groups, a_spec(3, withoutSignal="LeaveOut"))
    assert [item.rollout.group_id for item in left_out.rollouts] == ["g3", "g3"]
    assert left_out.positions == (3, 5, 7)
    assert [item.rollout.group_id for item in assemble_batch(5, groups, a_spec(3)).rollouts] == [
        name for name in ("g3", "g5", "g7") for _ in range(2)
    ]


def test_shaped_rewards_are_kept_and_used_for_advantages() -> None:
    group = a_group(0, (1, 1))
    longer = replace(group.rollouts[1], token_ids_T=np.zeros(14, np.int32), sampler_logprobs_T=np.zeros(14, np.float32))
    group = replace(group, rollouts=(group.rollouts[0], longer))
    batch = assemble_batch(5, [group], a_spec(1, overlong={"bufferTokens": 4, "penalty": "0.5"}))
    assert [item.reward for item in batch.rollouts] == [1, 0.75]
    assert [item.advantage for item in batch.rollouts] == [0.125, -0.125]
    left_out = assemble_batch(5, [group], a_spec(1, overlong={"bufferTokens": 4}, withoutSignal="LeaveOut"))
    assert left_out.rollouts == (), "the answers are equally right, whatever their lengths"


def test_batch_standardised_advantages_use_all_groups() -> None:
    batch = assemble_batch(5, [a_group(0, (1, 1)), a_group(1, (0, 0))], a_spec(2, advantages="BatchStandardised"))
    assert [round(item.advantage, 3) for item in batch.rollouts] == [0.866, 0.866, -0.866, -0.866]
