"""A private network for a run, whose loopback can be cut: a Linux network namespace, entered with `unshare`.

Everything listens on 127.0.0.1, so a cut is by port: routing rules drop what goes to or comes from the ports that a
process holds, as a firewall between two machines would. Nobody is told; connections hang until they give up.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

_CUT = "10"
"""Priority of the dropping rules. Must come before the rule that delivers to local addresses."""


def enter(module: str, arguments: Sequence[str]) -> None:
    """Start this program again in its own network and mount namespaces. Returns only if that is not possible."""
    command = ["unshare", "--net", "--mount", *([] if os.geteuid() == 0 else ["--user", "--map-root-user"])]
    if shutil.which("unshare") is None or shutil.which("ip") is None or not _works([*command, "true"]):
        return
    os.execvp(command[0], [*command, sys.executable, "-m", module, *arguments])  # noqa: S606 - no shell is wanted


def prepare() -> None:
    """Bring up the loopback of the new namespace, and move the local rule behind the priority of dropping rules."""
    _ip("link", "set", "lo", "up")
    _ip("rule", "add", "pref", "100", "table", "local")
    _ip("rule", "del", "pref", "0")


@contextmanager
def cut(ports: Iterable[int]) -> Iterator[None]:
    """Drop all packets from and to these TCP ports."""
    try:
        for port in ports:
            for side in ("sport", "dport"):
                _ip("rule", "add", "pref", _CUT, "ipproto", "tcp", side, str(port), "blackhole")
        yield
    finally:
        while _works(["ip", "rule", "del", "pref", _CUT]):
            pass


@contextmanager
def down() -> Iterator[None]:
    """Drop all packets."""
    _ip("link", "set", "lo", "down")
    try:
        yield
    finally:
        _ip("link", "set", "lo", "up")


def mount_small(folder: str, size_mib: int) -> None:
    """Mount a small file system at `folder`, so that it can be filled up."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m", "tmpfs", folder], check=True)


def unmount(folder: str) -> None:
    subprocess.run(["umount", folder], check=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def _works(command: Sequence[str]) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
