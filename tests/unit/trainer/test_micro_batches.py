"""Micro-batches hold every rollout once, none is too large, and ranks do equal work."""

from hypothesis import given
from hypothesis import strategies as st

from specrl.trainer.micro_batches import deal_rollouts, plan_micro_batches

LENGTHS = st.lists(st.integers(2, 300), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 6))
def test_every_rollout_is_dealt_once(lengths: list[int], ranks: int) -> None:
    shares = deal_rollouts(range(len(lengths)), lengths, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 6))
def test_ranks_differ_by_one_rollout_at_most(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for i in share) for share in deal_rollouts(range(len(lengths)), lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(1, 4), st.integers(2, 500), st.integers(1, 3))
def test_micro_batches_hold_every_rollout_once_and_fit(
    lengths: list[int], ranks: int, max_tokens: int, multiple: int
) -> None:
    batches = plan_micro_batches(lengths, ranks, max_tokens, multiple)
    assert sorted(index for rank in batches for batch in rank for index in batch) == list(range(len(lengths)))
    assert len({len(rank) for rank in batches}) == 1
    assert len(batches[0]) % multiple == 0
    for batch in (batch for rank in batches for batch in rank):
        assert len(batch) <= 1 or sum(lengths[i] for i in batch) <= max_tokens


@given(st.lists(st.integers(2, 100), min_size=1, max_size=60), st.integers(200, 500))
def test_micro_batches_are_filled(lengths: list[int], max_tokens: int) -> None:
    """If rollouts are at most half as long as a micro-batch, all micro-batches but one are more than half full."""
    assert len(plan_micro_batches(lengths, 1, max_tokens)[0]) <= 2 * sum(lengths) // max_tokens + 1


def test_dealing_is_deterministic_for_equal_lengths() -> None:
    assert deal_rollouts(range(4), [5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
