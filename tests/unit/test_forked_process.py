"""A process is forked before its task is known. Each test runs a program of one thread, since pytest has several."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from specrl.generation.vllm_backend.launch import find_missing_preloads

LIMIT_S = 60.0

TASKS = """
import multiprocessing, os, signal, sys, threading
from specrl.forked_process import ForkContext, reserve_fork

IMPORTED = os.getpid()

def describe(word):
    parent = multiprocessing.parent_process()
    print(word, parent.pid == IMPORTED != os.getpid(), multiprocessing.current_process().name)
    print(os.environ.get("SET_AFTER_THE_FORK"), flush=True)
    sys.exit(7)

def fail():
    raise ValueError("a wrong task")

def wait_with_parent():
    multiprocessing.parent_process().join()

def start(target, *args):
    process = ForkContext(fork).Process(target=target, args=args, name="EngineCore")
    process.start()
    return process

fork = reserve_fork()
"""


@contextmanager
def program(folder: Path, text: str) -> Iterator[subprocess.Popen[str]]:
    """Run TASKS and `text`, in a session of its own."""
    file = folder / "program.py"
    file.write_text(TASKS + textwrap.dedent(text))
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def run(folder: Path, text: str) -> str:
    """Run TASKS and `text` to their end, and return what they print."""
    with program(folder, text) as process:
        said, _ = process.communicate(timeout=LIMIT_S)
        assert process.returncode == 0, said
        return said


def test_a_task_runs_in_the_fork_with_the_environment_of_its_start(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        os.environ["SET_AFTER_THE_FORK"] = "yes"
        process = start(describe, "word")
        process.join()
        print(process.exitcode, process.pid == fork.pid, process.is_alive())
        """,
    )
    assert said.splitlines() == ["word True EngineCore", "yes", "7 True False"]


def test_a_failed_task_has_the_exit_code_and_traceback_of_any_process(tmp_path: Path) -> None:
    said = run(tmp_path, "process = start(fail); process.join(); print(process.exitcode)")
    assert said.splitlines()[-1] == "1"
    assert "Process EngineCore:" in said
    assert "ValueError: a wrong task" in said


def test_a_second_process_is_spawned(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
        if __name__ == "__main__":
            context = ForkContext(fork)
            kinds = []
            for number in range(2):
                process = context.Process(target=sum, args=((1, 2),))
                process.start()
                process.join()
                kinds.append((type(process).__name__, process.exitcode, process.pid == fork.pid))
            print(kinds)
        """,
    )
    assert "[('ForkedProcess', 0, True), ('SpawnProcess', 0, False)]" in said


def test_a_process_with_threads_is_not_forked(tmp_path: Path) -> None:
    """A lock that a thread holds at the fork would stay locked in the child for good."""
    said = run(
        tmp_path,
        """
        import warnings
        warnings.simplefilter("ignore")  # Python's own warning of the same
        fork.close()
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        print(reserve_fork(), multiprocessing.active_children())
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            print("no child is left")
        """,
    )
    assert said.splitlines() == ["None []", "no child is left"]


def test_threads_that_a_library_stops_for_a_fork_do_not_count(tmp_path: Path) -> None:
    """numpy's OpenBLAS starts a thread per core at its import, and stops them in a handler of pthread_atfork."""
    said = run(
        tmp_path,
        """
        fork.close()
        os.environ["OPENBLAS_NUM_THREADS"] = "3"
        import numpy
        assert len(os.listdir("/proc/self/task")) > 1, "this numpy proves nothing"
        fork = reserve_fork()
        numpy.ones((300, 300)) @ numpy.ones((300, 300))
        process = start(describe, "word")
        process.join()
        print(process.exitcode)
        """,
    )
    assert said.splitlines()[-1] == "7"


@pytest.mark.parametrize("use", ["", "start(wait_with_parent)"])
def test_the_fork_ends_when_its_parent_is_killed(tmp_path: Path, use: str) -> None:
    with program(tmp_path, f"{use}\nprint('started', flush=True)\nthreading.Event().wait()") as process:
        assert process.stdout is not None
        process.stdout.readline()
        children = psutil.Process(process.pid).children()
        assert len(children) == 1
        process.kill()
        assert not psutil.wait_procs(children, timeout=LIMIT_S)[1]


def test_ctrl_c_does_not_end_or_interrupt_a_fork_that_waits(tmp_path: Path) -> None:
    """A terminal sends Ctrl-C to both processes. The fork would print a traceback, and be dead when it is needed."""
    text = """
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
        try:
            print("started", flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            process = start(describe, "word")
            process.join()
            print(process.exitcode)
    """
    with program(tmp_path, text) as process:
        assert process.stdout is not None
        process.stdout.readline()
        (child,) = psutil.Process(process.pid).children()
        child.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGINT)
        said, _ = process.communicate(timeout=LIMIT_S)
    assert said.splitlines() == ["word True EngineCore", "None", "7"]


def test_a_fork_that_was_killed_while_it_waited_is_an_error_at_its_start(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
        os.kill(fork.pid, signal.SIGKILL)
        os.waitid(os.P_PID, fork.pid, os.WEXITED | os.WNOWAIT)
        try:
            start(describe, "word")
        except OSError as error:
            print(type(error).__name__)
        """,
    )
    assert said.splitlines() == ["BrokenPipeError"]


def test_a_fork_that_is_not_used_is_ended_and_reaped(tmp_path: Path) -> None:
    said = run(
        tmp_path,
        """
        fork.close()
        fork.close()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            print("no child is left")
        """,
    )
    assert said.splitlines() == ["no child is left"]


def test_libraries_that_only_a_new_process_can_load_are_found(tmp_path: Path) -> None:
    maps = "7f00-7f01 r-xp 00000000 08:01 123   /lib/a name.so\n7f02-7f03 rw-p 00000000 00:00 0\n"
    assert find_missing_preloads({}, maps) == []
    assert find_missing_preloads({"LD_PRELOAD": ""}, maps) == []
    assert find_missing_preloads({"LD_PRELOAD": "/lib/other.so"}, maps) == ["/lib/other.so"]
    library = tmp_path / "libgomp.so.1"
    library.touch()
    link = tmp_path / "link.so"
    link.symlink_to(library)
    loaded = f"7f00-7f01 r-xp 00000000 08:01 123   {library}\n"
    assert find_missing_preloads({"LD_PRELOAD": f"{link}:{library}"}, loaded) == []
    assert find_missing_preloads({"LD_PRELOAD": f"{link}:/lib/tcmalloc.so"}, loaded) == ["/lib/tcmalloc.so"]
