"""Programs of a node that come as Debian packages, and what else a machine must permit for one.

python -m tests.cluster.harness.packages        installs what is missing, where this is root and apt exists
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

from tests.e2e.go_programs import cache_folder

PACKAGES = {
    "/usr/lib/cni/bridge": "containernetworking-plugins",
    "conntrack": "conntrack",
    "ip": "iproute2",
    "ipset": "ipset",
    "iptables": "iptables",
    "mount": "mount",
    "nft": "nftables",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "runc": "runc",
    "socat": "socat",  # port-forward
}
"""Debian's package of each program or file that a node needs."""
NEEDED_GB = 5
"""Free disk space: containerd's copies of the images, etcd, logs."""
APT_TIMEOUT_S = 600


def find(program: str) -> Path | None:
    """Return the path of a program: a file of that name, or one on the PATH."""
    if Path(program).is_absolute():
        return Path(program) if Path(program).exists() else None
    found = shutil.which(program, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
    return Path(found) if found else None


def missing_packages() -> list[str]:
    """Return the packages that must be installed."""
    return sorted(package for program, package in PACKAGES.items() if find(program) is None)


def install_command(packages: list[str]) -> str:
    """Return the command that installs packages by hand."""
    return f"apt-get install --no-install-recommends {' '.join(packages)}"


@cache
def why_not_here() -> str:
    """Return why this machine cannot run a node; empty if it can."""
    if os.geteuid() != 0:
        return "containers need root"
    if missing := missing_packages():
        return f"{', '.join(missing)} not installed; {install_command(missing)}"
    command = ["unshare", "--mount", "--net", "--pid", "--uts", "--ipc", "--fork", "--mount-proc", "true"]
    tried = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    if tried.returncode != 0:
        return f"namespaces are not permitted: {tried.stderr.strip()}"
    cache_folder().mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(cache_folder()).free / 1e9
    if free < NEEDED_GB:
        return f"{cache_folder()} must have {NEEDED_GB} GB free, got {free:.1f}"
    return ""


def install() -> None:
    """Install what is missing. Does nothing where this is not root, or has no apt."""
    packages = missing_packages()
    if not packages or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing {', '.join(packages)}", flush=True)
    command = ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *packages]
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=APT_TIMEOUT_S, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} must succeed, got: {done.stderr.strip()}; apt-get update, and try again")


if __name__ == "__main__":
    install()
