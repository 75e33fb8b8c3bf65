"""The work queue: deduplication, one worker per key, backoff after failures. The clock is a parameter."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from specrl_operator.cluster.queue import MAX_BACKOFF_S, MIN_BACKOFF_S, JobKey, WorkQueue

A = ("rl", "a")
B = ("rl", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(queue: WorkQueue) -> JobKey | None:
    """Return the key that a worker would get now, without waiting."""
    return queue.get(waits=False)


def test_a_key_that_is_added_twice_is_returned_once() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    queue.add(A)
    assert due(queue) == A
    assert due(queue) is None


def test_a_key_added_while_in_progress_is_returned_again_after_done() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    assert due(queue) == A
    queue.add(A)
    assert due(queue) is None
    queue.done(A, failed=False, after_s=None)
    assert due(queue) == A
    queue.done(A, failed=False, after_s=None)
    assert due(queue) is None


def test_a_key_that_becomes_due_while_in_progress_waits_for_done() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert due(queue) == A
    queue.add(A, 5)
    clock.now = 10
    assert due(queue) is None
    queue.done(A, failed=False, after_s=None)
    assert due(queue) == A


def test_a_key_is_due_at_the_earliest_of_its_times() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A, 100)
    queue.add(A, 10)
    queue.add(A, 50)
    clock.now = 10
    assert due(queue) == A
    queue.done(A, failed=False, after_s=None)
    clock.now = 1000
    assert due(queue) is None


def test_failed_keys_are_retried_with_bounded_backoff_that_a_success_resets() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    pauses = []
    for _ in range(12):
        assert due(queue) == A
        queue.done(A, failed=True, after_s=None)
        before = clock.now
        while queue.count_due() == 0:
            clock.now += 0.5
        pauses.append(clock.now - before)
    assert pauses[:4] == [MIN_BACKOFF_S, 2.0, 4.0, 8.0]
    assert pauses[-1] == MAX_BACKOFF_S
    assert due(queue) == A
    queue.done(A, failed=False, after_s=None)
    queue.add(A)
    assert due(queue) == A
    queue.done(A, failed=True, after_s=None)
    clock.now += MIN_BACKOFF_S
    assert due(queue) == A


def test_a_change_does_not_wait_for_the_backoff_of_an_earlier_failure() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    assert due(queue) == A
    queue.done(A, failed=True, after_s=None)
    assert due(queue) is None
    queue.add(A)
    assert due(queue) == A


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["add", "take", "ok", "fail", "tick"]), st.integers(0, 20)), max_size=60))
def test_no_key_is_in_progress_twice_and_none_is_lost(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    working = []
    owed = set()
    for what, number in steps:
        key = (A, B)[number % 2]
        if what == "add":
            queue.add(key, float(number))
            owed.add(key)
        elif what == "take" and (taken := due(queue)) is not None:
            assert taken not in working
            working.append(taken)
            owed.discard(taken)
        elif what in ("ok", "fail") and working:
            done = working.pop()
            queue.done(done, failed=what == "fail", after_s=None)
            if what == "fail":
                owed.add(done)
        elif what == "tick":
            clock.now += number
    for key in working:
        queue.done(key, failed=False, after_s=None)
    clock.now += 2 * MAX_BACKOFF_S
    found = set()
    while (taken := due(queue)) is not None:
        found.add(taken)
    assert owed <= found


def test_waiting_workers_are_woken_by_a_key_and_by_close() -> None:
    queue = WorkQueue(Clock())
    taken: list[JobKey | None] = []
    woken = threading.Event()

    def work() -> None:
        taken.append(queue.get())
        woken.set()
        taken.append(queue.get())

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    queue.add(A)
    assert woken.wait(60)
    queue.close()
    worker.join(60)
    assert taken == [A, None]
