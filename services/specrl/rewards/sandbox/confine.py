"""Runs one untrusted Python program, confined by the operating system, and reports how it ended.

Called by `code.sandbox_runner` in a worker. Invariants:

- The program inherits only the descriptors that it is given.
- A guardian process that the program cannot reach reports how it ended.
- When `ConfinedProgram.end` has returned, no process of the program is left.

    worker --fork--> guardian --fork--> program                            isolation: Landlock
    worker --fork--> A --fork--> guardian (1 of its namespace) --fork--> program     isolation: Namespaces

The guardian waits for one of two events: the program ends, or the worker closes the leash. The leash is a socket. Only
the worker has its other end, so the leash also closes when the worker dies. When the program has ended, the guardian
tells the worker. It reaps the program only after the worker has closed the leash, so that the worker can read the
kernel's counters first (`waiting`). Then it kills and reaps all remaining processes, and reports the exit status.

What ends a program together with its worker, each out of the program's reach:

- The leash. The guardian outlives the worker, in a session of its own, until it has killed the program.
- If the guardian is killed from outside: with namespaces, it is process 1, so the kernel kills every process of its
  namespace, and no process can leave that. Without namespaces, the program receives SIGKILL when the guardian dies. The
  filter forbids to change that, and the program cannot start processes.

The worker waits for the guardian without a limit: once the leash is closed, the guardian waits only for processes that
it has killed.

RLIMIT_NPROC counts the processes of a user within a user namespace, and does not bind root. So each program has its
own namespace, and runs as another user than root even if the worker is root.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from specrl.rewards.sandbox import filesystem, kernel, landlock, seccomp
from specrl.rewards.sandbox.waiting import ProgramTree
from specrl.spec.data import Isolation

_NOBODY = 65534
"""The program's user and group: by convention the ids of `nobody`."""
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_OPEN_FILES = 64
"""Descriptors of each process. They bound the kernel's buffers of its pipes and sockets, see docs/sandbox.md."""
_HIGH = 200
"""Descriptors are moved up here while 0, 1, 2... are filled; higher than any of them."""
_START_S = 10
"""Longest wait for a fork and a few system calls on a loaded machine."""
_IS_OVER = b"\n"
_TIME_IS_UP = "time is up"
_NO_REPORT = "the sandbox's guardian ended without a word"
_SWEEP_MS = 100
"""How often the guardian reaps orphans. Until then they count as processes of RLIMIT_NPROC."""
_MOST_REAPED = 64
"""Orphans of one sweep. A program that makes them faster than they are reaped must not keep the guardian from its
leash."""


@dataclass(frozen=True)
class ConfinementLimits:
    """Limits of one program that the operating system enforces. isolation: Namespaces or Landlock."""

    isolation: Isolation
    cpu_s: int
    memory_bytes: int
    processes: int
    scratch_bytes: int
    packages: str | None


@dataclass(frozen=True)
class SandboxProgram:
    """A script of `inside/`. descriptors: what its descriptors 0, 1, 2... are; None is /dev/null."""

    script: str
    descriptors: tuple[int | None, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProgramExit:
    """How a program ended. status: its exit status; -N after signal N; None if its time was up."""

    status: int | None


class CannotConfine(OSError):
    """The machine does not permit the requested isolation. The message names the step that failed."""


class ConfinedProgram:
    """A confined program. `report` becomes readable when it has ended. Its counters can be read until `end`."""

    def __init__(self, pid: int, leash: socket.socket, report: int, wrappers: int) -> None:
        self._pid = pid
        self.tree = ProgramTree(pid, wrappers)
        self._lifeline = leash
        self.report = report
        self._ending: ProgramExit | None = None

    def end(self) -> ProgramExit:
        """Kill its processes, wait for their end, and return how the program ended. May be called again.

        Raises CannotConfine when it never started.
        """
        if self._ending is None:
            self._lifeline.close()
            said = b"".join(iter(lambda: os.read(self.report, 4096), b""))
            os.close(self.report)
            os.waitpid(self._pid, 0)
            self._ending = _read_report(said)
        return self._ending


def start_program(program: SandboxProgram, limits: ConfinementLimits) -> ConfinedProgram:
    """Start a program. Raises CannotConfine if the machine refuses; `end` raises it for refusals in the child."""
    assert limits.isolation is not Isolation.AUTO, "it is chosen before"
    report, theirs = os.pipe()
    leash, end_of_leash = socket.socketpair()
    worker = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: _confine_child(program, limits, _WorkerLink(worker, theirs, end_of_leash)), theirs)
    os.close(theirs)
    end_of_leash.close()
    confined = ConfinedProgram(pid, leash, report, 2 if limits.isolation is Isolation.NAMESPACES else 1)
    if limits.isolation is Isolation.NAMESPACES:
        try:
            _map_namespace_users(pid, leash)
        except OSError as error:
            try:
                confined.end()
            except CannotConfine as said:
                if str(said) != _NO_REPORT:  # the child's own error explains why its end of the leash closed
                    raise
            raise CannotConfine(f"user namespace: {error}") from error
    return confined


