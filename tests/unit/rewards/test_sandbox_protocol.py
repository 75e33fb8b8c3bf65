"""The protocol between a worker and its sandboxes: values encoded in frames."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.rewards.sandbox.inside.codec import Link, Malformed, NotData, decode, encode

PLAIN = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(st.text() | st.integers(), inner)
        | st.sets(st.integers() | st.text())
        | st.frozensets(st.integers())
    ),
)


@given(value=PLAIN)
def test_plain_values_survive_encoding(value: object) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert type(found) is type(value)
    assert found == value


def test_nan_survives_encoding() -> None:
    assert repr(decode(json.loads(json.dumps(encode([float("nan"), complex("nan"), -0.0]))))) == "[nan, (nan+0j), -0.0]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["int", "set", "dict", "bytes"]), inner)
    ),
)


@given(found=JSON)
def test_decoding_gives_plain_data_or_raises_malformed(found: object) -> None:
    try:
        value = decode(found)
    except Malformed:
        return
    stack = [value]
    while stack:
        item = stack.pop()
        assert type(item) in (type(None), bool, int, float, complex, str, bytes, list, tuple, set, frozenset, dict)
        if isinstance(item, dict):
            stack += [*item, *item.values()]
        elif isinstance(item, list | tuple | set | frozenset):
            stack += item


@pytest.mark.parametrize("value", [object(), len, iter([]), type, [object()], {"a": lambda: 0}])
def test_encoding_refuses_values_that_are_not_plain_data(value: object) -> None:
    with pytest.raises(NotData):
        encode(value)


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\1[", b"\0\0\0\1\xff", b"\0\0\x10\1", b"\xff\xff\xff\xff", b"\0\0\2\0" + b"[" * 512]
)
def test_an_invalid_frame_is_malformed(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Malformed):
            Link(ours, 4096).receive()


def never_ready(connection: socket.socket, is_sending: bool) -> None:
    raise TimeoutError


def test_a_truncated_frame_raises_eof_and_a_late_one_times_out() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(TimeoutError):
            Link(ours, 4096, wait=never_ready).receive()
        with pytest.raises(TimeoutError):
            Link(ours, 4096, wait=never_ready).send({})
        theirs.sendall(b"\0\0\0\5ab")
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(EOFError):
            Link(ours, 4096).receive()
