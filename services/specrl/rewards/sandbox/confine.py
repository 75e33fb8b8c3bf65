"""One untrusted Python program, confined by the operating system, and the news of how it ended.

Called by `code.Trial` in a worker. Invariants: the program inherits nothing but the descriptors it is given;
how it ended is said by a guardian that it cannot reach; and when `Confined.end` has returned, no process of it lives.

    worker --fork--> guardian --fork--> program                            isolation: Landlock
    worker --fork--> A --fork--> guardian (1 of its namespace) --fork--> program     isolation: Namespaces

The guardian waits for three things: the program's end; its leash, a socket whose other end only the worker has, so
that it ends with the worker however that dies; its parent's death. When the program has ended it says so, and keeps it
unreaped until the worker has read the kernel's counters of it (`waiting`) and lets go of the leash. Then it kills what
is left, reaps it, and reports.
With namespaces the kernel kills what is left when the guardian is gone, and no process can leave a namespace. Without,
the program can start none. The worker's waits for a guardian end because killing needs nobody's consent.

RLIMIT_NPROC counts the processes of a user in a user namespace: each program has a namespace of its own, and a user of
its own even where the worker is root, whom that limit does not bind.
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
"""The program's user and group, by custom those of nobody."""
_NAMESPACES = (
    kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWNS
    | kernel.CLONE_NEWPID
    | kernel.CLONE_NEWNET
    | kernel.CLONE_NEWIPC
    | kernel.CLONE_NEWUTS
)
_OPEN_FILES = 64
_HIGH = 200
"""Descriptors are moved up here while 0, 1, 2... are filled; higher than any of them."""
_START_S = 10
"""Longest wait for a fork and a few system calls on a loaded machine."""
_IS_OVER = b"\n"
_TIME_IS_UP = "time is up"
_WORDLESS = "the sandbox's guardian ended without a word"
_SWEEP_MS = 100
"""How often the guardian reaps orphans, which count as processes until then."""


@dataclass(frozen=True)
class Confinement:
    """What the operating system enforces on one program."""

    isolation: Isolation
    cpu_s: int
    memory_bytes: int
    processes: int
    scratch_bytes: int
    packages: str | None


@dataclass(frozen=True)
class Program:
    """`script` of `inside/`, and what its descriptors 0, 1, 2... are; None is /dev/null."""

    script: str
    descriptors: tuple[int | None, ...]
    arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ending:
    """How a program ended: its exit status, negative the signal that killed it; None when its time was up."""

    status: int | None


class CannotConfine(OSError):
    """The machine does not permit the isolation that was asked for; the message says which step it refused."""


class Confined:
    """A confined program. `report` becomes readable when it is over; its counters can be read until `end`."""

    def __init__(self, pid: int, leash: socket.socket, report: int, wrappers: int) -> None:
        self._pid = pid
        self.tree = ProgramTree(pid, wrappers)
        self._leash = leash
        self.report = report
        self._ending: Ending | None = None

    def end(self) -> Ending:
        """Kill what still runs, wait for it, and say how the program ended. May be called again.

        Raises CannotConfine when it never started.
        """
        if self._ending is None:
            self._leash.close()
            said = b"".join(iter(lambda: os.read(self.report, 4096), b""))
            os.close(self.report)
            os.waitpid(self._pid, 0)
            self._ending = _read_report(said)
        return self._ending


def start(program: Program, limits: Confinement) -> Confined:
    """Start a program. Raises CannotConfine when the machine refuses; some refusals are only known to `end`."""
    report, theirs = os.pipe()
    leash, end_of_leash = socket.socketpair()
    worker = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        _in_child(lambda: _confine(program, limits, _Ties(worker, theirs, end_of_leash)), theirs)
    os.close(theirs)
    end_of_leash.close()
    confined = Confined(pid, leash, report, 2 if limits.isolation is Isolation.NAMESPACES else 1)
    if limits.isolation is Isolation.NAMESPACES:
        try:
            _map_users(pid, leash)
        except OSError as error:
            try:
                confined.end()
            except CannotConfine as said:
                if str(said) != _WORDLESS:  # what went wrong in the child is why this end saw nothing
                    raise
            raise CannotConfine(f"user namespace: {error}") from error
    return confined


@dataclass(frozen=True)
class _Ties:
    """What connects the confined side with its worker."""

    worker: int
    report: int
    leash: socket.socket


def _map_users(pid: int, leash: socket.socket) -> None:
    """Give the new user namespace its users: nobody, and root, who owns Python's files, where we are root."""
    leash.settimeout(_START_S)
    if leash.recv(1) != b"u":
        raise OSError("it could not be made")
    user, group = os.geteuid(), os.getegid()
    if user == 0:
        lines = {"uid_map": f"0 0 1\n{_NOBODY} {_NOBODY} 1\n", "gid_map": f"0 0 1\n{_NOBODY} {_NOBODY} 1\n"}
    else:
        lines = {"setgroups": "deny", "uid_map": f"{_NOBODY} {user} 1\n", "gid_map": f"{_NOBODY} {group} 1\n"}
    for name, line in lines.items():
        Path(f"/proc/{pid}/{name}").write_text(line, encoding="ascii")
    leash.sendall(b"m")


