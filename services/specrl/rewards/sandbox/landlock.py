"""Restricts the files of a confined program with Landlock, which needs neither privileges nor namespaces.

Called by `confine` with `isolation: Landlock`. Everything that Landlock can forbid is forbidden, except for reading and
executing files below the given folders. No file can be written. From Linux 6.12 on, Landlock also confines signals and
abstract sockets. The seccomp filter forbids both on every kernel. Structures are from linux/landlock.h.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from collections.abc import Iterable
from pathlib import Path

from specrl.rewards.sandbox import kernel

_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
_VERSION_QUESTION = 1
_PATH_BENEATH = 1
_EXECUTE = 1 << 0
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
"""How many rights on files each version of Landlock knows; later ones know no more of them."""
_NETWORK = 0b11
"""Binding and connecting TCP, from version 4 on."""
_SCOPES = 0b11
"""Abstract sockets and signals, from version 6 on."""
_OLDEST = 3
"""Before it, truncating a file could not be forbidden (Linux 6.2)."""


def read_version() -> int:
    """Return Landlock's version on this kernel. Raises OSError if it is missing or too old."""
    try:
        found = kernel.syscall("Landlock", _CREATE_RULESET, None, ctypes.c_size_t(0), _VERSION_QUESTION)
    except OSError as error:
        reason = "the kernel has it switched off" if error.errno == errno.EOPNOTSUPP else "the kernel has none"
        raise OSError(error.errno, f"Landlock: {reason}") from error
    if found < _OLDEST:
        raise OSError(errno.ENOSYS, f"Landlock: version {_OLDEST} (Linux 6.2) is needed, got {found}")
    return found


def allow_reading_only(paths: Iterable[Path]) -> None:
    """Confine this thread, and all that it starts, to reading and executing what lies below `paths`."""
    known = read_version()
    rights = (1 << _FILE_RIGHTS[min(known, max(_FILE_RIGHTS))]) - 1
    wanted = struct.pack("=QQQ", rights, _NETWORK if known >= 4 else 0, _SCOPES if known >= 6 else 0)
    size = 24 if known >= 6 else 16 if known >= 4 else 8
    ruleset = kernel.syscall("landlock_create_ruleset", _CREATE_RULESET, wanted, ctypes.c_size_t(size), 0)
    for path in paths:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        allowed = _EXECUTE | _READ_FILE | (_READ_DIR if path.is_dir() else 0)
        rule = struct.pack("=Qi", allowed, place)
        kernel.syscall(f"landlock_add_rule for {path}", _ADD_RULE, ruleset, _PATH_BENEATH, rule, 0)
        os.close(place)
    kernel.syscall("landlock_restrict_self", _RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)
