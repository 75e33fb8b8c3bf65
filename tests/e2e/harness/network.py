"""A network for pods on one machine: a namespace and an address for each, routed by the kernel.

Each namespace hangs on a pair of virtual interfaces, and the kernel removes a pair with the namespace, so nothing
has to be cleaned up after a crash. The machine itself is the gateway: the API server listens there. Addresses are
not loopback ones, which Kubernetes refuses in EndpointSlices. No policies, no bandwidth, no way out of the machine.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import specrl.launcher.leash

IP_TIMEOUT_S = 60


class NoNetwork(Exception):
    """Network namespaces cannot be made here."""


@dataclass
class Namespace:
    """A network namespace, held open by a process that sleeps."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def path(self) -> str:
        """What setns takes."""
        return f"/proc/{self.process.pid}/ns/net"

    def close(self) -> None:
        """The kernel removes it when its last process is gone."""
        self.process.kill()
        self.process.wait()


class PodNetwork:
    """The addresses 10.N.0.0/16, with 10.N.0.1 on this machine."""

    def __init__(self, number: int) -> None:
        self.number, self._count = number, 0
        self._anchor: Namespace | None = None

    @classmethod
    def create(cls) -> PodNetwork:
        """One that nobody on this machine uses. Raises NoNetwork."""
        number = next(number for number in range(64, 128) if not _is_local(f"10.{number}.0.1"))
        network = cls(number)
        network._anchor = network._open(network.gateway, f"c{number}gw", is_gateway=True)
        return network

    @property
    def gateway(self) -> str:
        """The machine's address."""
        return f"10.{self.number}.0.1"

    def next_address(self) -> str:
        """One that no pod has had."""
        self._count += 1
        return f"10.{self.number}.{1 + self._count // 250}.{self._count % 250 + 1}"

    def open(self, address: str) -> Namespace:
        """A namespace with that address, as eth0. Raises NoNetwork."""
        third, fourth = address.split(".")[2:]
        return self._open(address, f"c{self.number}-{third}-{fourth}", is_gateway=False)

    def close(self) -> None:
        """Take the machine's address back; pods' namespaces end with their pods."""
        if self._anchor is not None:
            self._anchor.close()

    def _open(self, address: str, link: str, is_gateway: bool) -> Namespace:
        namespace = Namespace(address, _sleeper())
        pid = namespace.process.pid
        try:
            outside = [f"link add {link} type veth peer name eth0 netns {pid}", f"link set {link} up"]
            outside.append(
                f"addr add {address}/32 dev {link}"
                if is_gateway
                else f"route add {address}/32 dev {link} src {self.gateway}"
            )
            # One of that name was a killed run's, and is about to go: the kernel takes a moment for it.
            subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True, timeout=IP_TIMEOUT_S)
            _ip(outside)
            inside = ["link set lo up", "link set eth0 up"]
            if not is_gateway:
                inside += [f"addr add {address}/32 dev eth0", f"route add {self.gateway} dev eth0"]
                inside += [f"route add default via {self.gateway}"]
            _ip(inside, "nsenter", "--target", str(pid), "--net")
            Path(f"/proc/sys/net/ipv4/conf/{link}/forwarding").write_text("1")
        except (OSError, subprocess.SubprocessError) as error:
            namespace.close()
            said = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NoNetwork(f"network namespaces must be permitted, got: {said.strip()}; run as root") from error
        return namespace


def _sleeper() -> subprocess.Popen[bytes]:
    """A process in a network namespace of its own; it dies with this one."""
    leash = [sys.executable, specrl.launcher.leash.__file__, str(os.getpid())]
    process = subprocess.Popen([*leash, "unshare", "--net", "sleep", "infinity"], stderr=subprocess.PIPE)
    own, deadline = Path("/proc/self/ns/net").stat().st_ino, time.monotonic() + IP_TIMEOUT_S
    while Path(f"/proc/{process.pid}/ns/net").stat().st_ino == own:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            _, said = process.communicate()
            raise NoNetwork(f"network namespaces must be permitted, got: {said.decode().strip()}; run as root")
        time.sleep(0.005)
    assert process.stderr is not None
    process.stderr.close()
    return process


def _ip(lines: list[str], *prefix: str) -> None:
    text = "\n".join(lines).encode()
    subprocess.run([*prefix, "ip", "-batch", "-"], input=text, check=True, capture_output=True, timeout=IP_TIMEOUT_S)


def _is_local(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True
