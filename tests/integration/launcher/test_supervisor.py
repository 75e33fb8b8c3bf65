"""The supervisor with real, tiny processes: restarts, refusals, the order of a stop, and no orphans."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from specrl.launcher.processes.ports import find_free_port
from specrl.launcher.processes.supervisor import (
    MAX_CRASHES,
    MAX_EQUAL_FAILURES,
    SERVED_S,
    Program,
    Rank,
    RunEnd,
    RunOutcome,
    Supervisor,
)

HERE = Path(__file__).parent
FAKE = str(HERE / "fake_program.py")
DEADLINE_S = 180.0


def until(is_so: Callable[[], object], what: str) -> None:
    """Poll until `is_so()` is true. The limit is a safety net, not an assertion about speed."""
    end = time.monotonic() + DEADLINE_S
    while not is_so():
        assert time.monotonic() < end, f"{what} did not happen within {DEADLINE_S:g} s"
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


class EventFile:
    """Reads the events that fake programs recorded."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.touch()

    def read_lines(self) -> list[str]:
        return self.path.read_text().splitlines()

    def started_pids(self, name: str) -> list[int]:
        """Return the process ids of a program's starts, in order."""
        return [int(line.split()[2]) for line in self.read_lines() if line.startswith(f"{name} started")]

    def all_pids(self) -> list[int]:
        """Return the process ids of all processes so far, children of programs included."""
        words = [line.split() for line in self.read_lines() if " started " in line]
        return [int(word) for line in words for word in line[2:] if word.isdigit()]


@pytest.fixture
def events(tmp_path: Path) -> EventFile:
    return EventFile(tmp_path / "events")


def a_rank(tmp_path: Path, name: str, *options: str, number: int = 0) -> Rank:
    environment = dict(os.environ) | {"FAKE_EVENTS": str(tmp_path / "events")}
    return Rank((sys.executable, FAKE, name, *options), environment, tmp_path / f"{name}-{number}.log")


def a_program(tmp_path: Path, name: str, *options: str, ranks: int = 1, **fields: object) -> Program:
    made = [a_rank(tmp_path, name, *options, number=number) for number in range(ranks)]
    return Program(name, lambda: made, **fields)  # type: ignore[arg-type]


