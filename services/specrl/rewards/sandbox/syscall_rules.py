"""Decides for each system call whether a confined program may use it. `seccomp` makes the kernel enforce it.

The lists of allowed calls are what CPython 3.12 and 3.13, the C library and common packages use. They were traced over
the standard library and over NumPy, SciPy, pandas, SymPy, NetworkX, Numba and PyArrow
(docs/decisions/0052-system-calls-are-allowed-by-name.md). Nothing else is allowed:

- a call of `SUCCEEDS` does nothing and reports success
- a call of `ABSENT`, and a number that `syscall_numbers` does not name, answers ENOSYS, so that libraries fall back
- every other call answers EPERM

No allowed call takes a resource that the kernel counts for a user or for the machine, beyond what docs/sandbox.md says.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

_BOTH = """
read write readv writev pread64 pwrite64 preadv pwritev open openat close close_range lseek stat fstat lstat newfstatat
statx statfs fstatfs access faccessat faccessat2 getdents64 readlink readlinkat getcwd chdir fchdir umask getxattr
lgetxattr fgetxattr listxattr llistxattr flistxattr

dup dup2 dup3 fcntl ioctl pipe pipe2 poll ppoll select pselect6 socketpair sendto recvfrom shutdown getsockname
getpeername getsockopt

mmap mprotect munmap mremap brk madvise

rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack pause alarm getitimer
setitimer nanosleep clock_nanosleep clock_gettime clock_getres gettimeofday time times restart_syscall

execve exit exit_group wait4 waitid futex set_robust_list set_tid_address rseq arch_prctl prctl getpid getppid gettid
getpgid getpgrp getsid getuid geteuid getgid getegid getresuid getresgid getgroups getrlimit prlimit64
getrusage sched_yield sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
getcpu sysinfo uname getrandom
"""
_CHILDREN_AND_THREADS = "fork vfork clone kill tkill tgkill setsid setpgid"
"""They end with their process namespace."""
_CHANGES_OF_FILES = """
creat mkdir mkdirat rmdir rename renameat renameat2 link linkat symlink symlinkat unlink unlinkat truncate ftruncate
fallocate chmod fchmod fchmodat fchmodat2 utime utimes futimesat utimensat
"""
"""Only the scratch folder can be changed."""
_WRITES_TO_DISKS = "sync syncfs fsync fdatasync msync sync_file_range fadvise64 readahead"
_FALLBACKS = """
clone3 epoll_create epoll_create1 openat2 copy_file_range pidfd_open preadv2 pwritev2 futex_waitv futex_wake futex_wait
futex_requeue
"""

ALLOWED = frozenset(_BOTH.split())
"""Calls that are allowed in both isolations, within `RULES`."""

ALLOWED_WITH_NAMESPACES = frozenset(_CHILDREN_AND_THREADS.split() + _CHANGES_OF_FILES.split())
"""Further calls of `isolation: Namespaces`."""

SUCCEEDS = frozenset(_WRITES_TO_DISKS.split())
"""Calls that do nothing and report success. The scratch folder is in memory, so there is nothing to write. With one of
the host's files they would make its disk write, or drop what the machine has cached."""

ABSENT = frozenset(_FALLBACKS.split())
"""Calls that answer ENOSYS, as on an older kernel, because libraries do without them then. clone3 has its flags in
memory, where a filter cannot see them. The watches of epoll are counted for the user: `selectors` and asyncio use poll
instead."""


class Test(Enum):
    """How an argument is tested."""

    IS_ONE_OF = auto()
    HAS_NO_BIT_OF = auto()
    IS_NULL = auto()


@dataclass(frozen=True)
class ArgumentRule:
    """What an allowed call's argument must be.

    argument: its place, from 0. Its lower 32 bits are tested, and all 64 for IS_NULL: the kernel takes the tested
    arguments as 32-bit numbers. values: of the test. error: errno of a call that breaks the rule.
    """

    argument: int
    test: Test
    values: tuple[int, ...] = ()
    error: int = errno.EPERM


