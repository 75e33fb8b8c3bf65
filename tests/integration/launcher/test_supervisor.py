"""The supervisor with real, tiny processes: restarts, refusals, the order of a stop, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from specrl.launcher.ports import free_port
from specrl.launcher.supervisor import MAX_CRASHES, Ending, Program, Rank, Supervisor, Verdict

HERE = Path(__file__).parent
FAKE = str(HERE / "fake_program.py")
DEADLINE_S = 60.0


def until(is_so: Callable[[], object], what: str) -> None:
    """Poll until something is so; its limit is a safety net, not an assertion about speed."""
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class Events:
    """What fake programs wrote down."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def starts(self, name: str) -> list[int]:
        """Process ids of a program's starts, in order."""
        return [int(line.split()[2]) for line in self.lines() if line.startswith(f"{name} started")]

    def pids(self) -> list[int]:
        """Every process that ever was, children of programs included."""
        words = [line.split() for line in self.lines() if " started " in line]
        return [int(word) for line in words for word in line[2:] if word.isdigit()]


@pytest.fixture
def events(tmp_path: Path) -> Events:
    return Events(tmp_path / "events")


def a_program(tmp_path: Path, name: str, *options: str, ranks: int = 1, **fields: object) -> Program:
    environment = dict(os.environ) | {"FAKE_EVENTS": str(tmp_path / "events")}
    made = [
        Rank((sys.executable, FAKE, name, *options), environment, tmp_path / f"{name}-{rank}.log")
        for rank in range(ranks)
    ]
    return Program(name, lambda: made, **fields)  # type: ignore[arg-type]