class Clock:
    """A clock that moves only when a test moves it, so that backoffs take no time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@contextmanager
def supervised(programs: Sequence[Program], clock: Clock | None = None) -> Iterator[Supervisor]:
    with Supervisor(programs, clock or Clock()) as supervisor:
        yield supervisor


def end_of(supervisor: Supervisor, clock: Clock) -> RunOutcome:
    """Poll while the clock advances until the run ends."""
    found: list[RunOutcome] = []

    def has_ended() -> bool:
        clock.now += 1.0
        ended = supervisor.poll()
        found.extend([ended] if ended is not None else [])
        return bool(found)

    until(has_ended, "a ended")
    return found[0]


def test_killed_program_comes_back_with_the_same_arguments(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0")], clock) as supervisor:
        supervisor.poll()
        until(lambda: events.started_pids("gen-0"), "the start")
        os.kill(events.started_pids("gen-0")[0], signal.SIGKILL)

        def is_back() -> bool:
            clock.now += 0.1
            assert supervisor.poll() is None
            return len(events.started_pids("gen-0")) == 2

        until(is_back, "the restart")
        assert supervisor.take_notices() == [
            f"gen-0 ended with signal SIGKILL; restarting it; see {tmp_path / 'gen-0-0.log'}"
        ]
        assert supervisor.take_notices() == []
    assert not any(map(is_alive, events.all_pids()))


def test_a_restart_waits_for_its_backoff(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0", "--exit", "1")], clock) as supervisor:
        supervisor.poll()
        until(lambda: supervisor.poll() or supervisor.take_notices(), "the crash")
        for _ in range(5):
            supervisor.poll()
        assert len(events.started_pids("gen-0")) == 1
        clock.now += 0.5
        supervisor.poll()
        until(lambda: len(events.started_pids("gen-0")) == 2, "the restart")


def test_a_program_that_left_is_started_again_only_when_it_is_wanted(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    left = a_program(tmp_path, "gen-0", "--exit", "0", may_leave=True)
    with supervised([left], clock) as supervisor:
        supervisor.poll()
        until(lambda: supervisor.poll() or supervisor.take_notices() == ["gen-0 left"], "its end")
        clock.now += 1000
        supervisor.poll()
        assert (len(events.started_pids("gen-0")), supervisor.take_notices()) == (1, [])
        supervisor.keep_running(left)
        supervisor.poll()
        until(lambda: len(events.started_pids("gen-0")) == 2, "its return")


def test_retiring_a_program_stops_it_and_no_other(tmp_path: Path, events: EventFile) -> None:
    programs = [a_program(tmp_path, name, may_leave=True) for name in ("gen-0", "gen-1")]
    with supervised(programs[:1]) as supervisor:
        supervisor.keep_running(programs[1])
        supervisor.poll()
        until(lambda: events.started_pids("gen-0") and events.started_pids("gen-1"), "the start")
        for _ in range(2):
            supervisor.retire_program("gen-1", 60.0)
        until(lambda: supervisor.poll() or supervisor.take_notices() == ["gen-1 left"], "its end")
        assert "gen-1 stopped" in events.read_lines()
        assert is_alive(events.started_pids("gen-0")[0])


def test_retired_program_that_does_not_end_is_killed(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0", "--ignore-term", may_leave=True)], clock) as supervisor:
        supervisor.poll()
        until(lambda: events.started_pids("gen-0"), "the start")
        supervisor.retire_program("gen-0", 60.0)
        until(lambda: "gen-0 told to stop" in events.read_lines(), "the signal")
        assert supervisor.poll() is None
        assert supervisor.take_notices() == []
        clock.now += 61
        assert supervisor.poll() is None
        assert supervisor.take_notices() == ["gen-0 left; killed, since it did not end in time"]
        assert not is_alive(events.started_pids("gen-0")[0])
        clock.now += 61
        supervisor.poll()
        assert len(events.started_pids("gen-0")) == 1


def test_a_crash_kills_the_programs_own_children(tmp_path: Path, events: EventFile) -> None:
    with supervised([a_program(tmp_path, "gen-0", "--child")]) as supervisor:
        supervisor.poll()
        until(lambda: len(events.all_pids()) == 2, "the start")
        leader, child = events.all_pids()
        os.kill(leader, signal.SIGKILL)
        until(lambda: supervisor.poll() or not is_alive(child), "the child's end")


def test_a_program_that_keeps_crashing_fails_the_run(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", "OSError: full", "--exit", "7")], clock) as supervisor:
        ended = end_of(supervisor, clock)
    assert ended.end is RunEnd.FAILED
    assert ended.message == (
        f"trainer crashed {MAX_CRASHES + 1} times in a row, last with exit code 7: OSError: full; "
        f"see {tmp_path / 'trainer-0.log'}"
    )
    assert len(events.started_pids("trainer")) == MAX_CRASHES + 1


ENGINE_LOG = """\
(EngineCore pid=81) ERROR 11-25 10:00:00 [core.py:866] Traceback (most recent call last):
(EngineCore pid=81) ERROR 11-25 10:00:00 [core.py:866] ValueError: 2.0 MiB KV cache is needed, which is larger than 1.0
specrl-generation: vLLM failed to start: see root cause; see the log above for the engine core's error
"""


def test_a_replica_that_fails_alike_three_times_is_given_up_and_the_last_one_ends_the_run(
    tmp_path: Path, events: EventFile
) -> None:
    """It was started six times, some minutes each, and the terminal never named the engine's own error."""
    clock = Clock()
    failing = a_program(tmp_path, "gen-1", "--say", ENGINE_LOG, "--exit", "1", may_leave=True)
    with supervised([a_program(tmp_path, "gen-0", may_leave=True), failing], clock) as supervisor:

        def give_up() -> bool:
            clock.now += 1
            assert supervisor.poll() is None
            return bool(supervisor.given_up)

        until(give_up, "the end of its restarts")
        cause = "ValueError: 2.0 MiB KV cache is needed, which is larger than 1.0"
        reason = (
            f"it failed {MAX_EQUAL_FAILURES} times in a row with exit code 1: "
            f"vLLM failed to start: {cause}; see {tmp_path / 'gen-1-0.log'}"
        )
        assert supervisor.given_up == {"gen-1": reason}
        assert len(events.started_pids("gen-1")) == MAX_EQUAL_FAILURES
        assert is_alive(events.started_pids("gen-0")[0]), "the run goes on with the other replica"
        supervisor.keep_running(failing)
        assert supervisor.given_up == {}, "it is wanted again"

    with supervised([failing], clock) as supervisor:
        ended = end_of(supervisor, clock)
    assert (ended.end, ended.message) == (RunEnd.FAILED, f"gen-1 is given up: {reason}")


