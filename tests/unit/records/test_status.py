"""Counters of replicas add up and subtract."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.records import DrafterMetrics, SpeculationCounters

count = st.integers(0, 10**6)
counters = st.builds(SpeculationCounters, count, count, count, st.lists(count, max_size=5).map(tuple), count)


@given(counters, counters)
def test_counts_since_earlier_are_the_difference(earlier: SpeculationCounters, more: SpeculationCounters) -> None:
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
def test_the_sum_over_replicas_does_not_depend_on_their_order(
    a: SpeculationCounters, b: SpeculationCounters, c: SpeculationCounters
) -> None:
    assert a.plus(b).plus(c) == c.plus(b.plus(a))


def test_acceptance_has_only_positions_that_a_draft_can_have_reached() -> None:
    """An adaptive length of 1 was reported as `0.0 %` at the positions 2 and 3, which nothing had drafted."""
    short = SpeculationCounters(drafts=10, draft_tokens=10, accepted_tokens=7, accepted_per_position=(7, 0, 0))
    assert short.acceptance_by_position == [0.7]
    mixed = SpeculationCounters(drafts=10, draft_tokens=12, accepted_tokens=8, accepted_per_position=(7, 1, 0, 0))
    assert mixed.acceptance_by_position == [0.7, 0.1, 0.0]
    assert SpeculationCounters(accepted_per_position=(0, 0)).acceptance_by_position == []


def test_acceptance_length_counts_the_bonus_token() -> None:
    assert SpeculationCounters().acceptance_length is None
    assert SpeculationCounters(drafts=10).acceptance_length == 1
    assert SpeculationCounters(drafts=10, accepted_tokens=25).acceptance_length == 3.5


def test_shares_of_a_trained_drafter_are_of_all_drafts_as_those_of_a_step() -> None:
    """Those of an initialisation were conditional, and looked better than a step's."""
    trained = DrafterMetrics(loss=1.0, grad_norm=1.0, acceptance_per_position=(0.5, 0.5), seconds=1.0)
    assert (trained.accepted_per_position, trained.acceptance_length) == ((0.5, 0.25), 1.75)
