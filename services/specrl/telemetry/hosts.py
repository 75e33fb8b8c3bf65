"""Which names a client may use for a server of this machine, against DNS rebinding.

A page of the internet can have its own name resolve to this machine. The browser then sends the page's requests here
and lets it read the answers; but the Host header has the page's name, which it cannot change.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

_WILDCARDS = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not bound


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
