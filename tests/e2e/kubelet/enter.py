"""Runs a program as a container's: `python enter.py PLAN`, with PLAN the JSON of `container.Plan`.

Its child gets mount, process and host-name namespaces of its own, the pod's network, and becomes the program; this
process waits for it, ends with its exit code (128 + the signal that killed it), and takes it along when it is killed
itself. The machine's own file system is the image: a throw-away layer lies over it, so what a container writes outside
its volumes is gone with it. (`unshare` could do the first part, but that of util-linux 2.38 loses how its child ended.)
The standard library only, as it runs before every container.
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

MS_RDONLY, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 1, 32, 4096, 16384, 1 << 18  # linux/mount.h
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWPID, CLONE_NEWNET = 0x00020000, 0x04000000, 0x20000000, 0x40000000  # linux/sched.h
PR_SET_PDEATHSIG = 1  # linux/prctl.h
DEVICES = ("null", "zero", "full", "random", "urandom", "tty")
LIBC = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    """Exit 127: the program cannot be started."""
    plan = json.loads(Path(sys.argv[1]).read_text())
    _join_network(plan["network"])
    if LIBC.unshare(CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID) != 0:
        sys.exit(f"namespaces must be permitted, got: {os.strerror(ctypes.get_errno())}; run as root")
    _mount("", Path("/"), "", MS_REC | MS_PRIVATE)
    child = os.fork()
    if child == 0:
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _become(plan)
    for signum in (signal.SIGTERM, signal.SIGINT):  # meant for the program, if anyone sends them here
        signal.signal(signum, signal.SIG_IGN)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    os._exit(code if code >= 0 else 128 - code)


def _join_network(path: str) -> None:
    """The pod's: all of its containers share it."""
    handle = os.open(path, os.O_RDONLY)
    if LIBC.setns(handle, CLONE_NEWNET) != 0:
        sys.exit(f"setns to {path}: {os.strerror(ctypes.get_errno())}")
    os.close(handle)


def _become(plan: dict[str, Any]) -> NoReturn:
    """Build the file system, move into it, and become the program."""
    root = _layer_over_machine(Path(plan["scratch"]))
    for bind in plan["binds"]:
        _bind(Path(bind["source"]), _inside(root, bind["target"]), bind["read_only"])
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
    """/, with a layer for writing that is kept in memory; its own /proc and /dev, as container runtimes give them."""
    _mount("tmpfs", scratch, "tmpfs", 0)
    upper, work, root = scratch / "upper", scratch / "work", scratch / "root"
    for folder in (upper, work, root):
        folder.mkdir()
    # The other mounts are read before the layer becomes one of them.
    others = [path for path in _mount_points() if not path.is_relative_to(scratch)]
    _mount("overlay", root, "overlay", 0, f"lowerdir=/,upperdir={upper},workdir={work}")
    for path in others:
        if path not in (Path("/proc"), Path("/dev")):
            _bind(path, _inside(root, str(path)), read_only=False)
    _mount("proc", root / "proc", "proc", 0)
    _devices(root / "dev")
    return root


def _devices(folder: Path) -> None:
    """A small /dev: nothing that a container writes there reaches the machine's."""
    _mount("tmpfs", folder, "tmpfs", 0, "size=64k,mode=755")
    for name in DEVICES:
        _bind(Path("/dev") / name, folder / name, read_only=False)
    for name, target in {"fd": "", "stdin": "/0", "stdout": "/1", "stderr": "/2"}.items():
        (folder / name).symlink_to(f"/proc/self/fd{target}")
    (folder / "shm").mkdir()
    _mount("tmpfs", folder / "shm", "tmpfs", 0, "size=64m")  # more has to be asked for, by an emptyDir in memory


def _mount_points() -> list[Path]:
    """Those directly below /; what is mounted below them comes along."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    paths = sorted({Path(line.split()[4].encode().decode("unicode_escape")) for line in lines} - {Path("/")})
    return [path for path in paths if not any(path != other and path.is_relative_to(other) for other in paths)]


def _inside(root: Path, path: str) -> Path:
    """Where `path` of the container lies, seen from outside: its links lead to places in there, not on the machine."""
    here, left = root, [part for part in path.split("/") if part]
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
