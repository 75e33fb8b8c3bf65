"""Counters of replicas add up and subtract."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.records import SpeculationCounters

count = st.integers(0, 10**6)
counters = st.builds(SpeculationCounters, count, count, count, st.lists(count, max_size=5).map(tuple), count)


@given(counters, counters)
def test_what_was_added_is_what_came_since(earlier: SpeculationCounters, more: SpeculationCounters) -> None:
    since = earlier.plus(more).minus(earlier)
    width = len(since.accepted_per_position)
    assert since.accepted_per_position == (more.accepted_per_position + (0,) * width)[:width]
    assert (since.drafts, since.draft_tokens, since.accepted_tokens, since.generated_tokens) == (
        more.drafts,
        more.draft_tokens,
        more.accepted_tokens,
        more.generated_tokens,
    )


@given(counters, counters, counters)
def test_the_sum_over_replicas_has_no_order(
    a: SpeculationCounters, b: SpeculationCounters, c: SpeculationCounters
) -> None:
    assert a.plus(b).plus(c) == c.plus(b.plus(a))


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert SpeculationCounters().acceptance_length is None
    assert SpeculationCounters(drafts=10).acceptance_length == 1
    assert SpeculationCounters(drafts=10, accepted_tokens=25).acceptance_length == 3.5
