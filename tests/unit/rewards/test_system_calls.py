"""Which system calls a confined program may use: the filter's decision about every number, and the numbers themselves.

The filter is interpreted here as the kernel would. `tests/integration/rewards/test_hostile_answers.py` asks a kernel.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import pytest

from specrl.rewards.sandbox import seccomp, syscall_rules
from specrl.rewards.sandbox.syscall_numbers import NUMBERS

AUDIT = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}
ALLOW = 0x7FFF_0000
SUCCEED = 0x0005_0000
DENY = 0x0005_0001
NO_SUCH_CALL = 0x0005_0026
KILL = 0x8000_0000
BEYOND = 600
"""The newest call of Linux 6.18 is 469."""

IN_BOTH = """
read write open close stat fstat lstat poll lseek mmap mprotect munmap brk rt_sigaction rt_sigprocmask rt_sigreturn
ioctl pread64 pwrite64 readv writev access pipe select sched_yield mremap madvise dup dup2 pause nanosleep getitimer
alarm setitimer getpid sendto recvfrom shutdown getsockname getpeername socketpair getsockopt execve exit wait4 uname
fcntl getcwd chdir fchdir readlink umask gettimeofday getrlimit getrusage sysinfo times getuid getgid geteuid getegid
getppid getpgrp getgroups getresuid getresgid getpgid getsid rt_sigpending rt_sigtimedwait rt_sigsuspend sigaltstack
statfs fstatfs sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min prctl arch_prctl
gettid getxattr lgetxattr fgetxattr listxattr llistxattr flistxattr time futex sched_getaffinity getdents64
set_tid_address restart_syscall clock_gettime clock_getres clock_nanosleep exit_group waitid openat newfstatat
readlinkat faccessat pselect6 ppoll set_robust_list dup3 pipe2 preadv pwritev prlimit64 getcpu getrandom statx rseq
close_range faccessat2
"""
ONLY_WITH_NAMESPACES = """
clone fork vfork kill tkill tgkill setsid setpgid truncate ftruncate rename mkdir rmdir creat link unlink symlink chmod
fchmod utime utimes mkdirat futimesat unlinkat renameat linkat symlinkat fchmodat fallocate utimensat renameat2
fchmodat2
"""


@functools.cache
def build_filter_once(machine: str, has_namespaces: bool) -> list[seccomp.Instruction]:
    return seccomp.build_filter(machine, has_namespaces=has_namespaces)


def verdict_of(
    machine: str, number: int, *arguments: int, has_namespaces: bool = True, audit: int | None = None
) -> int:
    """Interpret the filter as the kernel would, and return its decision. arguments: of the call; 0 for the others."""
    data = {0: number, 4: AUDIT[machine] if audit is None else audit}
    for place in range(6):
        value = arguments[place] if place < len(arguments) else 0
        data |= {16 + 8 * place: value & 0xFFFF_FFFF, 20 + 8 * place: value >> 32}
    lines = build_filter_once(machine, has_namespaces)
    place = accumulator = 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = data[operand]
            continue
        holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[code]
        place += if_true if holds else if_false


ACCEPTED = {
    "prctl": (15,),
    "arch_prctl": (0x1002,),
    "socketpair": (1, 1),
    "ioctl": (0, 0x5401),
    "getsockopt": (0, 1, 3),
}
"""Arguments that pass the rules, of calls whose rules refuse zeros."""


@pytest.mark.parametrize("machine", AUDIT)
@pytest.mark.parametrize("has_namespaces", [True, False], ids=["namespaces", "landlock"])
def test_exactly_the_named_calls_are_allowed(machine: str, has_namespaces: bool) -> None:
    """Calls that nobody had thought of used to be allowed: aio, inotify, sync."""
    column = list(AUDIT).index(machine)
    names = {numbers[column]: name for name, numbers in NUMBERS.items() if numbers[column] is not None}
    allowed = set()
    for number in range(BEYOND):
        name = names.get(number, "")
        decision = verdict_of(machine, number, *ACCEPTED.get(name, ()), has_namespaces=has_namespaces)
        if decision == ALLOW:
            allowed.add(name)
        elif not name:
            assert decision == NO_SUCH_CALL, number
        else:
            assert decision in (DENY, NO_SUCH_CALL, SUCCEED), name
    expected = {*IN_BOTH.split(), *(ONLY_WITH_NAMESPACES.split() if has_namespaces else ())}
    assert allowed == expected & set(names.values())


def test_every_name_of_the_rules_is_a_call() -> None:
    lists = (syscall_rules.ALLOWED, syscall_rules.ALLOWED_WITH_NAMESPACES, syscall_rules.SUCCEEDS, syscall_rules.ABSENT)
    named = frozenset[str]().union(*lists)
    assert named <= set(NUMBERS)
    assert sum(map(len, lists)) == len(named), "each has one decision"
    assert {*syscall_rules.RULES, *syscall_rules.RULES_WITHOUT_NAMESPACES} <= lists[0] | lists[1]


def test_other_tables_of_calls_end_the_program() -> None:
    """x86-64 has two more tables: x32's numbers, and 32-bit code."""
    for number in (0x4000_0000, 0x4000_0000 + 520, 0x7FFF_FFFF, 0xFFFF_FFFF):
        assert verdict_of("x86_64", number) == KILL
    for machine in AUDIT:
        assert verdict_of(machine, 0, audit=0x4000_0003) == KILL
    assert verdict_of("aarch64", 0x4000_0000) == NO_SUCH_CALL


