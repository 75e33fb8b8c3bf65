"""Forks a process before its task is known. It has the imports of this process, and none of its threads.

    fork = reserve_fork()        while this process has one thread
    context = ForkContext(fork)  a multiprocessing context, whose first process runs in the fork
    fork.close()                 ends a fork that was not used

vLLM starts its engine core through multiprocessing. A spawned core imports vLLM again, which costs 15 CPU seconds. It
cannot be forked at that time: the replica then has threads of gRPC and others. A fork has only the thread that forked,
and a lock that another one held stays locked in it.

    WAITING --task arrives--> RUNNING --target returns--> ended
       |  this process closes the pipe, or is dead          ^
       +----------------------------------------------------+

The fork waits without bound for its task. Only this process can write to the pipe, and its end closes it. The task is
what multiprocessing would send to a spawned process. So pickling, process names and exit codes are as there.

Called by `generation.vllm_backend.launch`.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import signal
import sys
import traceback
from collections.abc import Mapping
from multiprocessing import popen_fork, reduction, spawn, util
from multiprocessing.context import SpawnContext, SpawnProcess, set_spawning_popen
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn


class ReservedFork:
    """A child process that waits for a task. Use `reserve_fork`.

    sentinel: file descriptor that is readable when the child has ended. task: end of the pipe for its task; the child
    also takes its closing for the end of this process.
    """

    def __init__(self) -> None:
        self.is_used = False
        self.sentinel, held_by_child = os.pipe()
        received, self.task = os.pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        # A terminal sends Ctrl-C to all its processes. The child ignores it, since it ends with this process; vLLM's
        # engine core sets its own handler. It is blocked until the child does.
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        self.pid = os.fork()
        if self.pid == 0:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
            os.close(self.sentinel)
            os.close(self.task)
            _run_task(received)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
        os.close(held_by_child)
        os.close(received)

    def close(self) -> None:
        """End the child if it was not used. Idempotent."""
        if self.is_used:
            return
        self.is_used = True
        os.close(self.task)
        os.close(self.sentinel)
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def reserve_fork() -> ReservedFork | None:
    """Fork this process. Returns None if it has threads, and leaves no child then."""
    gc.freeze()  # a collection in the child would otherwise copy the pages of all imported modules
    fork = ReservedFork()
    # Counted after the fork: OpenBLAS starts threads at numpy's import, and ends them itself in a handler of
    # pthread_atfork. Threads that are still there may have held locks.
    if len(list(Path("/proc/self/task").iterdir())) == 1:
        return fork
    fork.close()
    return None


class ForkContext(SpawnContext):
    """A multiprocessing context. Its first process runs in a reserved fork; it spawns all others."""

    def __init__(self, fork: ReservedFork) -> None:
        super().__init__()
        self._fork = fork

    def Process(self, *args: Any, **keywords: Any) -> SpawnProcess:  # type: ignore[override]  # a class in its base
        """Create a process that is not started yet."""
        if self._fork.is_used:
            return SpawnProcess(*args, **keywords)
        process = ForkedProcess(*args, **keywords)
        process.fork = self._fork
        return process


class ForkedProcess(SpawnProcess):
    """A process that runs in a reserved fork, with the environment of the process that starts it."""

    fork: ReservedFork | None = None
    environment: Mapping[str, str]

    def start(self) -> None:
        """Send the task to the fork."""
        self.environment = dict(os.environ)
        super().start()

    def run(self) -> None:
        """Run the target. Called in the fork."""
        os.environ.clear()
        os.environ.update(self.environment)
        super().run()

    @staticmethod
    def _Popen(process_obj: BaseProcess) -> Any:
        return _Popen(process_obj)

    @staticmethod
    def _after_fork() -> None:
        BaseProcess._after_fork()  # type: ignore[attr-defined]  # SpawnProcess's own assumes a new interpreter


class _Popen(popen_fork.Popen):
    method = "spawn"

    def duplicate_for_child(self, fd: int) -> int:
        raise ValueError(f"a reserved fork cannot be given file descriptors, got {fd}; spawn the process")

    def _launch(self, process_obj: Any) -> None:
        fork: ReservedFork = process_obj.fork
        process_obj.fork = None  # it is not part of the task
        task = io.BytesIO()
        set_spawning_popen(self)  # type: ignore[arg-type]  # typeshed names the Popen of spawn and forkserver
        try:
            reduction.dump(spawn.get_preparation_data(process_obj.name), task)
            reduction.dump(process_obj, task)
        finally:
            set_spawning_popen(None)
        fork.is_used = True
        self.pid = fork.pid
        self.sentinel = fork.sentinel
        self.finalizer = util.Finalize(self, util.close_fds, (fork.sentinel, fork.task))  # type: ignore[attr-defined]
        with open(fork.task, "wb", closefd=False) as pipe:
            pipe.write(task.getbuffer())


def _run_task(task: int) -> NoReturn:
    """Wait for a task, run it, and exit. task: file descriptor that it arrives at."""
    code = 1
    try:
        atexit._clear()  # what the parent wanted to do at its own exit
        parent = os.dup(task)
        code = spawn._main(task, parent)
    except EOFError:
        code = 0  # the parent needs no task or is dead
    except BaseException:  # noqa: BLE001 - the edge of a process
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(code)  # returning would run the parent's code
