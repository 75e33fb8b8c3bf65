"""Which checkpoints count."""

from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import CheckpointInvalid
from specrl.trainer import checkpoints


def a_checkpoint(run: Path, step: int, *, is_complete: bool = True) -> Path:
    path = checkpoints.directory(run, step)
    path.mkdir(parents=True)
    if is_complete:
        (path / checkpoints.STATE).write_text("{}")
    checkpoints.metrics_file(run, step).write_bytes(b"")
    return path


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoints.newest(tmp_path) is None


def test_newest_is_by_step_and_complete(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 9)
    expected = a_checkpoint(tmp_path, 1_000_000)
    a_checkpoint(tmp_path, 2_000_000, is_complete=False)
    checkpoints.temporary(checkpoints.directory(tmp_path, 3_000_000)).mkdir()
    assert checkpoints.newest(tmp_path) == expected


def test_prune_keeps_the_newest_and_removes_half_written_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)
    checkpoints.temporary(checkpoints.directory(tmp_path, 4)).mkdir()
    checkpoints.prune(tmp_path, keep=2)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000002.metrics.pb", "step-000003", "step-000003.metrics.pb"]


@given(
    st.sets(st.integers(0, 200), max_size=20).map(sorted), st.integers(1, 5), st.none() | st.sampled_from([1, 5, 10])
)
def test_what_is_superseded_is_neither_newest_nor_a_milestone(steps: list[int], keep: int, every: int | None) -> None:
    gone = checkpoints.superseded(steps, keep, every)
    left = [step for step in steps if step not in gone]
    assert set(steps[-keep:]) <= set(left)
    assert all(step % every == 0 and step > 0 for step in left[:-keep] if every is not None)
    assert every is not None or len(left) == min(keep, len(steps))
    assert not [step for step in gone if every is not None and step and step % every == 0]


def load_all_but(*unreadable: Path) -> tuple[list[Path | None], Callable[[Path | None], None]]:
    """What was tried, and a backend's `load` that cannot read some."""
    tried: list[Path | None] = []

    def load(path: Path | None) -> None:
        tried.append(path)
        if path in unreadable:
            raise CheckpointInvalid(f"a checkpoint must be complete, got {path}; delete it")

    return tried, load


def test_checkpoint_that_cannot_be_read_is_set_aside_for_the_one_before(tmp_path: Path) -> None:
    first, second, third = (a_checkpoint(tmp_path, step) for step in (1, 2, 3))
    tried, load = load_all_but(second, third)
    assert checkpoints.load_newest(tmp_path, load) == first
    assert tried == [third, second, first]
    assert checkpoints.newest(tmp_path) == first
    assert (tmp_path / "checkpoints" / "unreadable-step-000003" / checkpoints.STATE).is_file()


def test_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    first, second = a_checkpoint(tmp_path, 1), a_checkpoint(tmp_path, 2)
    tried, load = load_all_but(first, second)
    with pytest.raises(CheckpointInvalid, match="step-000002"):
        checkpoints.load_newest(tmp_path, load)
    assert tried == [second, first]
    assert [path for _, path in checkpoints.complete(tmp_path)] == [first, second], "nothing is set aside"


def test_run_without_checkpoints_loads_the_initial_model(tmp_path: Path) -> None:
    tried, load = load_all_but()
    assert checkpoints.load_newest(tmp_path, load) is None
    assert tried == [None]
