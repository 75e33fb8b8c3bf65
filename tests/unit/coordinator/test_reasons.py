"""Reasons of failures, counted: a few by name, however many there are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.coordinator.reasons import (
    LONGEST_REASON,
    OTHERS,
    REASONS_KEPT,
    Reasons,
    given_up_in_words,
    reasons_in_words,
)


@settings(max_examples=25)  # long texts are slow to draw
@given(st.lists(st.text(max_size=3 * LONGEST_REASON)))
def test_all_are_counted_and_few_are_named(reasons: list[str]) -> None:
    found = Reasons(reasons)
    assert found.total == sum(found.counts.values()) == len(reasons)
    assert len(found.counts) <= REASONS_KEPT + 1
    assert all(len(name.splitlines()) == 1 and len(name) <= LONGEST_REASON for name in found.counts)


def test_the_first_reasons_are_named_and_the_rest_is_counted() -> None:
    counts = Reasons([f"reason {number}" for number in range(12)] + ["reason 0"]).counts
    assert counts["reason 0"] == 2
    assert counts[OTHERS] == 12 - REASONS_KEPT
    assert reasons_in_words(counts) == "reason 0 (2), reason 1 (1), reason 2 (1), other reasons (9)"
    assert reasons_in_words({}) == ""


def test_prompts_given_up_have_their_number_and_reason() -> None:
    assert given_up_in_words({"KeyError at my_rewards.py:12": 2}) == (
        "2 prompts given up: KeyError at my_rewards.py:12 (2)"
    )
    assert given_up_in_words({"killed": 1}) == "1 prompt given up: killed (1)"
