"""What is thrown at a gRPC method: nonsense, messages of its type with absurd fields, and a legal one that was damaged.

Strategies are made from protobuf descriptors, so that a new field is fuzzed without a line here. A legal message is
damaged in the ways in which a network, another version or an attacker damages it: cut short, a byte changed, bytes
inserted, itself twice in a row (protobuf merges), a field replaced by an absurd one.
"""

from __future__ import annotations

import math
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

Call = tuple[str, bytes]
"""Full name of a method, `/package.Service/Method`, and the bytes of a request."""

_INTEGERS = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_FIXED64: (0, 2**64 - 1),
    FieldDescriptor.TYPE_ENUM: (-(2**31), 2**31 - 1),
}
_FLOATS = st.sampled_from([0.0, -1.0, 1e-300, 0.5, 1.0, 1e300, math.inf, -math.inf, math.nan])
_TEXTS = st.one_of(
    st.sampled_from(
        ["", "x" * 5000, "../../etc", "/", "\0", "\x1b[2J", "{}", "NaN", "gen-0", "trainer", "127.0.0.1:1"]
    ),
    st.text(max_size=8),
)


def methods(service: ServiceDescriptor) -> dict[str, Descriptor]:
    """Request type by full method name."""
    return {f"/{service.full_name}/{method.name}": method.input_type for method in service.methods}


def damaged(legal: Message) -> st.SearchStrategy[bytes]:
    """Requests of the type of `legal`, most of which must be refused."""
    data = legal.SerializeToString(deterministic=True)
    return st.one_of(
        st.binary(max_size=64),
        absurd(legal.DESCRIPTOR).map(lambda message: message.SerializeToString(deterministic=True)),
        st.integers(0, max(0, len(data) - 1)).map(lambda end: data[:end]),
        st.just(data + data),
        st.tuples(st.integers(0, max(0, len(data) - 1)), st.integers(0, 255)).map(
            lambda change: data[: change[0]] + bytes([change[1]]) + data[change[0] + 1 :]
        ),
        st.tuples(st.integers(0, len(data)), st.binary(min_size=1, max_size=6)).map(
            lambda insertion: data[: insertion[0]] + insertion[1] + data[insertion[0] :]
        ),
        _one_field_wrong(legal),
    )


@st.composite
def _one_field_wrong(draw: st.DrawFn, legal: Message) -> bytes:
    """The legal message with one field, at any depth, replaced."""
    wrong = type(legal)()
    wrong.CopyFrom(legal)
    place: Any = wrong
    while True:
        fields = list(place.DESCRIPTOR.fields)
        if not fields:
            break
        field = draw(st.sampled_from(fields))
        inner = field.message_type is not None
        if inner and draw(st.booleans()):
            there = getattr(place, field.name)
            if field.is_repeated and len(there):
                place = there[draw(st.integers(0, len(there) - 1))]
                continue
            if not field.is_repeated and place.HasField(field.name):
                place = there
                continue
        place.ClearField(field.name)
        _fill(draw, place, field, 2)
        break
    return wrong.SerializeToString(deterministic=True)


@st.composite
def absurd(draw: st.DrawFn, kind: Descriptor, depth: int = 3) -> Message:
    """Any message of a type: fields left out, at their limits, not finite, far too long."""
    message = GetMessageClass(kind)()
    for field in kind.fields:
        if draw(st.integers(0, 3)):
            _fill(draw, message, field, depth)
    return message


def _fill(draw: st.DrawFn, message: Message, field: FieldDescriptor, depth: int) -> None:
    if field.message_type is not None:
        if depth > 0:
            count = draw(st.integers(0, 2)) if field.is_repeated else 1
            for _ in range(count):
                value = draw(absurd(field.message_type, depth - 1))
                target = getattr(message, field.name)
                target.add().CopyFrom(value) if field.is_repeated else target.CopyFrom(value)
        return
    values = _values(field)
    if field.is_repeated:
        getattr(message, field.name).extend(draw(st.lists(values, max_size=4)))
    else:
        setattr(message, field.name, draw(values))


def _values(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    if field.type in _INTEGERS:
        low, high = _INTEGERS[field.type]
        return st.one_of(st.sampled_from([low, high, 0, 1, max(low, -1), 2]), st.integers(low, high))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type in (FieldDescriptor.TYPE_DOUBLE, FieldDescriptor.TYPE_FLOAT):
        return _FLOATS
    if field.type == FieldDescriptor.TYPE_BYTES:  # packed numbers: of no whole number, extreme, not finite
        return st.one_of(st.binary(max_size=64), st.sampled_from([b"\xff" * 12, b"\x00\x00\xc0\x7f" * 3]))
    assert field.type == FieldDescriptor.TYPE_STRING, f"a strategy must be written for {field.full_name}"
    return _TEXTS
