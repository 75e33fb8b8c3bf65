"""The stream delivers every tensor bit for bit, and both ends work while a bucket is on the wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specrl.errors import TrainerFailed
from specrl.records import TensorMeta, WeightManifest, WeightOwner
from specrl.weights.stream import receive_version, send_version

DTYPES = ("float32", "bfloat16", "int64", "bool")
shapes = st.lists(st.integers(0, 7), max_size=3).map(tuple)
metas = st.lists(st.tuples(st.sampled_from(DTYPES), shapes), min_size=1, max_size=12)


class Wire:
    """Both ends of a group of two in one thread: records what is sent, then delivers it in order.

    events: `start n` and `end n` of each broadcast. Fails if a buffer is touched while it is on the wire.
    """

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.given = 0
        self.events: list[str] = []
        self.is_busy = False
        self.is_receiving = False

    def start_broadcast(self, buffer: torch.Tensor) -> Callable[[], None]:
        assert not self.is_busy, "one broadcast at a time"
        self.is_busy = True
        number = self.given if self.is_receiving else len(self.sent)
        self.events.append(f"start {number}")
        before = buffer.clone()
        if self.is_receiving:
            self.given += 1
        else:
            self.sent.append(before)

        def wait_for_broadcast() -> None:
            if not self.is_busy:
                return
            self.is_busy = False
            self.events.append(f"end {number}")
            assert torch.equal(buffer, before), "a buffer was touched while it was on the wire"
            if self.is_receiving:
                buffer.copy_(self.sent[number])

        return wait_for_broadcast


def tensors_of(manifest: WeightManifest) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    found = []
    for meta in manifest.tensors:
        values = torch.randint(0, 100, meta.shape, generator=generator)
        found.append((meta.name, values.to(getattr(torch, meta.dtype))))
    return found


def manifest_of(kinds: list[tuple[str, tuple[int, ...]]], bucket_bytes: int) -> WeightManifest:
    return WeightManifest(
        tuple(TensorMeta(f"t{n}", WeightOwner.POLICY, dtype, shape) for n, (dtype, shape) in enumerate(kinds)),
        bucket_bytes,
    )


@settings(deadline=None)
@given(kinds=metas, bucket_bytes=st.integers(1, 2000))
def test_stream_delivers_tensors_bit_for_bit(kinds: list[tuple[str, tuple[int, ...]]], bucket_bytes: int) -> None:
    """Buckets may mix dtypes, so a tensor may begin at any byte."""
    wire = Wire()
    manifest = manifest_of(kinds, bucket_bytes)
    sums = send_version(wire, manifest, tensors_of(manifest))
    wire.is_receiving = True
    area = receive_version(wire, manifest)
    assert area.checksums == sums
    assert [meta for meta, _ in area.gather_tensors([None])] == list(manifest.tensors)
    for (_, mine), (_, sent) in zip(area.gather_tensors([None]), tensors_of(manifest), strict=True):
        assert mine.dtype == sent.dtype
        assert torch.equal(mine, sent)


def test_sender_gathers_the_next_bucket_while_one_is_on_the_wire() -> None:
    manifest = manifest_of([("float32", (8,))] * 3, 32)
    wire = Wire()

    def gathered() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in tensors_of(manifest):
            wire.events.append(f"gather {name}")
            yield name, tensor

    send_version(wire, manifest, gathered())
    assert wire.events == [
        *("gather t0", "start 0"),
        *("gather t1", "end 0", "start 1"),
        *("gather t2", "end 1", "start 2", "end 2"),
    ]


def test_receiver_computes_checksums_while_the_next_bucket_is_on_the_wire(monkeypatch: pytest.MonkeyPatch) -> None:
    from specrl.weights import staging

    manifest = manifest_of([("float32", (8,))] * 2, 32)
    wire = Wire()
    send_version(wire, manifest, tensors_of(manifest))
    wire.events = []
    wire.is_receiving = True
    sums = staging.checksum_bytes
    monkeypatch.setattr(staging, "checksum_bytes", lambda slot: (wire.events.append("sum"), sums(slot))[1])
    receive_version(wire, manifest)
    assert wire.events == ["start 0", "end 0", "start 1", "sum", "end 1", "sum"]


def test_a_tensor_that_does_not_match_the_manifest_ends_the_send_after_the_running_broadcast() -> None:
    manifest = manifest_of([("float32", (8,))] * 2, 32)
    wire = Wire()
    tensors = tensors_of(manifest)
    with pytest.raises(TrainerFailed, match="tensors must follow the manifest"):
        send_version(wire, manifest, [tensors[0], ("another", tensors[1][1])])
    assert not wire.is_busy, "the buffer is read until the broadcast ends"
