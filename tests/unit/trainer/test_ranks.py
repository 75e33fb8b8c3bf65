"""Commands on their way to the other ranks, and what happens when ranks end differently. Without processes."""

from __future__ import annotations

import numpy as np
import pytest
from tests.integration.trainer.runs import a_batch
from tests.stand_ins.trainer_backend import StandInBackend

from specrl.errors import PeerUnavailable, VersionConflict
from specrl.records import Batch, wire
from specrl.trainer.ranks import RankedBackend, RankLost, decode, encode

VOCAB = 16


class FakeControl:
    """Rank 0 of two, whose peer answers as it is told."""

    rank, world_size = 0, 2

    def __init__(self, others_outcome: int = 0) -> None:
        self.sent: list[bytes] = []
        self.others_outcome = others_outcome

    def send(self, message: bytes) -> None:
        self.sent.append(message)

    def receive(self) -> bytes:
        raise AssertionError("rank 0 receives nothing")

    def gather(self, outcome: int) -> list[int]:
        return [outcome, self.others_outcome]


def ranked(others_outcome: int = 0) -> tuple[RankedBackend, FakeControl]:
    control = FakeControl(others_outcome)
    backend = StandInBackend(VOCAB)
    backend.load(None)
    return RankedBackend(backend, control), control  # type: ignore[arg-type]  # a stand-in for the Gloo group


def test_commands_survive_the_wire() -> None:
    batch = a_batch(1, VOCAB)
    method, arguments, found = decode(encode("train_drafter", {"epochs": 3}, batch))
    assert (method, arguments) == ("train_drafter", {"epochs": 3})
    assert found is not None
    assert wire.batch_to_bytes(found) == wire.batch_to_bytes(batch)
    assert decode(encode("close", {})) == ("close", {}, None)


def test_other_ranks_get_the_same_step() -> None:
    backend, control = ranked()
    batch = a_batch(1, VOCAB)
    backend.train_step(batch)
    (message,) = control.sent
    method, _, found = decode(message)
    assert method == "train_step"
    assert found is not None
    assert wire.batch_to_bytes(found) == wire.batch_to_bytes(batch)


def test_refusal_of_all_ranks_is_an_answer() -> None:
    backend, _ = ranked(others_outcome=1)
    with pytest.raises(VersionConflict):
        backend.train_step(a_batch(2, VOCAB))


@pytest.mark.parametrize(("step", "others_outcome"), [(1, 1), (2, 0)])
def test_ranks_that_end_a_step_differently_are_lost(step: int, others_outcome: int) -> None:
    backend, _ = ranked(others_outcome)
    with pytest.raises(RankLost, match="alike"):
        backend.train_step(a_batch(step, VOCAB))


def test_rank_0_alone_may_fail_to_broadcast() -> None:
    backend, _ = ranked(others_outcome=0)
    with pytest.raises(VersionConflict):
        backend.broadcast_weights("unknown")


def test_broken_connection_is_a_lost_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, control = ranked()

    def broken(message: bytes) -> None:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(control, "send", broken)
    with pytest.raises(RankLost, match="Connection closed"):
        backend.check_alive()


def test_unknown_failure_is_a_lost_rank_and_never_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, _ = ranked()
    monkeypatch.setattr(StandInBackend, "train_step", lambda *_: np.zeros(1)[5])
    with pytest.raises(RankLost, match="IndexError"):
        backend.train_step(Batch(1, ()))


def test_lost_rank_is_not_retryable() -> None:
    assert not RankLost.retryable
    assert PeerUnavailable.retryable