_CLONE_FLAGS = 0x017D_4FFF
"""The signal at its end, and VM, FS, FILES, SIGHAND, VFORK, THREAD, SYSVSEM, SETTLS, PARENT_SETTID, CHILD_CLEARTID,
DETACHED and CHILD_SETTID: what fork, posix_spawn and pthread_create of glibc and musl use. Not among them are PARENT
and the flags of namespaces."""
_WRITING = 0o1103
"""O_WRONLY, O_RDWR, O_CREAT and O_TRUNC, on both architectures."""
_DUPLICATE_AND_FLAGS = (0, 1, 2, 3, 4, 1030, 1032)
"""F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC, F_GETPIPE_SZ. Not among them: locks and leases, which
others would notice and no limit counts; owners of signals; sizes of pipes; seals."""
_TERMINAL_AND_FLAGS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""
_ADVICE = (0, 1, 2, 3, 4, 8, 10, 11, 14, 15, 16, 17, 18, 19, 102, 103)
"""NORMAL, RANDOM, SEQUENTIAL, WILLNEED, DONTNEED, FREE, DONTFORK, DOFORK, HUGEPAGE, NOHUGEPAGE, DONTDUMP, DODUMP,
WIPEONFORK, KEEPONFORK, GUARD_INSTALL, GUARD_REMOVE."""
_SOCKET_FACTS = (3, 4, 7, 8, 38, 39)
"""SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PROTOCOL, SO_DOMAIN."""
_CHANGEABLE_LIMITS = (0, 1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15)
"""All but RLIMIT_CORE. Others can only be lowered, which bounds the program further."""
_STREAMS = (0x0_0001, 0x0_0801, 0x8_0001, 0x8_0801)
"""SOCK_STREAM, also with SOCK_NONBLOCK and SOCK_CLOEXEC. A datagram socket of a pair could be connected to another's
address; a stream cannot."""

RULES: Mapping[str, tuple[ArgumentRule, ...]] = {
    # PR_SET_NAME, PR_GET_NAME. With others a program could clear its parent-death signal.
    "prctl": (ArgumentRule(0, Test.IS_ONE_OF, (15, 16)),),
    "arch_prctl": (ArgumentRule(0, Test.IS_ONE_OF, (0x1001, 0x1002, 0x1003, 0x1004), errno.EINVAL),),  # FS and GS
    "clone": (ArgumentRule(0, Test.HAS_NO_BIT_OF, (0xFFFF_FFFF & ~_CLONE_FLAGS,)),),
    "prlimit64": (
        ArgumentRule(0, Test.IS_ONE_OF, (0,)),  # of oneself only
        ArgumentRule(1, Test.IS_ONE_OF, _CHANGEABLE_LIMITS),
    ),
    "fcntl": (ArgumentRule(1, Test.IS_ONE_OF, _DUPLICATE_AND_FLAGS),),
    "ioctl": (ArgumentRule(1, Test.IS_ONE_OF, _TERMINAL_AND_FLAGS, errno.ENOTTY),),
    "mmap": (ArgumentRule(3, Test.HAS_NO_BIT_OF, (0x4_0000,)),),  # MAP_HUGETLB, whose pages the machine counts
    "madvise": (ArgumentRule(2, Test.IS_ONE_OF, _ADVICE, errno.EINVAL),),
    "socketpair": (
        ArgumentRule(0, Test.IS_ONE_OF, (1,)),  # AF_UNIX
        ArgumentRule(1, Test.IS_ONE_OF, _STREAMS),
    ),
    "sendto": (ArgumentRule(4, Test.IS_NULL),),  # no address: what `send` passes
    "getsockopt": (ArgumentRule(2, Test.IS_ONE_OF, _SOCKET_FACTS, errno.ENOPROTOOPT),),
}
"""What the arguments of allowed calls must be."""

RULES_WITHOUT_NAMESPACES: Mapping[str, tuple[ArgumentRule, ...]] = {
    "open": (ArgumentRule(1, Test.HAS_NO_BIT_OF, (_WRITING,)),),
    "openat": (ArgumentRule(2, Test.HAS_NO_BIT_OF, (_WRITING,)),),
}
"""Further rules of `isolation: Landlock`: files are only read there."""


def list_allowed_calls(*, has_namespaces: bool) -> frozenset[str]:
    """List the calls that an isolation allows, within its rules."""
    return ALLOWED | ALLOWED_WITH_NAMESPACES if has_namespaces else ALLOWED


def list_rules(*, has_namespaces: bool) -> Mapping[str, tuple[ArgumentRule, ...]]:
    """List the rules on arguments of an isolation, by call."""
    return RULES if has_namespaces else {**RULES, **RULES_WITHOUT_NAMESPACES}
