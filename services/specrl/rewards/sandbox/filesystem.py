"""Builds the file system of a confined program: Python, the C library, a few devices, and a scratch folder.

Called by `confine`. The new root is in memory: writes never reach a disk, and the kernel frees it with the last process
that uses it. It does not have the run's folder, /etc, /home, /proc, /sys or /run.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from specrl.rewards.sandbox import kernel

SCRATCH = "/tmp"  # noqa: S108 - the sandbox's own, a file system of its own
PROGRAMS = "/programs"
PACKAGES = "/packages"
INTERPRETER = Path(sys.base_prefix, "bin", f"python{sys.version_info[0]}.{sys.version_info[1]}").resolve()
INSIDE = Path(__file__).parent / "inside"
_LIBRARIES = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_BASE = "/tmp"  # noqa: S108 - where the new root is put together, unseen by others
_ROOT_BYTES = 2**20
"""Size of the new root, which holds only folders and links."""
_FILES_PER_MIB = 256
"""Files in the scratch folder for each MiB of it: each costs the kernel about a KiB."""


def list_readable_folders() -> list[Path]:
    """List the folders that the interpreter needs, without folders inside them."""
    real = {path.resolve() for path in (Path(sys.base_prefix), *map(Path, _LIBRARIES)) if path.exists()}
    return sorted(path for path in real if not any(parent in real for parent in path.parents))


def build_root(packages: str | None, scratch_bytes: int, owner: int) -> None:
    """Build the root and enter it. The process must have its own mount namespace, with capabilities over it."""
    kernel.mount("", "none", "/", kernel.MS_REC | kernel.MS_PRIVATE)
    wanted = {str(path): path for path in list_readable_folders()} | {PROGRAMS: INSIDE}
    if packages is not None:
        wanted[PACKAGES] = Path(packages)
    os.umask(0o022)  # the answer may run as another user, and must reach these folders
    folders = [(place, os.open(path, os.O_PATH | os.O_CLOEXEC)) for place, path in wanted.items()]
    devices = [(name, os.open(f"/dev/{name}", os.O_PATH | os.O_CLOEXEC)) for name in _DEVICES]
    hidden = kernel.MS_NOSUID | kernel.MS_NODEV
    kernel.mount("tmpfs", "sandbox", _BASE, hidden, f"size={_ROOT_BYTES},nr_inodes=256,mode=755")
    for place, source in folders:
        target = _BASE + place
        Path(target).mkdir(parents=True, exist_ok=True)
        kernel.mount("", f"/proc/self/fd/{source}", target, kernel.MS_BIND | kernel.MS_REC)
        readonly = kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV
        kernel.restrict_mount(target, readonly, is_recursive=True)
    for name in _LIBRARIES:
        if Path(name).is_symlink() and not os.path.lexists(_BASE + name):
            Path(_BASE + name).parent.mkdir(parents=True, exist_ok=True)
            Path(_BASE + name).symlink_to(Path(name).readlink())
    Path(_BASE, "dev").mkdir()
    for name, source in devices:
        Path(_BASE, "dev", name).touch()
        kernel.mount("", f"/proc/self/fd/{source}", f"{_BASE}/dev/{name}", kernel.MS_BIND)
    Path(_BASE + SCRATCH).mkdir(exist_ok=True)
    files = max(16, scratch_bytes // 2**20 * _FILES_PER_MIB)
    kernel.mount(
        "tmpfs",
        "scratch",
        _BASE + SCRATCH,
        hidden | kernel.MS_NOEXEC,
        f"size={scratch_bytes},nr_inodes={files},mode=700,uid={owner},gid={owner}",
    )
    kernel.enter_root(_BASE)
    kernel.restrict_mount("/", kernel.ATTR_RDONLY | kernel.ATTR_NOSUID | kernel.ATTR_NODEV, is_recursive=False)
    os.umask(0o077)
