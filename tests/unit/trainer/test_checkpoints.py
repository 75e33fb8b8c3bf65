"""Which checkpoints are complete, which are deleted, and which one is loaded."""

import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from specrl.errors import CheckpointInvalid, MemoryTooSmall
from specrl.trainer.checkpointing import checkpoints


def a_checkpoint(run: Path, step: int, *, is_complete: bool = True) -> Path:
    path = checkpoints.step_directory(run, step)
    path.mkdir(parents=True)
    if is_complete:
        (path / checkpoints.STATE).write_text("{}")
    checkpoints.metrics_file(run, step).write_bytes(b"")
    return path


def test_run_without_checkpoints_has_no_newest(tmp_path: Path) -> None:
    assert checkpoints.find_newest(tmp_path) is None


def test_newest_is_by_step_and_complete(tmp_path: Path) -> None:
    a_checkpoint(tmp_path, 9)
    expected = a_checkpoint(tmp_path, 1_000_000)
    a_checkpoint(tmp_path, 2_000_000, is_complete=False)
    checkpoints.scratch_directory(checkpoints.step_directory(tmp_path, 3_000_000)).mkdir()
    assert checkpoints.find_newest(tmp_path) == expected


def test_prune_keeps_the_newest_and_removes_half_written_ones(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        a_checkpoint(tmp_path, step)
    checkpoints.scratch_directory(checkpoints.step_directory(tmp_path, 4)).mkdir()
    checkpoints.prune_superseded(tmp_path, checkpoints.Keeping(2))
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["step-000002", "step-000002.metrics.pb", "step-000003", "step-000003.metrics.pb"]


@given(
    st.sets(st.integers(0, 200), max_size=20).map(sorted),
    st.integers(1, 5),
    st.none() | st.sampled_from([1, 5, 10]),
    st.integers(0, 200),
)
def test_what_is_superseded_is_neither_newest_nor_a_milestone_nor_the_best(
    steps: list[int], keep: int, every: int | None, best: int
) -> None:
    gone = checkpoints.find_superseded(steps, checkpoints.Keeping(keep, every, best))
    left = [step for step in steps if step not in gone]
    assert set(steps[-keep:]) <= set(left)
    assert all(step > 0 and (step == best or (every is not None and step % every == 0)) for step in left[:-keep])
    assert not [step for step in gone if step and (step == best or (every is not None and step % every == 0))]


def load_all_but(*unreadable: Path) -> tuple[list[Path | None], Callable[[Path | None], None]]:
    """Return the list of tried checkpoints, and a load function that rejects the unreadable ones."""
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
    assert checkpoints.find_newest(tmp_path) == first
    assert (tmp_path / "checkpoints" / "unreadable-step-000003" / checkpoints.STATE).is_file()


def test_a_refusal_is_logged_at_once_and_keeps_nothing_alive_that_the_load_had_made(tmp_path: Path) -> None:
    """The models of the refused checkpoint stayed in memory beside those of the next one, whose error was the only one.

    So a model of more than half of the memory ended with MemoryTooSmall, and nothing named the damaged checkpoint.
    """

    class Models:
        pass

    made: list[weakref.ref[Models]] = []
    a_checkpoint(tmp_path, 1)
    refused = a_checkpoint(tmp_path, 2)

    def load(path: Path | None) -> None:
        models = Models()
        assert [ref for ref in made if ref() is not None] == []
        made.append(weakref.ref(models))
        if path == refused:
            raise CheckpointInvalid(f"{models} must fit, got {path}; delete it")
        raise MemoryTooSmall("no memory left; use a larger machine")

    with structlog.testing.capture_logs() as events, pytest.raises(MemoryTooSmall):
        checkpoints.load_newest(tmp_path, load)
    assert [(event["event"], event["path"]) for event in events] == [("checkpoint_refused", str(refused))]
    assert len(made) == 2


def test_run_whose_checkpoints_cannot_be_read_does_not_begin_anew(tmp_path: Path) -> None:
    first = a_checkpoint(tmp_path, 1)
    second = a_checkpoint(tmp_path, 2)
    tried, load = load_all_but(first, second)
    with pytest.raises(CheckpointInvalid, match="step-000002"):
        checkpoints.load_newest(tmp_path, load)
    assert tried == [second, first]
    assert [path for _, path in checkpoints.list_complete(tmp_path)] == [first, second], "nothing is set aside"


def test_run_without_checkpoints_loads_the_initial_model(tmp_path: Path) -> None:
    tried, load = load_all_but()
    assert checkpoints.load_newest(tmp_path, load) is None
    assert tried == [None]