NULL_ADDRESS = (3, 1, 1, 0)
DENIED = [
    ("prctl", (1, 0)),  # PR_SET_PDEATHSIG: what ends the program with its guardian
    ("prctl", (4, 1)),
    ("prctl", (36, 1)),
    ("prctl", (0x5356_4D41, 0)),
    ("clone", (0x1000_0000,)),
    ("clone", (0x2000_0011,)),
    ("clone", (0x0000_8011,)),  # CLONE_PARENT
    ("clone", (0x8000_0011,)),  # CLONE_IO
    ("prlimit64", (1,)),
    ("prlimit64", (0, 4)),  # RLIMIT_CORE: with 0 instead of 1, a crash would start the machine's handler of crashes
    ("fcntl", (0, 6)),  # F_SETLK: locks are not bounded
    ("fcntl", (0, 7)),
    ("fcntl", (0, 37)),
    ("fcntl", (0, 8)),
    ("fcntl", (0, 10)),
    ("fcntl", (0, 15)),
    ("fcntl", (0, 1024)),
    ("fcntl", (0, 1026)),
    ("fcntl", (0, 1031)),
    ("mmap", (0, 4096, 3, 0x4_0022)),  # MAP_HUGETLB
    ("socketpair", (2, 1)),
    ("socketpair", (1, 2)),  # a datagram socket of a pair could be connected to another's address
    ("socketpair", (1, 5)),
    ("sendto", (*NULL_ADDRESS, 0x7FFF_0000_0000)),  # an address whose lower half is zero
    ("sendto", (*NULL_ADDRESS, 0x1000)),
]


@pytest.mark.parametrize(("name", "arguments"), DENIED)
def test_arguments_that_reach_out_of_the_sandbox_are_refused(name: str, arguments: tuple[int, ...]) -> None:
    for column, machine in enumerate(AUDIT):
        number = NUMBERS[name][column]
        assert number is not None
        for has_namespaces in (True, False):
            assert verdict_of(machine, number, *arguments, has_namespaces=has_namespaces) == DENY


FORK = 0x0120_0011
THREAD = 0x003D_0F00
SPAWN = 0x0000_4111
USED = [
    *(("clone", (flags,)) for flags in (FORK, THREAD, SPAWN)),
    *(("fcntl", (0, command)) for command in (0, 1, 2, 3, 4, 1030)),
    *(("ioctl", (0, request)) for request in (0x5401, 0x5421, 0x5451)),
    *(("madvise", (0, 0, advice)) for advice in (4, 8, 14)),
    ("mmap", (0, 4096, 3, 0x22)),
    ("socketpair", (1, 0x8_0001)),
    ("sendto", NULL_ADDRESS),
    ("prctl", (15, 0x7FFF_0000_0000)),
]


@pytest.mark.parametrize(("name", "arguments"), USED)
def test_arguments_that_python_uses_are_allowed(name: str, arguments: tuple[int, ...]) -> None:
    for column, machine in enumerate(AUDIT):
        number = NUMBERS[name][column]
        assert number is not None
        assert verdict_of(machine, number, *arguments) == ALLOW


def test_with_landlock_the_filter_forbids_writing_too() -> None:
    for flags in (0o1, 0o2, 0o100, 0o1000, 0o2101):
        assert verdict_of("x86_64", 2, 0, flags, has_namespaces=False) == DENY
        assert verdict_of("x86_64", 257, 0, 0, flags, has_namespaces=False) == DENY
        assert verdict_of("aarch64", 56, 0, 0, flags, has_namespaces=False) == DENY
    assert verdict_of("x86_64", 257, 0, 0, 0o2000000, has_namespaces=False) == ALLOW
    assert verdict_of("x86_64", 257, 0, 0, 0o2101) == ALLOW


NOT_CALLS_OF_64_BIT_ARM = ("syscalls", "arch_specific_syscall", "sync_file_range2", "mmap2", "llseek")


@pytest.mark.parametrize(("column", "pattern"), [(0, "**/asm/unistd_64.h"), (1, "asm-generic/unistd.h")])
def test_numbers_are_those_of_the_kernels_headers(column: int, pattern: str) -> None:
    """Every call of this machine's headers has its number in the table, or is newer than the table."""
    header = next(Path("/usr/include").glob(pattern), None)
    if header is None:
        pytest.skip(f"unproven that the numbers are the kernel's: there is no {pattern} (package linux-libc-dev)")
    text = header.read_text(encoding="utf-8")
    found = {name: int(number) for name, number in re.findall(r"#define __NR_(\w+)\s+(\d+)$", text, re.MULTILINE)}
    shared = {name: int(number) for name, number in re.findall(r"#define __NR3264_(\w+)\s+(\d+)$", text, re.MULTILINE)}
    for name, of in re.findall(r"#define __NR_(\w+)\s+__NR3264_(\w+)$", text, re.MULTILINE):
        if of in shared and (not name.endswith("64") or name in NUMBERS):  # fcntl64 is for 32-bit machines
            found[name] = shared[of]
    only_32_bit = range(403, 424) if column == 1 else ()
    newest = max(numbers[column] or 0 for numbers in NUMBERS.values())
    known = {
        name: number
        for name, number in found.items()
        if number not in only_32_bit and number <= newest and name not in NOT_CALLS_OF_64_BIT_ARM
    }
    assert len(known) > 290
    assert {name: NUMBERS.get(name, (None, None))[column] for name in known} == known
