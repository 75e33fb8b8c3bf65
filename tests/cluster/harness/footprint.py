"""What a cluster leaves on the machine: everything that carries its name, and settings that all share."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
from pathlib import Path

from tests.cluster.harness.leftovers import NODES, hierarchies
from tests.cluster.harness.node import MACHINE_SYSCTLS

SHARED_SYSCTLS = (*MACHINE_SYSCTLS, "net/netfilter/nf_conntrack_max")


def find_traces(name: str) -> list[str]:
    """Find the processes, mounts, cgroups and folder of a cluster. name: of its folder and cgroups."""
    found = [f"process {pid}: {command}" for pid, command in _processes_of(name)]
    mounts = Path("/proc/self/mountinfo").read_text(encoding="utf-8").splitlines()
    found += [f"mount {line}" for line in mounts if name in line]
    found += [f"cgroup {root / name}" for root in hierarchies() if (root / name).exists()]
    return found + ([f"folder {NODES / name}"] if (NODES / name).exists() else [])


def find_namespaces(name: str) -> set[str]:
    """Return the namespaces that a cluster's processes have, and this process has not."""
    own = set(_namespaces_of("self"))
    return {each for pid, _ in _processes_of(name) for each in _namespaces_of(pid)} - own


def find_processes_in(namespaces: set[str]) -> list[str]:
    """Return the processes that are in one of these namespaces."""
    return [pid for pid in _pids() if namespaces & set(_namespaces_of(pid))]


def find_links(network: int) -> set[str]:
    """Return name and index of a pod network's interfaces on the machine (tests/e2e/harness/network.py).

    Another network may take the names at once, but no other interface has the same index.
    """
    found = set()
    for path in Path("/sys/class/net").iterdir():
        if re.match(rf"c{network}(gw|-)", path.name):
            with contextlib.suppress(OSError):
                found.add(f"{path.name} {(path / 'ifindex').read_text(encoding='utf-8').strip()}")
    return found


def read_machine_settings() -> dict[str, str]:
    """Read what all processes of the machine share, and a node could change: sysctls, and Kubernetes' firewall rules.

    Rules of others are left out: a build of images, for example, may add some at any time.
    """
    settings = {}
    for name in SHARED_SYSCTLS:
        with contextlib.suppress(FileNotFoundError):
            settings[name] = Path("/proc/sys", name).read_text(encoding="utf-8").strip()
    for command in ("iptables-save", "nft list ruleset", "ipset list -name"):
        done = subprocess.run(command.split(), capture_output=True, text=True, timeout=60, check=False)
        lines = [line for line in done.stdout.splitlines() if "KUBE-" in line]
        settings[command] = re.sub(r"\[\d+:\d+\]|packets \d+ bytes \d+", "", "\n".join(lines))  # counters
    return settings


def _processes_of(name: str) -> list[tuple[str, str]]:
    """Id and command line of each process that names the cluster, or is in one of its cgroups."""
    found = []
    for pid in _pids():
        with contextlib.suppress(OSError):
            command = Path("/proc", pid, "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            cgroups = Path("/proc", pid, "cgroup").read_text(encoding="utf-8")
            if f"/{name}/" in command or re.search(rf"/{name}(/|$)", cgroups, re.MULTILINE):
                found.append((pid, command))
    return found


def _namespaces_of(pid: str) -> list[str]:
    found = []
    for kind in ("mnt", "net", "pid"):
        with contextlib.suppress(OSError):
            found.append(str(Path(f"/proc/{pid}/ns/{kind}").readlink()))
    return found


def _pids() -> list[str]:
    return [path.name for path in Path("/proc").iterdir() if path.name.isdigit() and path.name != str(os.getpid())]
