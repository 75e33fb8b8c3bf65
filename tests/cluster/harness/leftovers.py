"""What a node has outside of its namespaces: a folder and cgroups, named by the process that started it.

Everything else ends with the node's first process, which the kernel kills when its harness ends, even by SIGKILL:
processes, mounts, links, firewall. A killed harness leaves folder and cgroups; the next start removes them.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from pathlib import Path

from tests.e2e.go_programs import cache_folder

PREFIX = "specrl-"
NODES = cache_folder() / "cluster"
REMOVAL_S = 30.0
"""For processes of a killed node to end; the kernel needs a moment on a busy machine."""


def own_name() -> str:
    """Name of this process's folder and cgroups."""
    return f"{PREFIX}{os.getpid()}"


def hierarchies() -> list[Path]:
    """The roots of the cgroups: of version 1, one for each controller; of version 2, one, beside those of version 1."""
    mounts = [line.split() for line in Path("/proc/self/mounts").read_text(encoding="utf-8").splitlines()]
    return [Path(words[1]) for words in mounts if words[2] in {"cgroup", "cgroup2"}]


def make_cgroups(name: str, shares: int) -> None:
    """Make a cgroup in each hierarchy.

    shares: CPU time under contention, where 1024 is the weight of one process. All pods together weigh as one cgroup.
    """
    for root in hierarchies():
        made = root / name
        made.mkdir(exist_ok=True)
        if (made / "cpu.shares").exists():
            (made / "cpu.shares").write_text(str(shares))
        for file in ("cpuset.cpus", "cpuset.mems"):  # of version 1; empty ones admit no process
            if (root / file).exists() and (made / file).exists():
                (made / file).write_text((root / file).read_text())


def remove_cgroups(name: str) -> None:
    """Remove a node's cgroups. Waits until its processes have ended, REMOVAL_S at most."""
    deadline = time.monotonic() + REMOVAL_S
    for root in hierarchies():
        while (root / name).exists():
            try:
                for folder, _, _ in os.walk(root / name, topdown=False):
                    Path(folder).rmdir()
            except OSError as error:
                if error.errno not in {errno.EBUSY, errno.ENOTEMPTY, errno.ENOENT} or time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def remove_stale() -> list[str]:
    """Remove folders and cgroups of harnesses that are gone. Returns their names."""
    found = {path.name for root in (*hierarchies(), NODES) if root.is_dir() for path in root.iterdir()}
    names = [name for name in sorted(found) if re.fullmatch(rf"{PREFIX}\d+", name) and not _is_alive(name)]
    for name in names:
        remove_cgroups(name)
        remove_folder(name)
    return names


def remove_folder(name: str) -> None:
    """Remove a node's folder."""
    shutil.rmtree(NODES / name, ignore_errors=True)


def _is_alive(name: str) -> bool:
    return Path("/proc", name.removeprefix(PREFIX)).exists()