def _in_child(run: Callable[[], None], report: int) -> NoReturn:
    """Run a function that does not return, in a process that was forked; report what it raises."""
    try:
        run()
    except BaseException as error:  # noqa: BLE001 - the edge of a process
        with suppress(OSError):
            os.write(report, f"!{type(error).__name__}: {error}".encode()[:2000])
    os._exit(70)


def _confine(program: Program, limits: Confinement, ties: _Ties) -> None:
    """In the first child: let go of the worker, then start the guardian, or be it."""
    given = [number for number in program.descriptors if number is not None]
    _close_others([0, 1, 2, ties.report, ties.leash.fileno(), *given])
    _reset_signals()
    kernel.die_with_parent(signal.SIGKILL)
    if os.getppid() != ties.worker:
        os._exit(0)
    if limits.isolation is Isolation.LANDLOCK:
        landlock.version()
        _guard(program, limits, ties)
    kernel.unshare(_NAMESPACES)
    ties.leash.sendall(b"u")
    if ties.leash.recv(1) != b"m":
        os._exit(0)
    guardian = os.fork()
    if guardian == 0:
        _in_child(lambda: _guard_namespace(program, limits, ties), ties.report)
    for number in (ties.report, *given):  # who reads from the program sees its end
        os.close(number)
    os.waitpid(guardian, 0)
    os._exit(0)


def _guard_namespace(program: Program, limits: Confinement, ties: _Ties) -> None:
    kernel.die_with_parent(signal.SIGKILL)
    if os.geteuid() == 0:
        os.setgroups([])
    filesystem.build_root(limits.packages, limits.scratch_bytes, _NOBODY)
    _guard(program, limits, ties)


def _guard(program: Program, limits: Confinement, ties: _Ties) -> NoReturn:
    """Start the program; kill what is left when it or its worker ends; report."""
    guardian = os.getpid()
    child = os.fork()
    if child == 0:
        _in_child(lambda: _become(program, limits, guardian), ties.report)
    for number in (0, 1, 2, *(number for number in program.descriptors if number is not None)):
        with suppress(OSError):
            os.close(number)
    watched = os.pidfd_open(child)
    poll = select.poll()
    poll.register(watched, select.POLLIN)
    poll.register(ties.leash, select.POLLIN)
    while not (ready := poll.poll(_SWEEP_MS)):
        with suppress(ChildProcessError):
            while (found := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and found.si_pid != child:
                os.waitpid(found.si_pid, 0)
    is_over = any(number == watched for number, _ in ready)
    if is_over:
        os.write(ties.report, _IS_OVER)
        poll.unregister(watched)
        poll.poll()  # until the worker has read the program's counters and lets go of the leash, or is gone
    with suppress(ProcessLookupError):
        os.kill(-1 if limits.isolation is Isolation.NAMESPACES else child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    with suppress(OSError):
        os.write(ties.report, f">{status if is_over else _TIME_IS_UP}".encode())
    os._exit(0)


def _become(program: Program, limits: Confinement, guardian: int) -> None:
    """In the last child: put every restriction on, then turn into the program."""
    has_namespaces = limits.isolation is Isolation.NAMESPACES
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
        folders = [*filesystem.readable(), *(Path(place) for place in places if place is not None)]
        landlock.allow_reading_only([*folders, Path("/dev/null")])
    command = [str(filesystem.INTERPRETER), "-I", "-S", "-B", "-X", "utf8", f"{places[0]}/{program.script}"]
    command += [places[1] or "", *program.arguments]
    environment = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    if has_namespaces:
        environment |= {"HOME": filesystem.SCRATCH, "TMPDIR": filesystem.SCRATCH}
    seccomp.install(has_namespaces=has_namespaces)
    _limit(limits)
    os.execve(command[0], command, environment)  # noqa: S606 - no shell is wanted


def _become_nobody() -> None:
    if os.geteuid() == 0:
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)


def _limit(limits: Confinement) -> None:
    """Soft limits equal hard ones, so that the kernel kills at once and no handler is asked."""
    wanted = {
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_CPU: limits.cpu_s,
        resource.RLIMIT_FSIZE: limits.scratch_bytes,
        resource.RLIMIT_NOFILE: _OPEN_FILES,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if limits.isolation is Isolation.NAMESPACES:
        # Two more where nobody is the worker's own user, whom the guardian and its parent belong to.
        wanted[resource.RLIMIT_NPROC] = limits.processes + 2
    wanted[resource.RLIMIT_AS] = limits.memory_bytes  # last: from here on this process may get no more memory
    for limit, most in wanted.items():
        resource.setrlimit(limit, (most, most))


def _take_descriptors(wanted: tuple[int | None, ...]) -> None:
    """Make `wanted` the descriptors 0, 1, 2..., and all others close with the next program."""
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator's; a program in a session of its own gets none
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _close_others(kept: Iterable[int]) -> None:
    lowest = 0
    for number in sorted(set(kept)):
        if lowest < number:  # CPython up to 3.13 takes an empty range from 0 for everything
            os.closerange(lowest, number)
        lowest = number + 1
    os.closerange(lowest, os.sysconf("SC_OPEN_MAX"))


def _read_report(said: bytes) -> Ending:
    text = said.decode(errors="replace")
    if text.startswith("!"):
        raise CannotConfine(text[1:].partition(">")[0].strip())
    _, has_ended, how = text.partition(">")
    if not has_ended:
        raise CannotConfine(_WORDLESS)
    return Ending(None if how == _TIME_IS_UP else int(how))