class Clock:
    """Time that passes only when told: pauses between restarts cost a test nothing."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def supervised(programs: Sequence[Program], clock: Clock | None = None) -> Iterator[Supervisor]:
    with Supervisor(programs, clock or Clock()) as supervisor:
        yield supervisor


def verdict_of(supervisor: Supervisor, clock: Clock) -> Verdict:
    """Poll, with time flying, until the run ends."""
    found: list[Verdict] = []

    def has_ended() -> bool:
        clock.now += 1.0
        verdict = supervisor.poll()
        found.extend([verdict] if verdict is not None else [])
        return bool(found)

    until(has_ended, "a verdict")
    return found[0]


def test_killed_program_comes_back_with_the_same_arguments(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0")], clock) as supervisor:
        supervisor.poll()
        until(lambda: events.starts("gen-0"), "the start")
        os.kill(events.starts("gen-0")[0], signal.SIGKILL)

        def is_back() -> bool:
            clock.now += 0.1
            assert supervisor.poll() is None
            return len(events.starts("gen-0")) == 2

        until(is_back, "the restart")
        assert supervisor.restarts() == {"gen-0": 1}
        assert supervisor.take_notices() == [
            f"gen-0 ended and is started again: killed by SIGKILL; see {tmp_path / 'gen-0-0.log'}"
        ]
        assert supervisor.take_notices() == []
    assert not any(map(is_alive, events.pids()))


def test_restart_waits_for_its_pause(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0", "--exit", "1")], clock) as supervisor:
        supervisor.poll()
        until(lambda: supervisor.poll() or supervisor.restarts()["gen-0"], "the crash")
        for _ in range(5):
            supervisor.poll()
        assert len(events.starts("gen-0")) == 1
        clock.now += 0.5
        supervisor.poll()
        until(lambda: len(events.starts("gen-0")) == 2, "the restart")


def test_program_that_may_leave_and_left_stays_away_until_it_is_wanted(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    left = a_program(tmp_path, "gen-0", "--exit", "0", may_leave=True)
    with supervised([left], clock) as supervisor:
        supervisor.poll()
        until(lambda: supervisor.poll() or supervisor.take_notices() == ["gen-0 has left"], "its end")
        clock.now += 1000
        supervisor.poll()
        assert (len(events.starts("gen-0")), supervisor.restarts()) == (1, {"gen-0": 0})
        supervisor.want(left)
        supervisor.poll()
        until(lambda: len(events.starts("gen-0")) == 2, "its return")


def test_retired_program_is_told_to_end_and_another_takes_no_notice(tmp_path: Path, events: Events) -> None:
    programs = [a_program(tmp_path, name, may_leave=True) for name in ("gen-0", "gen-1")]
    with supervised(programs[:1]) as supervisor:
        supervisor.want(programs[1])
        supervisor.poll()
        until(lambda: events.starts("gen-0") and events.starts("gen-1"), "the start")
        for _ in range(2):
            supervisor.retire("gen-1", 60.0)
        until(lambda: supervisor.poll() or supervisor.take_notices() == ["gen-1 has left"], "its end")
        assert "gen-1 stopped" in events.lines()
        assert is_alive(events.starts("gen-0")[0])


def test_retired_program_that_does_not_end_is_killed(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0", "--ignore-term", may_leave=True)], clock) as supervisor:
        supervisor.poll()
        until(lambda: events.starts("gen-0"), "the start")
        supervisor.retire("gen-0", 60.0)
        until(lambda: "gen-0 told to stop" in events.lines(), "the signal")
        assert supervisor.poll() is None
        assert supervisor.take_notices() == []
        clock.now += 61
        assert supervisor.poll() is None
        assert supervisor.take_notices() == ["gen-0 has left; it was not done in time"]
        assert not is_alive(events.starts("gen-0")[0])
        clock.now += 61
        supervisor.poll()
        assert len(events.starts("gen-0")) == 1


def test_crash_takes_the_programs_own_children_along(tmp_path: Path, events: Events) -> None:
    with supervised([a_program(tmp_path, "gen-0", "--child")]) as supervisor:
        supervisor.poll()
        until(lambda: len(events.pids()) == 2, "the start")
        leader, child = events.pids()
        os.kill(leader, signal.SIGKILL)
        until(lambda: supervisor.poll() or not is_alive(child), "the child's end")


def test_program_that_keeps_crashing_is_given_up(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", "OSError: full", "--exit", "7")], clock) as supervisor:
        verdict = verdict_of(supervisor, clock)
    assert verdict.ending is Ending.GIVEN_UP
    assert verdict.message == (
        f"trainer must stay up, got {MAX_CRASHES + 1} crashes in a row: exit code 7: OSError: full; "
        f"see {tmp_path / 'trainer-0.log'}"
    )
    assert len(events.starts("trainer")) == MAX_CRASHES + 1


def test_crashes_of_a_program_that_was_healthy_in_between_are_not_added_up(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer")], clock) as supervisor:
        for number in range(1, MAX_CRASHES + 3):
            supervisor.poll()
            until(lambda number=number: len(events.starts("trainer")) == number, "the start")
            clock.now += 1000.0
            os.kill(events.starts("trainer")[-1], signal.SIGKILL)
            until(lambda number=number: supervisor.poll() or supervisor.restarts()["trainer"] == number, "the crash")
            clock.now += 1.0


def test_refusal_ends_the_run_with_the_programs_message_and_no_restart(tmp_path: Path, events: Events) -> None:
    said = '{"event": "loading"}\nspecrl-trainer: model must fit;\n  buy memory\nUserWarning: torn down'
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", said, "--exit", "2")], clock) as supervisor:
        verdict = verdict_of(supervisor, clock)
    assert verdict == Verdict(Ending.REFUSED, "trainer", "model must fit;\n  buy memory")
    assert len(events.starts("trainer")) == 1


def test_message_of_an_earlier_start_is_not_shown(tmp_path: Path, events: Events) -> None:
    (tmp_path / "trainer-0.log").write_text("specrl-trainer: old story\n")
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", "new story", "--exit", "2")], clock) as supervisor:
        assert verdict_of(supervisor, clock).message == "new story"


def test_program_that_is_not_installed_is_a_refusal(tmp_path: Path) -> None:
    program = Program("gen-0", lambda: [Rank((str(tmp_path / "none"),), dict(os.environ), tmp_path / "log")])
    clock = Clock()
    with supervised([program], clock) as supervisor:
        verdict = verdict_of(supervisor, clock)
    assert verdict.ending is Ending.REFUSED
    assert "none must be installed and executable" in verdict.message


def test_coordinator_that_ends_well_ends_the_run_and_a_replica_does_not(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    programs = [a_program(tmp_path, "gen-0", "--exit", "0"), a_program(tmp_path, "coordinator", ends_run=True)]
    with supervised(programs, clock) as supervisor:
        supervisor.poll()
        until(lambda: events.starts("coordinator"), "the start")
        until(lambda: supervisor.poll() or supervisor.restarts()["gen-0"] == 1, "the replica's restart")
        os.kill(events.starts("coordinator")[0], signal.SIGTERM)
        assert verdict_of(supervisor, clock) == Verdict(Ending.ENDED, "coordinator", "coordinator was stopped")


def test_one_rank_that_dies_restarts_all_ranks(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", ranks=3)], clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.starts("trainer")) == 3, "the start")
        first = events.starts("trainer")
        assert len({os.getpgid(pid) for pid in first}) == 1
        os.kill(first[2], signal.SIGKILL)

        def are_back() -> bool:
            clock.now += 0.1
            assert supervisor.poll() is None
            return len(events.starts("trainer")) == 6

        until(are_back, "the restart")
        assert not any(map(is_alive, first))


def stop(supervisor: Supervisor, clock: Clock, tick_s: float = 0.0) -> None:
    def is_down() -> bool:
        clock.now += tick_s
        return supervisor.poll_stop()

    supervisor.begin_stop()
    until(is_down, "the stop")


def test_others_are_told_to_stop_only_after_the_coordinator_is_gone(tmp_path: Path, events: Events) -> None:
    programs = [
        a_program(tmp_path, "trainer"),
        a_program(tmp_path, "coordinator", "--slow-stop", "0.5", stop_order=0),
        a_program(tmp_path, "gen-0"),
    ]
    with supervised(programs) as supervisor:
        supervisor.poll()
        until(lambda: len(events.lines()) == 3, "the start")
        stop(supervisor, Clock())
    told = [line for line in events.lines() if "stop" in line]
    assert told[:2] == ["coordinator told to stop", "coordinator stopped"]
    assert sorted(told[2:]) == sorted(
        f"{name} {what}" for name in ("gen-0", "trainer") for what in ("told to stop", "stopped")
    )


def test_program_that_ignores_the_stop_is_killed_after_its_grace(tmp_path: Path, events: Events) -> None:
    clock = Clock()
    program = a_program(tmp_path, "coordinator", "--ignore-term", "--child", grace_s=60.0)
    with supervised([program], clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.pids()) == 2, "the start")
        supervisor.begin_stop()
        until(lambda: supervisor.poll_stop() or "coordinator told to stop" in events.lines(), "the signal")
        clock.now = 59.0
        assert not supervisor.poll_stop()
        clock.now = 60.0
        assert supervisor.poll_stop()
        until(lambda: not any(map(is_alive, events.pids())), "the end of all")


def test_nothing_is_restarted_during_a_stop(tmp_path: Path, events: Events) -> None:
    programs = [a_program(tmp_path, "coordinator", "--slow-stop", "0.3", stop_order=0), a_program(tmp_path, "gen-0")]
    clock = Clock()
    with supervised(programs, clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.lines()) == 2, "the start")
        supervisor.begin_stop()
        os.kill(events.starts("gen-0")[0], signal.SIGKILL)
        stop(supervisor, clock)
    assert len(events.starts("gen-0")) == 1


def test_stop_before_the_first_start_is_down_at_once(tmp_path: Path) -> None:
    with supervised([a_program(tmp_path, "gen-0")]) as supervisor:
        supervisor.begin_stop()
        assert supervisor.poll_stop()


# -- a whole launch, in a process of its own ---------------------------------------------------------------------------


@pytest.fixture
def launch(tmp_path: Path, events: Events) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start drive.py with these programs; whatever a failing test leaves is killed."""
    started: list[subprocess.Popen[str]] = []
    status = tmp_path / "status"
    status.write_text(json.dumps({"run": "tiny", "phase": "training"}))

    def start(*programs: str) -> subprocess.Popen[str]:
        port = free_port()
        environment = dict(os.environ) | {"FAKE_EVENTS": str(events.path), "FAKE_STATUS": str(status)}
        command = [sys.executable, str(HERE / "drive.py"), str(tmp_path), str(port)]
        command += [f"coordinator=--serve {port} --slow-stop 0.3", *programs]
        started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        # A run that a replica refuses may be over before its coordinator has written a line.
        until(lambda: events.starts("coordinator") or started[-1].poll() is not None, "the coordinator's start")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in filter(is_alive, events.pids()):
        os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return output.splitlines()[-1]