def test_a_replica_that_has_served_between_equal_failures_is_not_given_up(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    failing = a_program(tmp_path, "gen-0", "--say", "specrl-generation: dead", "--exit", "1", may_leave=True)
    with supervised([failing], clock) as supervisor:
        for number in range(1, MAX_EQUAL_FAILURES + 2):
            assert supervisor.poll() is None
            until(lambda number=number: len(events.started_pids("gen-0")) == number, "the start")
            clock.now += SERVED_S
            until(lambda: supervisor.poll() or supervisor.take_notices(), "the crash")
            clock.now += 1.0


@pytest.mark.parametrize("has_served", [True, False])
def test_crashes_count_anew_once_a_program_has_served_or_a_step_was_trained(
    tmp_path: Path, events: EventFile, has_served: bool
) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer")], clock) as supervisor:
        for number in range(1, MAX_CRASHES + 3):
            supervisor.poll()
            until(lambda number=number: len(events.started_pids("trainer")) == number, "the start")
            if has_served:
                clock.now += SERVED_S
            else:
                supervisor.forget_crashes(())
            os.kill(events.started_pids("trainer")[-1], signal.SIGKILL)
            until(lambda: supervisor.poll() or supervisor.take_notices(), "the crash")
            clock.now += 1.0


def crash_until_end(supervisor: Supervisor, clock: Clock, events: EventFile, name: str) -> RunOutcome:
    """Kill a program some minutes after each start, until the run ends."""
    for number in range(1, MAX_CRASHES + 2):
        supervisor.poll()
        until(lambda number=number: len(events.started_pids(name)) == number, "the start")
        clock.now += 200.0
        os.kill(events.started_pids(name)[-1], signal.SIGKILL)
        ends: list[RunOutcome | None] = []
        until(lambda ends=ends: ends.append(supervisor.poll()) or ends[-1] or supervisor.take_notices(), "the crash")
        if ends[-1] is not None:
            return ends[-1]
        clock.now += 10.0
    raise AssertionError(f"{name} would be restarted for ever")


def test_a_program_that_dies_after_minutes_without_a_trained_step_fails_the_run(
    tmp_path: Path, events: EventFile
) -> None:
    """A trainer that the kernel killed while it loaded a large model was restarted for ever."""
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer")], clock) as supervisor:
        ended = crash_until_end(supervisor, clock, events, "trainer")
    assert ended.end is RunEnd.FAILED
    assert f"trainer crashed {MAX_CRASHES + 1} times in a row, last with signal SIGKILL" in ended.message


def test_a_replica_that_dies_by_the_same_signal_three_times_is_given_up(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "gen-0", may_leave=True)], clock) as supervisor:
        supervisor.forget_equal_failures({"gen-1"})
        ended = crash_until_end(supervisor, clock, events, "gen-0")
    assert f"gen-0 is given up: it failed {MAX_EQUAL_FAILURES} times in a row with signal SIGKILL" in ended.message


def test_a_refusal_ends_the_run_with_the_programs_message_and_without_a_restart(
    tmp_path: Path, events: EventFile
) -> None:
    said = '{"event": "loading"}\nspecrl-trainer: model must fit;\n  buy memory\nUserWarning: torn down'
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", said, "--exit", "2")], clock) as supervisor:
        ended = end_of(supervisor, clock)
    assert ended == RunOutcome(RunEnd.REFUSED, "model must fit;\n  buy memory")
    assert len(events.started_pids("trainer")) == 1


