"""What passes between a worker and its sandboxes: values as frames, and the calls that a filter allows."""

from __future__ import annotations

import json
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specrl.rewards.sandbox import seccomp
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
def test_plain_values_arrive_as_they_were_sent(value: object) -> None:
    found = decode(json.loads(json.dumps(encode(value))))
    assert type(found) is type(value)
    assert found == value


def test_what_is_not_a_number_stays_so() -> None:
    assert repr(decode(json.loads(json.dumps(encode([float("nan"), complex("nan"), -0.0]))))) == "[nan, (nan+0j), -0.0]"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.sampled_from(["int", "set", "dict", "bytes"]), inner)
    ),
)


@given(found=JSON)
def test_whatever_arrives_is_plain_or_malformed(found: object) -> None:
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
def test_what_is_no_data_is_not_sent(value: object) -> None:
    with pytest.raises(NotData):
        encode(value)


@pytest.mark.parametrize(
    "sent", [b"\0\0\0\1[", b"\0\0\0\1\xff", b"\0\0\x10\1", b"\xff\xff\xff\xff", b"\0\0\2\0" + b"[" * 512]
)
def test_a_frame_that_is_none_is_malformed(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(Malformed):
            Link(ours, 4096).receive()


def never_ready(connection: socket.socket, is_sending: bool) -> None:
    raise TimeoutError


def test_a_frame_that_breaks_off_is_the_end_and_one_that_is_late_is_late() -> None:
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


def verdict_of(machine: str, number: int, argument: int = 0, *, has_namespaces: bool, audit: int | None = None) -> int:
    """What the kernel would answer: the filter, interpreted."""
    own = {"x86_64": 0xC000_003E, "aarch64": 0xC000_00B7}[machine]
    data = {0: number, 4: own if audit is None else audit, 16: argument, 24: argument}
    lines = seccomp.program(machine, has_namespaces=has_namespaces)
    place = accumulator = 0
    while True:
        code, if_true, if_false, operand = lines[place]
        place += 1
        if code == 0x06:
            return operand
        if code == 0x20:
            accumulator = data[operand]
            continue
        holds = {0x15: accumulator == operand, 0x35: accumulator >= operand, 0x45: bool(accumulator & operand)}[code]
        place += if_true if holds else if_false


ALLOW, DENY, NO_SUCH_CALL, KILL = 0x7FFF_0000, 0x0005_0001, 0x0005_0026, 0x8000_0000


@pytest.mark.parametrize("has_namespaces", [True, False])
def test_the_filter_answers_as_written_on_either_machine(has_namespaces: bool) -> None:
    calls = {"x86_64": (0, 272, 41, 53, 56, 302, 62, 72, 16), "aarch64": (63, 97, 198, 199, 220, 261, 129, 25, 29)}
    kept = ALLOW if has_namespaces else DENY
    for machine, (read, unshare, socket_, socketpair, clone, prlimit, kill, fcntl, ioctl) in calls.items():

        def said(number: int, argument: int = 0, machine: str = machine) -> int:
            return verdict_of(machine, number, argument, has_namespaces=has_namespaces)

        assert said(read) == ALLOW
        assert said(unshare) == DENY
        assert said(435) == NO_SUCH_CALL
        assert said(fcntl, 1) == said(ioctl, 0x5401) == ALLOW
        assert {said(fcntl, 8), said(fcntl, 10), said(fcntl, 15), said(ioctl, 0x8901)} == {kept}
        assert said(socketpair, 2) == said(socket_, 40) == said(socket_, 2) == DENY
        assert {said(socketpair, 1), said(socket_, 1), said(clone, 0x3D0F00), said(kill)} == {kept}
        assert said(clone, 0x1000_0000) == said(clone, 0x2000_0011) == DENY
        assert said(prlimit, 0) == ALLOW
        assert said(prlimit, 1) == DENY
        assert verdict_of(machine, read, has_namespaces=has_namespaces, audit=0x4000_0003) == KILL
    assert verdict_of("x86_64", 0x4000_0000, has_namespaces=has_namespaces) == KILL
