"""The phases partition the wall time of a step."""

from __future__ import annotations

from specrl.coordinator.stopwatch import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_is_charged_to_exactly_one_phase() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.charge_to("generation"):
        clock.now += 5
    clock.now += 1
    with watch.charge_to("train"):
        clock.now += 10
    watch.split_phase("train", {"logprob": 3, "train": 6})
    with watch.charge_to("prepare"):
        clock.now += 2
    lap = watch.end_lap().phases
    assert lap.wall_seconds == 18
    assert (lap.generation, lap.data, lap.logprob, lap.train, lap.prepare) == (5, 2, 3, 6, 2)


def test_a_lap_starts_from_zero() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 4
    watch.end_lap()
    clock.now += 1
    assert watch.end_lap().phases.wall_seconds == 1


def test_a_trainer_that_reports_more_than_its_call_took_cannot_inflate_the_step() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.charge_to("train"):
        clock.now += 2
    watch.split_phase("train", {"logprob": 5, "train": 5})
    assert watch.end_lap().phases.wall_seconds == 2


def test_busy_cores_are_counted_by_phase_over_all_processes() -> None:
    clock = Clock()
    cores = Clock()
    watch = Stopwatch(clock, cores)
    with watch.charge_to("generation"):
        clock.now = clock.now + 4
        cores.now = cores.now + 6
    with watch.exclude_time():
        clock.now = clock.now + 4
        cores.now = cores.now + 8
    with watch.charge_to("train"):
        clock.now = clock.now + 2
        cores.now = cores.now + 4
    watch.split_phase("train", {"logprob": 0.5, "train": 1})
    assert (watch.busy_cores("generation"), watch.busy_cores("train"), watch.busy_cores("prepare")) == (1.5, 2, None)
    watch.end_lap()
    assert watch.busy_cores("generation") is None


def test_excluded_time_belongs_to_no_phase() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.exclude_time():
        clock.now += 60
    with watch.charge_to("train"):
        clock.now += 2
    assert watch.end_lap().phases.wall_seconds == 3


def test_generation_is_hidden_where_rollouts_are_in_flight_outside_of_the_phase_generation() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.charge_to("generation"):
        clock.now += 2  # no replica serves
        watch.set_rollouts(4)
        clock.now += 3
        watch.set_rollouts(1)
        clock.now += 4
        watch.set_rollouts(0)
        clock.now += 5  # the verifier still grades
    watch.set_rollouts(2)
    with watch.charge_to("train"):
        clock.now += 6
        watch.set_rollouts(0)
        clock.now += 7
    lap = watch.end_lap()
    assert (lap.phases.generation, lap.phases.train) == (14, 13)
    assert (lap.generation_under_way_s, lap.hidden_generation_s) == (3 + 4 + 6, 6)


def test_rollouts_that_stay_in_flight_count_in_every_lap_and_not_while_the_run_is_paused() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    watch.set_rollouts(1)
    clock.now += 1
    assert watch.end_lap().generation_under_way_s == 1
    clock.now += 2
    with watch.exclude_time():
        clock.now += 50
        watch.set_rollouts(2)
        clock.now += 10
    clock.now += 3
    lap = watch.end_lap()
    assert (lap.generation_under_way_s, lap.phases.wall_seconds) == (5, 5)


def test_only_the_phase_generation_waits_for_grading() -> None:
    """A verifier that hung was charged as slow generation, with the advice to start more replicas."""
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.charge_to("generation"):
        watch.set_rollouts(2)
        clock.now += 3
        watch.set_rollouts(0, only_grading=True)
        clock.now += 10
    with watch.charge_to("train"):
        clock.now += 5
    with watch.charge_to("generation"):
        clock.now += 1
        watch.set_rollouts(1)
    lap = watch.end_lap()
    assert (lap.phases.generation, lap.grading_s, lap.generation_under_way_s) == (14, 11, 3)
    assert watch.end_lap().grading_s == 0
