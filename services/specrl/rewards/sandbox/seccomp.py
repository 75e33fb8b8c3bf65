"""Which system calls a confined program may make: a filter that the kernel evaluates, and nobody can take off again.

The second wall behind namespaces or Landlock: calls that reach parts of the kernel which neither confines (AF_VSOCK
leaves the virtual machine whatever the network namespace), memory that no limit counts (memfd, System V), and calls
that answers have no use for and kernels have had holes in. A forbidden call fails with EPERM, so that a program which
merely tries goes on. Machine: x86-64 and 64-bit Arm; numbers from Linux' asm/unistd_64.h and asm-generic/unistd.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from specrl.rewards.sandbox import kernel

_ARCHITECTURES = {"x86_64": (0xC000_003E, 0), "aarch64": (0xC000_00B7, 1)}
"""AUDIT_ARCH of the machine, and its column below."""

_FORBIDDEN: dict[str, tuple[int | None, int | None]] = {
    # namespaces and mounts: what confines must stay
    "unshare": (272, 97), "setns": (308, 268), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41),
    "chroot": (161, 51), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433),
    "open_tree": (428, 428), "move_mount": (429, 429), "mount_setattr": (442, 442), "open_tree_attr": (467, 467),
    "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264), "fanotify_init": (300, 262),
    # other processes
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "process_madvise": (440, 440), "move_pages": (279, 239), "migrate_pages": (256, 238),
    # the schedule: an answer that waits for a processor because it wants to would get more time for it
    "setpriority": (141, 140), "ioprio_set": (251, 30), "sched_setparam": (142, 118),
    "sched_setscheduler": (144, 119), "sched_setattr": (314, 274), "sched_setaffinity": (203, 122),
    # memory that RLIMIT_AS does not count
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "shmat": (30, 196),
    "msgget": (68, 186), "msgsnd": (69, 189), "semget": (64, 190), "mq_open": (240, 180), "vmsplice": (278, 75),
    "splice": (275, 76), "tee": (276, 77), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219),
    # large or privileged parts of the kernel
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426), "io_uring_register": (427, 427), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "kexec_load": (246, 104), "kexec_file_load": (320, 294),
    "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "syslog": (103, 116),
    "quotactl": (179, 60), "personality": (135, 92), "iopl": (172, None), "ioperm": (173, None),
    "modify_ldt": (154, None), "lookup_dcookie": (212, 18), "settimeofday": (164, 170), "clock_settime": (227, 112),
    "clock_adjtime": (305, 266), "adjtimex": (159, 171), "sethostname": (170, 161), "setdomainname": (171, 162),
}  # fmt: skip

_FORBIDDEN_WITHOUT_NAMESPACES: dict[str, tuple[int | None, int | None]] = {
    # children, whom no process namespace would end
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220),
    # signals to the machine's other processes
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424),
    # changes of files that Landlock has no rule for
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6),
    "fsetxattr": (190, 7), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "setxattrat": (463, 463), "removexattrat": (466, 466), "file_setattr": (469, 469),
    "flock": (73, 32),
    # the network, for which there is no namespace; a datagram socket of a pair could be connected to another's address
    "socket": (41, 198), "socketpair": (53, 199),
}  # fmt: skip

_SOCKET, _SOCKETPAIR, _CLONE, _PRLIMIT64 = (41, 198), (53, 199), (56, 220), (302, 261)
_CLONE3 = 435
_FCNTL, _IOCTL = (72, 25), (16, 29)
_SET_OWNER = {_FCNTL: (8, 10, 15), _IOCTL: (0x8901, 0x8902)}
"""F_SETOWN, F_SETSIG, F_SETOWN_EX; FIOSETOWN, SIOCSPGRP: how to have the kernel send a signal, to any process."""
_NAMESPACES = (
    kernel.CLONE_NEWNS | kernel.CLONE_NEWUTS | kernel.CLONE_NEWIPC | kernel.CLONE_NEWUSER
    | kernel.CLONE_NEWPID | kernel.CLONE_NEWNET | kernel.CLONE_NEWCGROUP
)  # fmt: skip
_AF_UNIX = 1
_X32 = 0x4000_0000
"""Numbers from here on are x86-64's second table, which the one above does not cover."""

# Instructions of classic BPF, and answers of a filter (linux/bpf_common.h, linux/seccomp.h).
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL_PROCESS = 0x7FFF_0000, 0x0005_0000, 0x8000_0000
_NUMBER, _ARCHITECTURE, _ARGUMENT_0, _ARGUMENT_1 = 0, 4, 16, 24
"""Offsets in struct seccomp_data; of arguments their lower halves, which hold all that is tested here."""
_SET_MODE_FILTER = 1

Instruction = tuple[int, int, int, int]


def program(machine: str, *, has_namespaces: bool) -> list[Instruction]:
    """The filter as (code, jump if true, jump if false, operand)."""
    audit, column = _ARCHITECTURES[machine]
    denied = (_RETURN, 0, 0, _ERRNO | errno.EPERM)
    lines: list[Instruction] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, audit),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":
        lines += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _KILL_PROCESS)]
    forbidden = _FORBIDDEN if has_namespaces else _FORBIDDEN | _FORBIDDEN_WITHOUT_NAMESPACES
    for numbers in forbidden.values():
        number = numbers[column]
        if number is not None:
            lines += [(_EQUAL, 0, 1, number), denied]
    # glibc makes threads with clone3, whose flags a filter cannot see, and with clone where there is none.
    lines += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    lines += _where(_CLONE[column], [(_ANY_BIT, 0, 1, _NAMESPACES), denied])
    for numbers in (_SOCKET, _SOCKETPAIR):
        lines += _where(numbers[column], [(_EQUAL, 1, 0, _AF_UNIX), denied])
    lines += _where(_PRLIMIT64[column], [(_EQUAL, 1, 0, 0), denied])  # limits of oneself only
    if not has_namespaces:
        for numbers, commands in _SET_OWNER.items():
            test = [line for command in commands for line in ((_EQUAL, 0, 1, command), denied)]
            lines += _where(numbers[column], test, _ARGUMENT_1)
    return [*lines, (_RETURN, 0, 0, _ALLOW)]


def install(*, has_namespaces: bool) -> None:
    """Filter this thread's calls from now on, and those of all that it starts. Needs no_new_privs."""
    call = kernel.number_of("seccomp")  # known for the machines that `program` knows
    lines = program(os.uname().machine, has_namespaces=has_namespaces)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in lines))
    described = ctypes.create_string_buffer(struct.pack("@HP", len(lines), ctypes.addressof(code)))
    kernel.syscall("seccomp", call, _SET_MODE_FILTER, 0, described)


def _where(number: int, test: list[Instruction], argument: int = _ARGUMENT_0) -> list[Instruction]:
    """`test` on one argument of one call, which is allowed when the test falls through."""
    body = [(_LOAD, 0, 0, argument), *test, (_RETURN, 0, 0, _ALLOW)]
    return [(_EQUAL, 0, len(body), number), *body]
