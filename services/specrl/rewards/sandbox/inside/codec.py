"""Sends Python values between an answer and its tests, as frames of JSON that decode only to plain values.

Used inside the sandbox on both sides, and by the worker. Invariant: whatever the other side sent, `decode` returns only
None, bool, int, float, complex, str, bytes, list, tuple, set, frozenset and dict, never a subclass. So comparing,
hashing or printing a decoded value runs no code of the answer. `decode` hashes what it receives, which can take
quadratic time. So it is called only inside sandboxes, and the worker compares the parsed JSON of a frame instead.
"""

from __future__ import annotations

import json
import math
import socket
import struct
from collections.abc import Callable
from typing import Any

_EXACT = 2**53
"""Integers below it are written in decimal; larger ones in hexadecimal, which is parsed in linear time."""
_SEQUENCES: dict[str, Any] = {"tuple": tuple, "set": set, "frozenset": frozenset}


class NotData(TypeError):
    """A value that is not plain data: a function, an object of a class, a generator."""


class Malformed(ValueError):
    """The bytes are not a frame of this protocol, or the frame is too large."""


def encode(value: Any) -> Any:
    """JSON for a value. Raises NotData."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        number = int(value)
        return number if -_EXACT < number < _EXACT else {"int": hex(number)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": str(float(value))}
    if isinstance(value, complex):
        return {"complex": [str(value.real), str(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": value.hex()}
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, dict):
        return {"dict": [[encode(key), encode(item)] for key, item in value.items()]}
    for name, kind in _SEQUENCES.items():
        if isinstance(value, kind):
            return {name: [encode(item) for item in value]}
    raise NotData(f"only plain data can be passed, got {type(value).__name__}")


def decode(found: Any) -> Any:
    """The value of what `json` made of a frame. Raises Malformed."""
    if found is None or isinstance(found, bool | int | float | str):
        return found
    if isinstance(found, list):
        return [decode(item) for item in found]
    try:
        ((name, content),) = found.items()
        if name == "int":
            return int(content, 16)
        if name == "float":
            return float(content)
        if name == "complex":
            return complex(float(content[0]), float(content[1]))
        if name == "bytes":
            return bytes.fromhex(content)
        if name == "dict":
            return {decode(key): decode(item) for key, item in content}
        return _SEQUENCES[name](decode(item) for item in content)
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        raise Malformed("a value must be plain data") from error


class Link:
    """Frames over a socket: four bytes of length, then JSON."""

    def __init__(
        self, connection: socket.socket, largest_bytes: int, wait: Callable[[socket.socket, bool], None] | None = None
    ) -> None:
        """wait: called before each transfer, with True before a write. Returns when the socket is ready, or raises
        TimeoutError. None: wait without a limit, for programs that another process ends."""
        self._connection = connection
        self._largest_bytes = largest_bytes
        self._wait = wait

    def send(self, message: Any) -> None:
        """Send one frame. Raises OSError when the other side is gone, and TimeoutError."""
        content = json.dumps(message).encode("ascii")
        left = memoryview(struct.pack("!I", len(content)) + content)
        while left:
            if self._wait is not None:
                self._wait(self._connection, True)
            left = left[self._connection.send(left, socket.MSG_DONTWAIT if self._wait is not None else 0) :]

    def receive(self) -> Any:
        """The next message. Raises EOFError or OSError when the other side is gone, Malformed, TimeoutError."""
        (size,) = struct.unpack("!I", self._receive_exactly(4))
        if size > self._largest_bytes:
            raise Malformed(f"a message must have <= {self._largest_bytes} bytes, got {size}")
        try:
            return json.loads(self._receive_exactly(size).decode("ascii"))
        except (ValueError, RecursionError) as error:
            raise Malformed("a message must be JSON") from error

    def _receive_exactly(self, size: int) -> bytes:
        found = bytearray()
        while len(found) < size:
            if self._wait is not None:
                self._wait(self._connection, False)
            part = self._connection.recv(min(size - len(found), 1 << 16))
            if not part:
                raise EOFError("the other side is gone")
            found += part
        return bytes(found)
