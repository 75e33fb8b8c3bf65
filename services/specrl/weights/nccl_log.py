"""Reads from NCCL's log which transport it chose: NVLink between nodes, RDMA, or TCP sockets.

NCCL falls back to slower transports without an error. It says so only in its log, at level INFO, one line for each
channel. `NCCL_DEBUG_FILE` sends the log to a file (`children/affinity.py` of the operator sets it in GPU pods). Without
the file nothing is known.

The lines are those of NCCL 2.18 to 2.31 (`src/transport/{net,p2p,shm}.cc`). `group.py` calls this module.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

_CHANNEL = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : \d+\[\w+\] -> \d+\[\w+\] (?:\[(?:send|receive)\] )?"
    r"via (?P<transport>SHM|P2P/\w+|NET/[^/]+(?=/))"  # a network plugin's name may have spaces: NET/AWS Libfabric/0
)
MOST_BYTES = 16 << 20
"""Most that one call reads. A communicator's start writes one line of about 100 bytes for each channel."""
_WARNING = re.compile(r"NCCL WARN (.*)")


class NcclLog:
    """The log that NCCL writes in this process."""

    def __init__(self, path: Path | None) -> None:
        """path: the log file; None if NCCL writes none."""
        self._path = path
        self._read_bytes = 0

    def read_new_lines(self) -> list[str]:
        """Return the lines since the last call; none if there is no log, or none that can be read."""
        if self._path is None or not self._path.is_file():  # a user may name a pipe, which would block
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read(MOST_BYTES)
        except OSError:
            return []
        whole = text[: text.rfind(b"\n") + 1]  # NCCL may be writing the last line
        self._read_bytes += len(whole)
        return whole.decode(errors="replace").splitlines()


def locate_log(environment: Mapping[str, str] = os.environ) -> Path | None:
    """Return the file that NCCL_DEBUG_FILE names in this process; None without it. NCCL replaces %h and %p alike."""
    pattern = environment.get("NCCL_DEBUG_FILE")
    if not pattern:
        return None
    return Path(pattern.replace("%h", socket.gethostname()).replace("%p", str(os.getpid())))


def find_transports(lines: Iterable[str]) -> str:
    """Return the transports of all channels in these lines, sorted: `NET/IB`, or `NET/IB, P2P/MNNVL`. Empty without."""
    found = {match["transport"] for line in lines if (match := _CHANNEL.search(line))}
    return ", ".join(sorted(found))


def find_warnings(lines: Iterable[str]) -> list[str]:
    """Return the warnings in these lines, without time and place."""
    return [match[1] for line in lines if (match := _WARNING.search(line))]
