"""The work queue: each key once, by one worker at a time, later after every failure. The clock is a parameter."""

from __future__ import annotations

import threading

from hypothesis import given, settings
from hypothesis import strategies as st

from specrl_operator.queue import FIRST_DELAY_S, LAST_DELAY_S, Key, WorkQueue

A, B = ("rl", "a"), ("rl", "b")


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def due(queue: WorkQueue) -> Key | None:
    """What a worker would get now, without waiting."""
    return queue.take(waits=False)


def test_a_key_that_is_added_twice_is_taken_once() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    queue.add(A)
    assert due(queue) == A
    assert due(queue) is None


def test_a_key_that_is_worked_on_is_taken_again_afterwards_and_not_before() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    assert due(queue) == A
    queue.add(A)
    assert due(queue) is None
    queue.done(A, failed=False, after_s=None)
    assert due(queue) == A
    queue.done(A, failed=False, after_s=None)
    assert due(queue) is None


def test_a_key_that_falls_due_while_it_is_worked_on_waits_for_its_worker() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    assert due(queue) == A
    queue.add(A, 5)
    clock.now = 10
    assert due(queue) is None
    queue.done(A, failed=False, after_s=None)
    assert due(queue) == A


def test_the_earliest_of_several_times_counts() -> None:
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


def test_failures_come_back_after_pauses_that_double_up_to_a_bound_and_a_success_ends_them() -> None:
    clock = Clock()
    queue = WorkQueue(clock)
    queue.add(A)
    pauses = []
    for _ in range(12):
        assert due(queue) == A
        queue.done(A, failed=True, after_s=None)
        before = clock.now
        while queue.depth() == 0:
            clock.now += 0.5
        pauses.append(clock.now - before)
    assert pauses[:4] == [FIRST_DELAY_S, 2.0, 4.0, 8.0]
    assert pauses[-1] == LAST_DELAY_S
    assert queue.retries == 12
    assert due(queue) == A
    queue.done(A, failed=False, after_s=None)
    queue.add(A)
    assert due(queue) == A
    queue.done(A, failed=True, after_s=None)
    clock.now += FIRST_DELAY_S
    assert due(queue) == A


def test_a_change_does_not_wait_for_the_pause_of_an_earlier_failure() -> None:
    queue = WorkQueue(Clock())
    queue.add(A)
    assert due(queue) == A
    queue.done(A, failed=True, after_s=None)
    assert due(queue) is None
    queue.add(A)
    assert due(queue) == A


@settings(max_examples=100)
@given(st.lists(st.tuples(st.sampled_from(["add", "take", "ok", "fail", "tick"]), st.integers(0, 20)), max_size=60))
def test_no_key_is_worked_on_twice_at_once_and_none_is_forgotten(steps: list[tuple[str, int]]) -> None:
    clock = Clock()
    queue, working, owed = WorkQueue(clock), [], set()
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
    clock.now += 2 * LAST_DELAY_S
    found = set()
    while (taken := due(queue)) is not None:
        found.add(taken)
    assert owed <= found


def test_workers_that_wait_are_woken_by_work_and_by_the_end() -> None:
    queue = WorkQueue(Clock())
    taken: list[Key | None] = []
    woken = threading.Event()

    def work() -> None:
        taken.append(queue.take())
        woken.set()
        taken.append(queue.take())

    worker = threading.Thread(target=work, daemon=True)
    worker.start()
    queue.add(A)
    assert woken.wait(60)
    queue.close()
    worker.join(60)
    assert taken == [A, None]