def test_message_of_an_earlier_start_is_not_shown(tmp_path: Path, events: EventFile) -> None:
    (tmp_path / "trainer-0.log").write_text("specrl-trainer: old story\n")
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", "--say", "new story", "--exit", "2")], clock) as supervisor:
        assert end_of(supervisor, clock).message == "new story"


def test_a_program_that_is_not_installed_counts_as_a_refusal(tmp_path: Path) -> None:
    program = Program("gen-0", lambda: [Rank((str(tmp_path / "none"),), dict(os.environ), tmp_path / "log")])
    clock = Clock()
    with supervised([program], clock) as supervisor:
        ended = end_of(supervisor, clock)
    assert ended.end is RunEnd.REFUSED
    assert "none must be installed and executable" in ended.message


def test_exit_code_0_of_the_coordinator_ends_the_run_and_that_of_a_replica_does_not(
    tmp_path: Path, events: EventFile
) -> None:
    clock = Clock()
    programs = [a_program(tmp_path, "gen-0", "--exit", "0"), a_program(tmp_path, "coordinator", ends_run=True)]
    with supervised(programs, clock) as supervisor:
        supervisor.poll()
        until(lambda: events.started_pids("coordinator"), "the start")
        until(lambda: supervisor.poll() or supervisor.take_notices(), "the replica's restart")
        os.kill(events.started_pids("coordinator")[0], signal.SIGTERM)
        assert end_of(supervisor, clock) == RunOutcome(RunEnd.INTERRUPTED, "coordinator was stopped")


def test_one_rank_that_dies_restarts_all_ranks(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    with supervised([a_program(tmp_path, "trainer", ranks=3)], clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.started_pids("trainer")) == 3, "the start")
        first = events.started_pids("trainer")
        assert len({os.getpgid(pid) for pid in first}) == 1
        os.kill(first[2], signal.SIGKILL)

        def are_back() -> bool:
            clock.now += 0.1
            assert supervisor.poll() is None
            return len(events.started_pids("trainer")) == 6

        until(are_back, "the restart")
        assert not any(map(is_alive, first))


def stop(supervisor: Supervisor, clock: Clock, tick_s: float = 0.0) -> None:
    def is_down() -> bool:
        clock.now += tick_s
        return supervisor.poll_stop()

    supervisor.begin_stop()
    until(is_down, "the stop")


def test_other_programs_are_stopped_only_after_the_coordinator_has_exited(tmp_path: Path, events: EventFile) -> None:
    programs = [
        a_program(tmp_path, "trainer"),
        a_program(tmp_path, "coordinator", "--slow-stop", "0.5", stop_order=0),
        a_program(tmp_path, "gen-0"),
    ]
    with supervised(programs) as supervisor:
        supervisor.poll()
        until(lambda: len(events.read_lines()) == 3, "the start")
        stop(supervisor, Clock())
    told = [line for line in events.read_lines() if "stop" in line]
    assert told[:2] == ["coordinator told to stop", "coordinator stopped"]
    assert sorted(told[2:]) == sorted(
        f"{name} {what}" for name in ("gen-0", "trainer") for what in ("told to stop", "stopped")
    )


def test_a_program_that_ignores_sigterm_is_killed_after_its_grace_period(tmp_path: Path, events: EventFile) -> None:
    clock = Clock()
    program = a_program(tmp_path, "coordinator", "--ignore-term", "--child", grace_s=60.0)
    with supervised([program], clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.all_pids()) == 2, "the start")
        supervisor.begin_stop()
        until(lambda: supervisor.poll_stop() or "coordinator told to stop" in events.read_lines(), "the signal")
        clock.now = 59.0
        assert not supervisor.poll_stop()
        clock.now = 60.0
        assert supervisor.poll_stop()
        until(lambda: not any(map(is_alive, events.all_pids())), "the end of all")


