"""Run a program in a container: `python enter.py PLAN`, where PLAN is the JSON of `container.Plan`.

The child process gets its own mount, process and host-name namespaces and the pod's network, and executes the program.
This process waits for it and exits with its exit code (128 + the signal that killed it). If this process is killed, the
kernel kills the child, too.

The machine's file system is the image, under a writable layer that is discarded with the container. util-linux'
`unshare` could create the namespaces, but version 2.38 loses the child's exit code. Only the standard library is
imported, since this runs before every container.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any, NoReturn

MS_RDONLY = 1  # linux/mount.h
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
CLONE_NEWNS = 0x00020000  # linux/sched.h
CLONE_NEWUTS = 0x04000000
CLONE_NEWPID = 0x20000000
CLONE_NEWNET = 0x40000000
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Exit with 127: the program cannot be started."""
    plan = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    _join_network(plan["network"])
    if LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID) != 0:
        sys.exit(f"namespaces must be permitted, got: {os.strerror(ctypes.get_errno())}; run as root")
    _mount("", Path("/"), "", MS_REC | MS_PRIVATE)
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _execute_program(plan)
    for signum in (signal.SIGTERM, signal.SIGINT):  # these signals are meant for the program
        signal.signal(signum, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _join_network(path: str) -> None:
    """Enter the pod's network namespace, which all of its containers share."""
    handle = os.open(path, os.O_RDONLY)
    if LIBC.setns(handle, CLONE_NEWNET) != 0:
        sys.exit(f"setns to {path}: {os.strerror(ctypes.get_errno())}")
    os.close(handle)


def _execute_program(plan: dict[str, Any]) -> NoReturn:
    """Build the file system, enter it, and execute the program."""
    root = _layer_over_machine(Path(plan["scratch"]))
    for bind in plan["binds"]:
        _bind(Path(bind["source"]), _enter_container(root, bind["target"]), bind["read_only"])
    if plan["read_only_root"]:
        _mount("", root, "", MS_REMOUNT | MS_BIND | MS_RDONLY)
    socket.sethostname(plan["hostname"])
    os.chroot(root)
    os.chdir(plan["working_directory"])
    try:
        os.execvpe(plan["command"][0], plan["command"], plan["environment"])  # noqa: S606 - no shell is wanted
    except OSError as error:
        sys.stderr.write(f"{plan['command'][0]}: {error.strerror}\n")
        sys.stderr.flush()
        os._exit(127)


def _layer_over_machine(scratch: Path) -> Path:
    """Mount / with a writable layer in memory, and a new /proc and /dev, as container runtimes do."""
    _mount("tmpfs", scratch, "tmpfs", 0)
    upper = scratch / "upper"
    work = scratch / "work"
    root = scratch / "root"
    for folder in (upper, work, root):
        folder.mkdir()
    # List the machine's other mounts before the layer is mounted and becomes one of them.
    others = [path for path in _mount_points() if not path.is_relative_to(scratch)]
    _mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in others:
        if path not in (Path("/proc"), Path("/dev")):
            _bind(path, _enter_container(root, str(path)), read_only=False)
    _mount("proc", root / "proc", "proc", 0)
    _devices(root / "dev")
    return root


def _devices(folder: Path) -> None:
    """Create a small /dev. Nothing that a container writes there reaches the machine's."""
    _mount("tmpfs", folder, "tmpfs", 0, "size=64k,mode=755")
    for name in DEVICES:
        _bind(Path("/dev") / name, folder / name, read_only=False)
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        (folder / name).symlink_to(f"/proc/self/fd{target}")
    (folder / "shm").mkdir()
    _mount("tmpfs", folder / "shm", "tmpfs", 0, "size=64m")  # as container runtimes


def _mount_points() -> list[Path]:
    """List the mounts directly below /. Mounts below these are bound with them."""
    lines = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    paths = sorted({Path(line.split()[4].encode().decode("unicode_escape")) for line in lines} - {Path("/")})
    return [path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths)]


def _enter_container(root: Path, path: str) -> Path:
    """Resolve a container's path from outside: its symbolic links point into the container, not into the machine."""
    here = root
    left = [part for part in path.split("/") if part]
    while left:
        part = left.pop(0)
        here = here.parent if part == ".." and here != root else here / part
        if here.is_symlink():
            target = str(here.readlink())
            here = root if target.startswith("/") else here.parent
            left = [piece for piece in target.split("/") if piece] + left
    return here


def _bind(source: Path, target: Path, read_only: bool) -> None:
    if source.is_dir():
        target.mkdir(parents=True, exist_ok=True)
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.touch(exist_ok=True)
    _mount(str(source), target, "", MS_BIND | MS_REC)
    if read_only:
        _mount("", target, "", MS_REMOUNT | MS_BIND | MS_RDONLY)


def _mount(source: str, target: Path, kind: str, flags: int, data: str = "") -> None:
    words = [word.encode() for word in (source, str(target), kind, data)]
    if LIBC.mount(words[0], words[1], words[2], flags, words[3]) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"mount {source or kind} on {target}: {os.strerror(number)}")


if __name__ == "__main__":
    main()
