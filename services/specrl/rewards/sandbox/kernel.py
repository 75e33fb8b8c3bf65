"""System calls that confine a process, for which Python has no function.

Called by `filesystem`, `landlock`, `seccomp` and `confine`, in processes that were forked to be confined. Each raises
OSError with the name of the call that failed. Numbers are from Linux' headers. Those that differ by machine are in
`seccomp`.
"""

from __future__ import annotations

import ctypes
import os
import resource

CLONE_NEWNS = 0x0002_0000
CLONE_NEWUTS = 0x0400_0000
CLONE_NEWIPC = 0x0800_0000
CLONE_NEWUSER = 0x1000_0000
CLONE_NEWPID = 0x2000_0000
CLONE_NEWNET = 0x4000_0000
CLONE_NEWCGROUP = 0x0200_0000

MS_NOSUID = 0x2
MS_NODEV = 0x4
MS_NOEXEC = 0x8
MS_BIND = 0x1000
MS_REC = 0x4000
MS_PRIVATE = 0x4_0000
_MNT_DETACH = 0x2
ATTR_RDONLY = 0x1
ATTR_NOSUID = 0x2
ATTR_NODEV = 0x4
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000

_PR_SET_PDEATHSIG = 1
_PR_CAPBSET_READ = 23
_PR_SET_SECUREBITS = 28
_PR_SET_NO_NEW_PRIVS = 38
_NOROOT_LOCKED = 0x3
"""SECBIT_NOROOT and its lock: a program that user 0 starts gains no capabilities."""
_CLOSE_RANGE_CLOEXEC = 4
_CAPABILITY_VERSION_3 = 0x2008_0522
_LAST_CAPABILITY = 63

# The same on every architecture that these calls exist on.
SYS_CLOSE_RANGE = 436
SYS_MOUNT_SETATTR = 442
_NUMBERS = {
    "x86_64": {"pivot_root": 155, "capset": 126, "seccomp": 317},
    "aarch64": {"pivot_root": 41, "capset": 91, "seccomp": 277},
}

_libc = ctypes.CDLL(None, use_errno=True)


class _MountAttributes(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("attr_set", "attr_clr", "propagation", "userns_fd")]


def syscall(what: str, number: int, *arguments: object) -> int:
    """A raw system call. Raises OSError naming `what`."""
    return _check_result(what, int(_libc.syscall(ctypes.c_long(number), *arguments)))


def number_of(name: str) -> int:
    """A call's number on this machine. Raises OSError on architectures whose numbers are not known here."""
    machine = os.uname().machine
    if machine not in _NUMBERS:
        raise OSError(f"a processor of kind {' or '.join(_NUMBERS)} is needed, got {machine}")
    return _NUMBERS[machine][name]


def unshare(flags: int) -> None:
    _check_result("unshare", _libc.unshare(ctypes.c_int(flags)))


def mount(kind: str, source: str, target: str, flags: int, data: str = "") -> None:
    """mount(2); `kind` is the file system, empty for bind mounts and changes of propagation."""
    names = [text.encode() or None for text in (source, target, kind)]
    result = _libc.mount(*names, ctypes.c_ulong(flags), data.encode() or None)
    _check_result(f"mount {source or kind} on {target}", result)


def restrict_mount(path: str, attributes: int, *, is_recursive: bool) -> None:
    """Add attributes to a mount and to the mounts below it. Attributes that they have are kept (mount_setattr(2))."""
    wanted = _MountAttributes(attr_set=attributes)
    flags = _AT_RECURSIVE if is_recursive else 0
    arguments = (_AT_FDCWD, path.encode(), flags, ctypes.byref(wanted), ctypes.c_size_t(ctypes.sizeof(wanted)))
    syscall(f"mount_setattr of {path}", SYS_MOUNT_SETATTR, *arguments)


def enter_root(folder: str) -> None:
    """Make the mount point `folder` the root, and detach everything outside of it."""
    os.chdir(folder)
    syscall("pivot_root", number_of("pivot_root"), b".", b".")
    _check_result("umount of the old root", _libc.umount2(b".", ctypes.c_int(_MNT_DETACH)))
    os.chdir("/")


def die_with_parent(signum: int) -> None:
    """Receive `signum` when the parent dies. The caller checks that it has not died before."""
    prctl("PR_SET_PDEATHSIG", _PR_SET_PDEATHSIG, signum)


def forbid_new_privileges() -> None:
    prctl("PR_SET_NO_NEW_PRIVS", _PR_SET_NO_NEW_PRIVS, 1)


def drop_capabilities() -> None:
    """Give up every capability, and the way in which user 0 would gain them again with the next program."""
    if os.geteuid() == 0 and any(
        _libc.prctl(_PR_CAPBSET_READ, number, 0, 0, 0) == 1 for number in range(_LAST_CAPABILITY + 1)
    ):
        prctl("PR_SET_SECUREBITS", _PR_SET_SECUREBITS, _NOROOT_LOCKED)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    syscall("capset", number_of("capset"), header, (ctypes.c_uint32 * 6)())


def forbid_core_dumps() -> None:
    """Set the limit of core dumps to 1 byte, which is Linux' sign for none at all (fs/coredump.c).

    With 0, the kernel still starts the machine's handler of crashes, as root, for every process that crashes. A hard
    limit of 0 cannot be raised, so it stays.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    most = 0 if hard == 0 else 1
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


def close_on_exec_from(lowest: int) -> None:
    """Let no descriptor from `lowest` on reach the next program."""
    syscall("close_range", SYS_CLOSE_RANGE, ctypes.c_uint(lowest), ctypes.c_uint(0xFFFF_FFFF), _CLOSE_RANGE_CLOEXEC)


def prctl(what: str, option: int, value: int) -> None:
    _check_result(f"prctl {what}", _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0))


def _check_result(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