def test_a_rank_that_died_before_the_stop_does_not_disturb_it(tmp_path: Path, events: EventFile) -> None:
    """SIGTERM for the dead rank reaped it. The next look at it raised ChildProcessError while the others still ran."""
    ranks = [a_rank(tmp_path, "dead", "--exit", "2"), a_rank(tmp_path, "hanging", "--ignore-term")]
    clock = Clock()
    with supervised([Program("trainer", lambda: ranks, grace_s=60.0)], clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.all_pids()) == 2, "the start")
        until(lambda: not is_alive(events.started_pids("dead")[0]), "the rank's end")
        supervisor.begin_stop()
        until(lambda: supervisor.poll_stop() or "hanging told to stop" in events.read_lines(), "the signal")
        assert not supervisor.poll_stop()
        clock.now = 60.0
        assert supervisor.poll_stop()


def test_nothing_is_restarted_during_a_stop(tmp_path: Path, events: EventFile) -> None:
    programs = [a_program(tmp_path, "coordinator", "--slow-stop", "0.3", stop_order=0), a_program(tmp_path, "gen-0")]
    clock = Clock()
    with supervised(programs, clock) as supervisor:
        supervisor.poll()
        until(lambda: len(events.read_lines()) == 2, "the start")
        supervisor.begin_stop()
        os.kill(events.started_pids("gen-0")[0], signal.SIGKILL)
        stop(supervisor, clock)
    assert len(events.started_pids("gen-0")) == 1


def test_a_stop_before_the_first_start_ends_at_once(tmp_path: Path) -> None:
    with supervised([a_program(tmp_path, "gen-0")]) as supervisor:
        supervisor.begin_stop()
        assert supervisor.poll_stop()


# -- a whole launch, in a process of its own ---------------------------------------------------------------------------


@contextmanager
def at_start(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    """Start processes in this context with this handler of a signal, SIG_DFL or SIG_IGN."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.fixture
def launch(tmp_path: Path, events: EventFile) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start drive.py with these programs; whatever a failing test leaves is killed."""
    started: list[subprocess.Popen[str]] = []
    status = tmp_path / "status"
    status.write_text(json.dumps({"run": "tiny", "phase": "training"}))

    def start(*programs: str, ignored: Sequence[signal.Signals] = ()) -> subprocess.Popen[str]:
        port = find_free_port()
        environment = dict(os.environ) | {"FAKE_EVENTS": str(events.path), "FAKE_STATUS": str(status)}
        command = [sys.executable, str(HERE / "drive.py"), str(tmp_path), str(port)]
        command += [f"coordinator=--serve {port} --slow-stop 0.3", *programs]
        with ExitStack() as handlers:
            for number in (signal.SIGINT, signal.SIGHUP):  # pytest itself may be a background job
                handler = signal.SIG_IGN if number in ignored else signal.SIG_DFL
                handlers.enter_context(at_start(number, handler))
            started.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        # If a replica refuses, the run may end before its coordinator has recorded an event.
        until(lambda: events.started_pids("coordinator") or started[-1].poll() is not None, "the coordinator's start")
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in filter(is_alive, events.all_pids()):
        os.kill(pid, signal.SIGKILL)


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=DEADLINE_S)
    return output.splitlines()[-1]