@dataclass(frozen=True)
class _WorkerLink:
    """Ids and descriptors that connect the confined processes with their worker."""

    worker: int
    report: int
    lifeline: socket.socket


def _map_namespace_users(pid: int, leash: socket.socket) -> None:
    """Map users into the new user namespace: nobody; and if we are root, also root, who owns Python's files."""
    leash.settimeout(_START_S)
    if leash.recv(1) != b"u":
        raise OSError("it could not be made")
    user = os.geteuid()
    group = os.getegid()
    if user == 0:
        lines = {"uid_map": f"0 0 1\n{_NOBODY} {_NOBODY} 1\n", "gid_map": f"0 0 1\n{_NOBODY} {_NOBODY} 1\n"}
    else:
        lines = {"setgroups": "deny", "uid_map": f"{_NOBODY} {user} 1\n", "gid_map": f"{_NOBODY} {group} 1\n"}
    for name, line in lines.items():
        Path(f"/proc/{pid}/{name}").write_text(line, encoding="ascii")
    leash.sendall(b"m")


def _in_child(run: Callable[[], None], report: int) -> NoReturn:
    """Run a function that does not return, in a forked process, and report the error that it raises."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        with suppress(OSError):
            os.write(report, f"!{type(error).__name__}: {error}".encode()[:2000])
    os._exit(70)


def _confine_child(program: SandboxProgram, limits: ConfinementLimits, ties: _WorkerLink) -> None:
    """In the first child: close the worker's descriptors, then start the guardian or become it."""
    given = [number for number in program.descriptors if number is not None]
    _close_others([0, 1, 2, ties.report, ties.lifeline.fileno(), *given])
    _reset_signals()
    os.setsid()
    with suppress(OSError):  # a machine without memory ends programs before it ends the run
        Path("/proc/self/oom_score_adj").write_text("1000", encoding="ascii")
    if limits.isolation is Isolation.LANDLOCK:
        # Not tied to the worker by a signal: it must live on to kill the program, and its leash tells it when.
        landlock.read_version()
        _guard_program(program, limits, ties)
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != ties.worker:
        os._exit(0)
    kernel.unshare(_NAMESPACES)
    ties.lifeline.sendall(b"u")
    if ties.lifeline.recv(1) != b"m":
        os._exit(0)
    guardian = os.fork()
    if guardian == 0:
        _in_child(lambda: _guard_namespace(program, limits, ties), ties.report)
    for number in (ties.report, *given):  # who reads from the program sees its end
        os.close(number)
    os.waitpid(guardian, 0)
    os._exit(0)


def _guard_namespace(program: SandboxProgram, limits: ConfinementLimits, ties: _WorkerLink) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    if os.geteuid() == 0:
        os.setgroups([])
    filesystem.build_root(limits.packages, limits.scratch_bytes, _NOBODY)
    _guard_program(program, limits, ties)


