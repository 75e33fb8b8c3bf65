"""One suite for every Store: what is put is durable, what is trained is forgotten, the first batch of a step stays."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from specrl.coordinator.store import SqliteStore, Store, StoredRollout
from specrl.errors import StoreFailed

Open = Callable[[], Store]


@pytest.fixture(params=["sqlite"])
def reopen(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Opens the same store again, as a restarted coordinator does."""
    opened: list[Store] = []

    def open_again() -> Store:
        opened.append(SqliteStore(tmp_path / "store.db"))
        return opened[-1]

    yield open_again
    for store in opened:
        store.close()


def a_rollout(step: int = 1, index: int = 0, sample: int = 0, attempt: int = 0, data: bytes = b"x") -> StoredRollout:
    return StoredRollout(step, index, sample, attempt, data)


def test_what_was_put_is_there_after_a_restart(reopen: Open) -> None:
    store = reopen()
    store.put_rollout(a_rollout(sample=1, data=b"\x00\xff"))
    store.put_batch(1, b"batch")
    store.set_fact("validations", [{"accuracy": 0.5}])
    store.close()
    again = reopen()
    assert again.rollouts() == [a_rollout(sample=1, data=b"\x00\xff")]
    assert again.batch(1) == b"batch"
    assert again.fact("validations") == [{"accuracy": 0.5}]


def test_rollouts_come_back_in_stream_order(reopen: Open) -> None:
    store = reopen()
    for key in [(2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 0, 0)]:
        store.put_rollout(a_rollout(*key))
    assert [(r.step, r.index, r.sample) for r in store.rollouts()] == [(1, 0, 0), (1, 0, 1), (1, 1, 0), (2, 0, 0)]


def test_finishing_a_step_forgets_its_rollouts_and_keeps_its_batch(reopen: Open) -> None:
    store = reopen()
    store.put_rollout(a_rollout(step=1))
    store.put_rollout(a_rollout(step=2))
    store.put_batch(1, b"batch")
    store.finish_step(1, {"step": 1})
    assert [r.step for r in store.rollouts()] == [2]
    assert store.trained() == 1
    assert store.batch(1) == b"batch"
    store.forget_batches(1)
    assert store.batch(1) is None


def test_the_first_batch_of_a_step_stays(reopen: Open) -> None:
    store = reopen()
    store.put_batch(1, b"sent")
    store.put_batch(1, b"assembled again after a restart")
    assert store.batch(1) == b"sent"


def test_putting_a_slot_again_replaces_it(reopen: Open) -> None:
    store = reopen()
    store.put_rollout(a_rollout(data=b"old"))
    store.put_rollout(a_rollout(attempt=1, data=b"new"))
    assert store.rollouts() == [a_rollout(attempt=1, data=b"new")]


def test_reports_can_be_completed_later(reopen: Open) -> None:
    store = reopen()
    store.finish_step(1, {"step": 1})
    store.finish_step(2, {"step": 2})
    store.set_report(1, {"step": 1, "reward": 0.5})
    assert store.reports() == [{"step": 1, "reward": 0.5}, {"step": 2}]
    assert store.reports(after=1) == [{"step": 2}]


def test_an_unknown_fact_is_none_and_a_new_store_has_trained_nothing(reopen: Open) -> None:
    store = reopen()
    assert store.fact("nothing") is None
    assert store.trained() == 0
    assert store.batch(1) is None


def test_a_file_that_is_no_store_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    path.write_text("this is not a database, whatever its name says" * 100)
    with pytest.raises(StoreFailed, match=r"store\.db"):
        SqliteStore(path)
