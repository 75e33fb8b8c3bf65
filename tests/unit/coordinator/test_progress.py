"""How far the stream is settled, whatever overtook what."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from specrl.coordinator.progress import Progress


@given(order=st.permutations(range(12)), per_step=st.sampled_from([1, 2, 3, 4]))
def test_exactly_what_steps_took_is_settled(order: list[int], per_step: int) -> None:
    progress, taken = Progress(), set[int]()
    for first in range(0, 12, per_step):
        progress = progress.after(order[first : first + per_step])
        taken.update(order[first : first + per_step])
        assert {position for position in range(20) if progress.is_settled(position)} == taken
        assert progress.cursor not in taken
        assert all(position > progress.cursor for position in progress.ahead)
    assert progress == Progress(12 // per_step, 12)


def test_a_report_without_a_cursor_is_of_a_run_in_order() -> None:
    assert Progress.reported(3, None, [], 4) == Progress(3, 12)
    assert Progress.reported(3, 10, [12, 13], 4) == Progress(3, 10, frozenset({12, 13}))
