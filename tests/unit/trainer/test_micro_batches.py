"""Dealing and cutting: nothing is lost, nothing is too large."""

from hypothesis import given
from hypothesis import strategies as st

from specrl.trainer.micro_batches import cut, deal

LENGTHS = st.lists(st.integers(2, 300), min_size=1, max_size=40)


@given(LENGTHS, st.integers(1, 6))
def test_every_rollout_is_dealt_once(lengths: list[int], ranks: int) -> None:
    shares = deal(lengths, ranks)
    assert len(shares) == ranks
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))


@given(LENGTHS, st.integers(1, 6))
def test_ranks_differ_by_one_rollout_at_most(lengths: list[int], ranks: int) -> None:
    loads = [sum(lengths[i] for i in share) for share in deal(lengths, ranks)]
    assert max(loads) - min(loads) <= max(lengths)


@given(LENGTHS, st.integers(2, 500))
def test_micro_batches_hold_every_rollout_once_and_fit(lengths: list[int], max_tokens: int) -> None:
    batches = cut(range(len(lengths)), lengths, max_tokens)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or max(lengths[i] for i in batch) * len(batch) <= max_tokens


def test_dealing_is_deterministic_for_equal_lengths() -> None:
    assert deal([5, 5, 5, 5], 2) == [[0, 2], [1, 3]]
