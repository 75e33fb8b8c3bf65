"""Restricts the system calls of a confined program, with a filter that the kernel evaluates and no process can remove.

The filter is a second line of defence behind namespaces or Landlock. It allows what `syscall_rules` lists, and nothing
else. So what the kernel gains later is closed, and so is what an answer could take from other programs of the machine.

A forbidden call fails with an error, so that a program that only tries it continues. Calls of another architecture, and
those of x86-64's second table (x32), end the program. Machines: x86-64 and 64-bit Arm.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from specrl.rewards.sandbox import kernel, syscall_rules
from specrl.rewards.sandbox.syscall_numbers import NUMBERS
from specrl.rewards.sandbox.syscall_rules import ArgumentRule, Test

_ARCHITECTURES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}
"""AUDIT_ARCH of the machine, and its column of NUMBERS."""
_X32 = 0x4000_0000
"""Numbers from here on are x86-64's second table, which NUMBERS does not cover."""

# Instructions of classic BPF, and answers of a filter (linux/bpf_common.h, linux/seccomp.h).
_LOAD = 0x20
_EQUAL = 0x15
_AT_LEAST = 0x35
_ANY_BIT = 0x45
_RETURN = 0x06
_ALLOW = 0x7FFF_0000
_ERRNO = 0x0005_0000
"""The call is not made. It fails with the errno in the lower half, or reports success if that is 0."""
_KILL_PROCESS = 0x8000_0000
_NUMBER = 0
_ARCHITECTURE = 4
_FIRST_ARGUMENT = 16
_ARGUMENT_BYTES = 8
"""Offsets in struct seccomp_data. Both architectures have the lower half of an argument first."""
_SET_MODE_FILTER = 1

Instruction = tuple[int, int, int, int]


def build_filter(machine: str, *, has_namespaces: bool) -> list[Instruction]:
    """The filter as (code, jump if true, jump if false, operand).

    The kernel remembers which numbers it always allows, so those cost a program nothing (Linux 5.11).
    """
    audit, column = _ARCHITECTURES[machine]
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)]
    allowed = syscall_rules.list_allowed_calls(has_namespaces=has_namespaces)
    rules = syscall_rules.list_rules(has_namespaces=has_namespaces)
    for name, numbers in NUMBERS.items():
        number = numbers[column]
        if number is not None:
            body = _test_arguments(rules.get(name, ())) if name in allowed else [_refuse(_choose_error(name))]
            lines += [(_EQUAL, 0, len(body), number), *body]
    return [*lines, _refuse(errno.ENOSYS)]


def install_filter(*, has_namespaces: bool) -> None:
    """Filter this thread's calls from now on, and those of all that it starts. Needs no_new_privs."""
    call = kernel.number_of("seccomp")  # known for the machines that `program` knows
    lines = build_filter(os.uname().machine, has_namespaces=has_namespaces)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    kernel.syscall("seccomp", call, _SET_MODE_FILTER, 0, described)


def _choose_error(name: str) -> int:
    """The errno of a call that is not allowed; 0 if it reports success."""
    if name in syscall_rules.SUCCEEDS:
        return 0
    return errno.ENOSYS if name in syscall_rules.ABSENT else errno.EPERM


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, _ERRNO | error)


def _test_arguments(rules: tuple[ArgumentRule, ...]) -> list[Instruction]:
    """Refuse a call that breaks one of the rules, and allow it otherwise."""
    lines: list[Instruction] = []
    for rule in rules:
        place = _FIRST_ARGUMENT + _ARGUMENT_BYTES * rule.argument
        if rule.test is Test.IS_NULL:
            for half in (place, place + 4):
                lines += [(_LOAD, 0, 0, half), (_EQUAL, 1, 0, 0), _refuse(rule.error)]
        elif rule.test is Test.HAS_NO_BIT_OF:
            lines += [(_LOAD, 0, 0, place), (_ANY_BIT, 0, 1, rule.values[0]), _refuse(rule.error)]
        else:
            # Each value jumps behind the refusal, which follows the last of them.
            left = range(len(rule.values), 0, -1)
            lines += [(_LOAD, 0, 0, place)]
            lines += [(_EQUAL, after, 0, value) for after, value in zip(left, rule.values, strict=True)]
            lines += [_refuse(rule.error)]
    return [*lines, (_RETURN, 0, 0, _ALLOW)]
