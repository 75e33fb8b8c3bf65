"""Hosts: what a server binds, how its address is written, and which names a client may use for it.

Names are compared against DNS rebinding. A page of the internet can have its own name resolve to this machine. The
browser then sends the page's requests here and lets it read the answers; but the Host header has the page's name, which
it cannot change.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

ALL_ADDRESSES = "::"
"""Host that servers in pods bind: all addresses, of IPv6 and IPv4, since a cluster's pods have either or both."""

_IPV4_WILDCARD = "0.0.0.0"  # noqa: S104 - bound where the user asks for all addresses
_WILDCARDS = frozenset({_IPV4_WILDCARD, ALL_ADDRESSES})


def bracket_host(host: str) -> str:
    """Return the host as an address HOST:PORT has it: an IPv6 address in brackets (RFC 3986)."""
    return f"[{host}]" if ":" in host else host


def join_address(host: str, port: int | str) -> str:
    """Return the address HOST:PORT of a server."""
    return f"{bracket_host(host)}:{port}"


def resolve_bound(host: str) -> tuple[socket.AddressFamily, str]:
    """Resolve the host of a server to its socket's family, and to the host that this socket binds.

    `::` includes IPv4, as it does for gRPC's servers, and is 0.0.0.0 where the kernel has no IPv6. Raises OSError for
    an unknown name.
    """
    if host == ALL_ADDRESSES and not socket.has_dualstack_ipv6():
        host = _IPV4_WILDCARD
    return socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0], host


def list_local_hosts(bound: str) -> frozenset[str]:
    """List the names by which browsers and programs reach a server that is bound to the address `bound`."""
    names = {"127.0.0.1", "::1", "localhost", bound.lower()}
    if bound in _WILDCARDS:
        names |= {socket.gethostname().lower(), *_WILDCARDS}
    return frozenset(names - {""})


def is_host_allowed(values: Iterable[bytes], hosts: frozenset[str]) -> bool:
    """Whether a request's Host headers are one name of `hosts`, with any port or none: ports may be forwarded.

    If the run is bound to all addresses, every IP address is allowed, too. A name is what rebinding needs.
    """
    found = [value.decode("latin-1").strip().lower() for value in values]
    if len(found) != 1:
        return False
    name, _, port = found[0].partition("]") if found[0].startswith("[") else found[0].partition(":")
    port = port.removeprefix(":")
    if not ((port.isascii() and port.isdigit()) or not port):
        return False
    name = name.removeprefix("[")
    if name in hosts:
        return True
    return not _WILDCARDS.isdisjoint(hosts) and _is_address(name)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