def test_killed_launcher_leaves_nothing_behind(events: EventFile, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--child --ignore-term", "trainer=--child")
    until(lambda: len(events.all_pids()) == 5, "the start")
    assert all(map(is_alive, events.all_pids()))
    process.kill()
    until(lambda: not any(map(is_alive, events.all_pids())), "the end of all")


def test_the_coordinator_is_told_which_replica_is_given_up(
    events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    """Only the terminal knew it: status, page and report had a replica less, without a word."""
    process = launch("gen-0=", "gen-1=--say 'specrl-generation: no memory' --exit 1")
    until(lambda: any("PUT" in line for line in events.read_lines()), "the message")
    told = next(line for line in events.read_lines() if "PUT" in line)
    assert told.startswith(f'coordinator got PUT /given-up {{"reasons":{{"gen-1":"it failed {MAX_EQUAL_FAILURES} times')
    assert "no memory" in told
    process.send_signal(signal.SIGINT)
    assert finish(process).startswith("interrupted | ")


def test_an_interrupt_stops_in_order_and_differs_from_a_finished_run(
    tmp_path: Path, events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    """What it saved, the coordinator writes after the last status that it was asked for."""
    process = launch("gen-0=", "trainer=")
    until(lambda: len(events.all_pids()) == 3, "the start")
    (tmp_path / "status.json").write_text(
        json.dumps({"run": "tiny", "phase": "stopped", "detail": "stopped; step 3 is saved"})
    )
    process.send_signal(signal.SIGINT)
    assert finish(process) == "interrupted | stopped; step 3 is saved"
    told = [line for line in events.read_lines() if "stop" in line]
    assert told[:2] == ["coordinator told to stop", "coordinator stopped"]
    assert len(told) == 6
    assert not any(map(is_alive, events.all_pids()))


def test_a_signal_that_the_launcher_was_started_to_ignore_does_not_stop_the_run(
    events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    """A run below nohup stopped when the terminal closed."""
    process = launch("gen-0=", ignored=(signal.SIGINT, signal.SIGHUP))
    until(lambda: len(events.all_pids()) == 2, "the start")
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGINT)
    os.kill(events.started_pids("gen-0")[0], signal.SIGKILL)
    # The restart is a turn of the launcher's loop after the signals.
    until(lambda: len(events.started_pids("gen-0")) == 2 or process.poll() is not None, "the restart")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process).startswith("interrupted | ")


def test_second_interrupt_kills_at_once(events: EventFile, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--ignore-term --child")
    until(lambda: len(events.all_pids()) == 3, "the start")
    process.send_signal(signal.SIGINT)
    until(lambda: "gen-0 told to stop" in events.read_lines(), "the first stop")
    process.send_signal(signal.SIGINT)
    assert finish(process).startswith("interrupted | ")
    until(lambda: not any(map(is_alive, events.all_pids())), "the end of all")


@pytest.mark.parametrize("victim", ["coordinator", "gen-0", "trainer"])
def test_any_killed_process_is_restarted(
    victim: str, events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launch("gen-0=", "trainer=")
    until(lambda: len(events.all_pids()) == 3, "the start")
    os.kill(events.started_pids(victim)[0], signal.SIGKILL)
    until(lambda: len(events.started_pids(victim)) == 2, "the restart")
    process.send_signal(signal.SIGTERM)
    assert finish(process).startswith("interrupted | ")
    assert sum(len(events.started_pids(name)) for name in ("coordinator", "gen-0", "trainer")) == 4


def test_a_replica_that_serves_new_steps_between_crashes_is_not_given_up(
    tmp_path: Path, events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    serving = {"id": "gen-0", "state": "serving", "policyVersion": 0, "liveRollouts": 0}
    process = launch("gen-0=")
    for step in range(1, MAX_EQUAL_FAILURES + 1):
        until(lambda step=step: len(events.started_pids("gen-0")) == step or process.poll() is not None, "the start")
        fresh = tmp_path / "fresh"
        fresh.write_text(json.dumps({"run": "tiny", "phase": "training", "step": step, "replicas": [serving]}))
        fresh.replace(tmp_path / "status")
        until(lambda step=step: f"coordinator is at step {step}" in events.read_lines(), "the launcher's look at it")
        os.kill(events.started_pids("gen-0")[-1], signal.SIGKILL)
    until(lambda: len(events.started_pids("gen-0")) > step or process.poll() is not None, "the last restart")
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert finish(process).startswith("interrupted | ")


def test_a_finished_run_stops_its_programs(
    tmp_path: Path, events: EventFile, launch: Callable[..., subprocess.Popen[str]]
) -> None:
    process = launch("gen-0=")
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"run": "tiny", "phase": "finished"}))
    fresh.replace(tmp_path / "status")
    assert finish(process) == "finished | "
    assert not any(map(is_alive, events.all_pids()))


def test_a_failed_run_reports_the_reason(tmp_path: Path, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=")
    fresh = tmp_path / "fresh"
    fresh.write_text(json.dumps({"run": "tiny", "phase": "failed", "error": "the store is gone"}))
    fresh.replace(tmp_path / "status")
    assert finish(process) == "failed | the store is gone"


def test_refusing_replica_stops_the_run(events: EventFile, launch: Callable[..., subprocess.Popen[str]]) -> None:
    process = launch("gen-0=--say 'specrl-generation: no room' --exit 2")
    assert finish(process) == "refused | no room"
    assert not any(map(is_alive, events.all_pids()))