def test_killed_launcher_leaves_nothing_behind(events: Events, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--child --ignore-term", "trainer=--child")
    until(lambda: len(events.pids()) == 5, "the start")
    assert all(map(is_alive, events.pids()))
    process.kill()
    until(lambda: not any(map(is_alive, events.pids())), "the end of all")


def test_interrupt_stops_in_order_and_is_told_apart_from_an_end(
    events: Events, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launch("gen-0=", "trainer=")
    until(lambda: len(events.pids()) == 3, "the start")
    process.send_signal(signal.SIGINT)
    assert finish(process).startswith("interrupted | ")
    told = [line for line in events.lines() if "stop" in line]
    assert told[:2] == ["coordinator told to stop", "coordinator stopped"]
    assert len(told) == 6
    assert not any(map(is_alive, events.pids()))


def test_second_interrupt_kills_at_once(events: Events, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--ignore-term --child")
    until(lambda: len(events.pids()) == 3, "the start")
    process.send_signal(signal.SIGINT)
    until(lambda: "gen-0 told to stop" in events.lines(), "the first stop")
    process.send_signal(signal.SIGINT)
    assert finish(process).startswith("interrupted | ")
    until(lambda: not any(map(is_alive, events.pids())), "the end of all")


@pytest.mark.parametrize("victim", ["coordinator", "gen-0", "trainer"])
def test_any_killed_process_is_started_again(
    victim: str, events: Events, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launch("gen-0=", "trainer=")
    until(lambda: len(events.pids()) == 3, "the start")
    os.kill(events.starts(victim)[0], signal.SIGKILL)
    until(lambda: len(events.starts(victim)) == 2, "the restart")
    process.send_signal(signal.SIGTERM)
    assert finish(process).startswith("interrupted | ")
    assert sum(len(events.starts(name)) for name in ("coordinator", "gen-0", "trainer")) == 4


def test_finished_run_is_stopped_by_itself(
    tmp_path: Path, events: Events, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launch("gen-0=")
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"run": "tiny", "phase": "finished"}))
    fresh.replace(tmp_path / "status")
    assert finish(process) == "finished | "
    assert not any(map(is_alive, events.pids()))


def test_failed_run_says_why(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=")
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"run": "tiny", "phase": "failed", "error": "the store is gone"}))
    fresh.replace(tmp_path / "status")
    assert finish(process) == "failed | the store is gone"


def test_refusing_replica_stops_the_run(events: Events, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--say 'specrl-generation: no room' --exit 2")
    assert finish(process) == "refused | no room"
    assert not any(map(is_alive, events.pids()))
