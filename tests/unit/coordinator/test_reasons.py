"""Failures are counted by reason in bounded memory."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.formats.reasons import (
    LONGEST_REASON,
    OTHERS,
    REASONS_KEPT,
    ReasonCounts,
    format_given_up,
    format_reasons,
)


@settings(max_examples=25)  # long texts are slow to draw
@given(st.lists(st.text(max_size=3 * LONGEST_REASON)))
def test_all_failures_are_counted_and_few_reasons_are_named(reasons: list[str]) -> None:
    found = ReasonCounts(reasons)
    assert found.total_failures == sum(found.by_reason.values()) == len(reasons)
    assert len(found.by_reason) <= REASONS_KEPT + 1
    assert all(len(name.splitlines()) == 1 and len(name) <= LONGEST_REASON for name in found.by_reason)


def test_the_first_reasons_are_named_and_the_rest_is_counted() -> None:
    counts = ReasonCounts([f"reason {number}" for number in range(12)] + ["reason 0"]).by_reason
    assert counts["reason 0"] == 2
    assert counts[OTHERS] == 12 - REASONS_KEPT
    assert format_reasons(counts) == "reason 0 (2), reason 1 (1), reason 2 (1), other reasons (9)"
    assert format_reasons({}) == ""


def test_prompts_given_up_have_their_number_and_reason() -> None:
    assert format_given_up({"KeyError at my_rewards.py:12": 2}) == (
        "2 prompts given up: KeyError at my_rewards.py:12 (2)"
    )
    assert format_given_up({"killed": 1}) == "1 prompt given up: killed (1)"
