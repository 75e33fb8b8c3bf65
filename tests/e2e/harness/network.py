"""A network for pods on one machine: each has a network namespace and an address, routed by the kernel.

Each namespace is connected by a pair of virtual interfaces, which the kernel removes with the namespace, so nothing
has to be cleaned up after a crash. The machine is the gateway, where the API server listens. Addresses are not on
loopback, which Kubernetes refuses in EndpointSlices. There are no network policies and no routes out of the machine.
"""

from __future__ import annotations

import socket
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from specrl.launcher.processes.child_guard import guarded_command

IP_TIMEOUT_S = 60


class NoNetwork(Exception):
    """This machine does not permit network namespaces."""


@dataclass
class Namespace:
    """A network namespace, kept alive by a sleeping process."""

    address: str
    process: subprocess.Popen[bytes]

    @property
    def path(self) -> str:
        """Path of the namespace, for setns."""
        return f"/proc/{self.process.pid}/ns/net"

    def close(self) -> None:
        """Kill the sleeping process. The kernel removes the namespace with its last process."""
        self.process.kill()
        self.process.wait()


class PodNetwork:
    """The network 10.N.0.0/16. This machine has the address 10.N.0.1."""

    def __init__(self, number: int) -> None:
        self.number = number
        self._count = 0
        self._anchor: Namespace | None = None

    @classmethod
    def create(cls) -> PodNetwork:
        """Create a network with an unused N. Raises NoNetwork."""
        number = next(number for number in range(64, 128) if not _is_local(f"10.{number}.0.1"))
        network = cls(number)
        network._anchor = network._open(network.gateway, f"c{number}gw", is_gateway=True)
        return network

    @property
    def gateway(self) -> str:
        """The machine's address in the network."""
        return f"10.{self.number}.0.1"

    def next_address(self) -> str:
        """Return an address that no pod has had yet."""
        self._count += 1
        return f"10.{self.number}.{1 + self._count // 250}.{self._count % 250 + 1}"

    def open(self, address: str) -> Namespace:
        """Create a namespace with this address on eth0. Raises NoNetwork."""
        third, fourth = address.split(".")[2:]
        return self._open(address, f"c{self.number}-{third}-{fourth}", is_gateway=False)

    def close(self) -> None:
        """Remove the machine's address. The pods' namespaces are removed with their pods."""
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
            # An interface of this name belongs to a killed run. The kernel takes a moment to remove it.
            subprocess.run(["ip", "link", "delete", link], check=False, capture_output=True, timeout=IP_TIMEOUT_S)
            _ip(outside)
            inside = ["link set lo up", "link set eth0 up"]
            if not is_gateway:
                inside += [f"addr add {address}/32 dev eth0", f"route add {self.gateway} dev eth0"]
                inside += [f"route add default via {self.gateway}"]
            _ip(inside, "nsenter", "--target", str(pid), "--net")
            Path(f"/proc/sys/net/ipv4/conf/{link}/forwarding").write_text("1", encoding="utf-8")
        except (OSError, subprocess.SubprocessError) as error:
            namespace.close()
            said = error.stderr.decode() if isinstance(error, subprocess.CalledProcessError) else str(error)
            raise NoNetwork(f"network namespaces must be permitted, got: {said.strip()}; run as root") from error
        return namespace


def _sleeper() -> subprocess.Popen[bytes]:
    """Start a process in a new network namespace. It dies with this process."""
    command = guarded_command(["unshare", "--net", "sleep", "infinity"])
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    own = Path("/proc/self/ns/net").stat().st_ino
    deadline = time.monotonic() + IP_TIMEOUT_S
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