def _guard_program(program: SandboxProgram, limits: ConfinementLimits, ties: _WorkerLink) -> NoReturn:
    """Start the program. When it or the worker ends, kill all remaining processes and report."""
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        _in_child(lambda: _execute_program(program, limits, guardian), ties.report)
    for number in (0, 1, 2, *(number for number in program.descriptors if number is not None)):
        with suppress(OSError):
            os.close(number)
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(ties.lifeline, select.POLLIN)
    while not (ready := poll.poll(_SWEEP_MS)):
        _reap_orphans(child)
    is_over = any(number == watched for number, _ in ready)
    if is_over:
        os.write(ties.report, _IS_OVER)
        poll.unregister(watched)
        poll.poll()  # until the worker closes the leash, after reading the program's counters, or dies
    with suppress(ProcessLookupError):
        os.kill(-1 if limits.isolation is Isolation.NAMESPACES else child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    with suppress(OSError):
        os.write(ties.report, f">{status if is_over else _TIME_IS_UP}".encode())
    os._exit(0)


def _reap_orphans(child: int) -> None:
    """Reap ended processes, but not the program itself, and not more than _MOST_REAPED."""
    with suppress(ChildProcessError):
        for _ in range(_MOST_REAPED):
            found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None or found.si_pid == child:
                return
            os.waitpid(found.si_pid, 0)


def _execute_program(program: SandboxProgram, limits: ConfinementLimits, guardian: int) -> None:
    """In the last child: apply every restriction, then execute the program."""
    has_namespaces = limits.isolation is Isolation.NAMESPACES
    has_own_user = has_namespaces and os.geteuid() == 0
    os.setsid()
    _take_descriptors(program.descriptors)
    places = [str(filesystem.INSIDE), limits.packages]
    if has_namespaces:
        places = [filesystem.PROGRAMS, filesystem.PACKAGES if limits.packages is not None else None]
        _become_nobody()
    os.chdir(filesystem.SCRATCH if has_namespaces else "/")
    kernel.forbid_new_privileges()
    kernel.drop_capabilities()
    if not has_namespaces:
        kernel.die_with_parent(signal.SIGKILL)
        if os.getppid() != guardian:
            os._exit(0)
        folders = [*filesystem.list_readable_folders(), *(Path(place) for place in places if place is not None)]
        landlock.allow_reading_only([*folders, Path("/dev/null")])
    command = [str(filesystem.INTERPRETER), "-I", "-S", "-B", "-X", "utf8", f"{places[0]}/{program.script}"]
    command += [places[1] or "", *program.arguments]
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    # A Python with a shared library may find it by /etc/ld.so.cache alone, which the program cannot read.
    environment["LD_LIBRARY_PATH"] = str(filesystem.INTERPRETER.parent.parent / "lib")
    if has_namespaces:
        environment |= {"HOME": filesystem.SCRATCH, "TMPDIR": filesystem.SCRATCH}
    _set_limits(limits, has_own_user=has_own_user)
    seccomp.install_filter(has_namespaces=has_namespaces)
    # Last: afterwards this process may get no more memory.
    resource.setrlimit(resource.RLIMIT_AS, (limits.memory_bytes, limits.memory_bytes))
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


def _become_nobody() -> None:
    if os.geteuid() == 0:
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _set_limits(limits: ConfinementLimits, *, has_own_user: bool) -> None:
    """Set all limits but that of memory. Soft limits equal hard ones, so that the kernel kills without a signal.

    has_own_user: whether no process outside the program counts as one of its user.
    """
    wanted = {
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.scratch_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_SIGPENDING: 0,
    }
    if limits.isolation is Isolation.NAMESPACES:
        # If the worker is not root, the guardian and its parent run as the same user and count, too.
        wanted[resource.RLIMIT_NPROC] = limits.processes + (0 if has_own_user else 2)
    kernel.forbid_core_dumps()  # the filter forbids to change this limit
    for limit, most in wanted.items():
        resource.setrlimit(limit, (most, most))


def _take_descriptors(wanted: tuple[int | None, ...]) -> None:
    """Make `wanted` the descriptors 0, 1, 2..., and let `execve` close all others."""
    import fcntl

    nothing = os.open("/dev/null", os.O_RDWR)
    sources = [nothing if number is None else number for number in wanted]
    high = [fcntl.fcntl(number, fcntl.F_DUPFD, _HIGH) for number in sources]
    for target, source in enumerate(high):
        os.dup2(source, target, inheritable=True)
    kernel.close_on_exec_from(len(wanted))


def _reset_signals() -> None:
    for signum in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        with suppress(OSError):
            signal.signal(signum, signal.SIG_DFL)
    # The coordinator handles Ctrl-C. A program has its own session, so it gets none.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_others(kept: Iterable[int]) -> None:
    lowest = 0
    for number in sorted(set(kept)):
        if lowest < number:  # CPython up to 3.13 takes an empty range from 0 for everything
            os.closerange(lowest, number)
        lowest = number + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def _read_report(said: bytes) -> ProgramExit:
    text = said.decode(errors="replace")
    if text.startswith("!"):
        raise CannotConfine(text[1:].partition(">")[0].strip())
    _, has_ended, how = text.partition(">")
    if not has_ended:
        raise CannotConfine(_NO_REPORT)
    return ProgramExit(None if how == _TIME_IS_UP else int(how))
