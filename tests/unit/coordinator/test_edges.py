"""What a run began and ended with is of different steps."""

from __future__ import annotations

import pytest

from specrl.coordinator.edges import Edges, compare_edges, compare_first_with_last


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, Edges(None, None, 0)),
        (1, Edges(None, 0.0, 0)),
        (2, Edges(0.0, 1.0, 1)),
        (3, Edges(0.0, 2.0, 1)),
        (9, Edges(1.5, 6.5, 4)),
        (10, Edges(2.0, 7.0, 5)),
        (40, Edges(2.0, 37.0, 5)),
    ],
)
def test_no_step_is_at_both_ends(count: int, expected: Edges) -> None:
    """Below 10 steps the first five and the last five overlapped: "0.485 -> 0.485 (+0.000)" after 0.650 ... 0.300."""
    assert compare_edges([float(step) for step in range(count)]) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, Edges(None, None, 0)),
        (1, Edges(None, 0.0, 0)),
        (2, Edges(0.0, 1.0, 1)),
        (4, Edges(0.0, 2.0, 1)),
        (6, Edges(0.0, 3.0, 1)),
        (40, Edges(0.0, 37.0, 1)),
    ],
)
def test_the_first_acceptance_length_is_none_of_the_last(count: int, expected: Edges) -> None:
    assert compare_first_with_last([float(step) for step in range(count)]) == expected
