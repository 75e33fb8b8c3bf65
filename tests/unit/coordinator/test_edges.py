"""No step counts among both the first and the last steps of a run."""

from __future__ import annotations

import pytest

from specrl.formats.statistics.edges import EdgeMeans, compare_edges, compare_first_with_last


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, EdgeMeans(None, None, 0)),
        (1, EdgeMeans(None, 0.0, 0)),
        (2, EdgeMeans(0.0, 1.0, 1)),
        (3, EdgeMeans(0.0, 2.0, 1)),
        (9, EdgeMeans(1.5, 6.5, 4)),
        (10, EdgeMeans(2.0, 7.0, 5)),
        (40, EdgeMeans(2.0, 37.0, 5)),
    ],
)
def test_no_step_is_at_both_ends(count: int, expected: EdgeMeans) -> None:
    """Below 10 steps the first five and the last five overlapped: "0.485 -> 0.485 (+0.000)" for 0.650 ... 0.300."""
    assert compare_edges([float(step) for step in range(count)]) == expected


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (0, EdgeMeans(None, None, 0)),
        (1, EdgeMeans(None, 0.0, 0)),
        (2, EdgeMeans(0.0, 1.0, 1)),
        (4, EdgeMeans(0.0, 2.0, 1)),
        (6, EdgeMeans(0.0, 3.0, 1)),
        (40, EdgeMeans(0.0, 37.0, 1)),
    ],
)
def test_the_first_acceptance_length_is_not_among_the_last(count: int, expected: EdgeMeans) -> None:
    assert compare_first_with_last([float(step) for step in range(count)]) == expected
