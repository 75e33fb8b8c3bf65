"""Only waits for a processor that other programs caused count: an answer cannot add any by competing with itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.rewards.sandbox.waiting import WaitSeconds, compute_stalls

THREAD = st.tuples(st.floats(0, 10), st.floats(0, 10))


@pytest.mark.parametrize(
    ("programs", "worker_s", "waited"),
    [
        ([], 0.0, WaitSeconds(0, 0)),
        ([[(1.0, 0.0)]], 0.0, WaitSeconds(0, 0)),
        ([[(0.25, 0.75)]], 0.0, WaitSeconds(0.75, 0)),
        ([[(0.0, 0.0), (0.25, 0.75)]], 0.0, WaitSeconds(0.75, 0)),
        ([[(0.0, 1.0), (0.0, 1.0)]], 0.0, WaitSeconds(1, 0)),
        ([[(0.25, 0.75)] * 4], 0.0, WaitSeconds(0, 0)),  # four that share one processor
        ([[(1.0, 0.0), (0.5, 0.5), (0.5, 0.5)]], 0.0, WaitSeconds(0, 0)),  # three that share two
        ([[(0.125, 0.875)] * 4], 0.0, WaitSeconds(0.5, 0)),  # four that share half of one
        ([[(0.0, 0.25)], [(0.0, 0.25)]], 0.0, WaitSeconds(0.5, 0)),  # tests and their answer, by turns
        ([[(0.0, 0.25)]], 0.25, WaitSeconds(0.25, 0.25)),
        ([[(1.0, 0.0)]], 0.75, WaitSeconds(0, 0)),  # a worker that waits for its own program
        ([[(0.0, 0.75)]], 0.75, WaitSeconds(0.75, 0.25)),
    ],
)
def test_only_waits_caused_by_other_programs_count(
    programs: list[list[tuple[float, float]]], worker_s: float, waited: WaitSeconds
) -> None:
    assert compute_stalls(1.0, programs, worker_s) == waited


@given(programs=st.lists(st.lists(THREAD, max_size=5), max_size=3), worker_s=st.floats(0, 10))
def test_waits_never_exceed_the_elapsed_time(programs: list[list[tuple[float, float]]], worker_s: float) -> None:
    waited = compute_stalls(1.0, programs, worker_s)
    assert waited.programs_s >= 0.0
    assert waited.worker_s >= 0.0
    assert waited.programs_s + waited.worker_s <= 1.0
