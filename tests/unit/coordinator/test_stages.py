"""Stages partition a step's wall time."""

from __future__ import annotations

from specrl.coordinator.stages import Stopwatch


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_every_second_is_charged_to_exactly_one_stage() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.stage("generation"):
        clock.now += 5
    clock.now += 1
    with watch.stage("train"):
        clock.now += 10
    watch.split("train", {"logprob": 3, "train": 6})
    with watch.stage("prepare"):
        clock.now += 2
    lap = watch.lap()
    assert lap.total == 18
    assert (lap.generation, lap.data, lap.logprob, lap.train, lap.prepare) == (5, 2, 3, 6, 2)


def test_a_lap_starts_from_zero() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 4
    watch.lap()
    clock.now += 1
    assert watch.lap().total == 1


def test_a_trainer_that_reports_more_than_its_call_took_cannot_inflate_the_step() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    with watch.stage("train"):
        clock.now += 2
    watch.split("train", {"logprob": 5, "train": 5})
    assert watch.lap().total == 2


def test_what_the_machine_computed_is_told_by_stage_whoever_computed_it() -> None:
    clock, cores = Clock(), Clock()
    watch = Stopwatch(clock, cores)
    with watch.stage("generation"):
        clock.now, cores.now = clock.now + 4, cores.now + 6
    with watch.left_out():
        clock.now, cores.now = clock.now + 4, cores.now + 8
    with watch.stage("train"):
        clock.now, cores.now = clock.now + 2, cores.now + 4
    watch.split("train", {"logprob": 0.5, "train": 1})
    assert (watch.busy_cores("generation"), watch.busy_cores("train"), watch.busy_cores("prepare")) == (1.5, 2, None)
    watch.lap()
    assert watch.busy_cores("generation") is None


def test_what_is_left_out_belongs_to_no_stage() -> None:
    clock = Clock()
    watch = Stopwatch(clock)
    clock.now += 1
    with watch.left_out():
        clock.now += 60
    with watch.stage("train"):
        clock.now += 2
    assert watch.lap().total == 3
