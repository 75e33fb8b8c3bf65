"""Replicas that refuse the weights for the same reason again and again are given up; if all do, the run ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.members.refusals import MAX_EQUAL_REFUSALS, RefusalCounter
from specrl.errors import EngineFailed, PeerUnavailable, RecordInvalid, ReplicasRefused
from specrl.spec import RunSpec

REASON = "an update must hold the policy's tensors, got those of an adapter"


class RefusingEngine(TableEngine):
    """Refuses all weights, at once and in words."""

    async def receive_weights(self, *_: Any) -> None:
        raise RecordInvalid(REASON)


def make_engine(name: str, refusing: tuple[str, ...]) -> TableEngine:
    kind = RefusingEngine if name in refusing else TableEngine
    return kind(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))


def a_short_spec(folder: Path) -> RunSpec:
    """The others wait for a member that refuses until the time-out."""
    spec = a_spec(folder)
    return spec.model_copy(update={"weights": spec.weights.model_copy(update={"timeout_s": 1})})


async def test_a_run_ends_with_the_reason_that_all_of_its_replicas_give(tmp_path: Path) -> None:
    """They were ejected and admitted again for ever, and their reason was in no log: only the trainer's time-out."""
    refusing = ("gen-0", "gen-1")
    run = Run(tmp_path, a_short_spec(tmp_path), make_engine=lambda name: make_engine(name, refusing))
    with pytest.raises(
        ReplicasRefused, match="no replica is left that takes the policy's weights: gen-0: an update must"
    ):
        async with run:
            await run.finish()


async def test_a_run_goes_on_without_a_replica_that_refuses_and_its_status_says_why(tmp_path: Path) -> None:
    run = Run(tmp_path, a_short_spec(tmp_path), make_engine=lambda name: make_engine(name, ("gen-1",)))
    with capture_logs() as logs:
        async with run:
            await run.finish()
            refused = [replica for replica in run.observer.build_status().replicas if replica.id == "gen-1"]
    assert [(replica.state, replica.reason) for replica in refused] == [("givenUp", REASON)]
    assert [line["replica"] for line in logs if line["event"] == "replica_abandoned"] == ["gen-1"]


NOT_STARTED = "it failed 3 times in a row with exit code 1: vLLM failed to start"


async def test_a_run_does_not_wait_for_a_replica_that_is_not_started_and_its_status_says_why(tmp_path: Path) -> None:
    """The coordinator waited for it for five minutes, and neither status nor report had it."""
    spec = a_spec(tmp_path, steps=2)
    run = Run(tmp_path, spec.model_copy(update={"generation": spec.generation.model_copy(update={"replicas": 3})}))
    async with run:
        run.registry.set_not_started({"gen-2": NOT_STARTED})
        await run.finish()
        status = run.observer.build_status()
    assert [(replica.id, replica.state) for replica in status.replicas] == [
        ("gen-0", "serving"),
        ("gen-1", "serving"),
        ("gen-2", "givenUp"),
    ]
    assert status.replicas[2].reason == NOT_STARTED
    assert (status.replicas_given_up, status.counters["replicasGivenUp"]) == ({"gen-2": NOT_STARTED}, 1)


async def test_a_run_ends_when_its_last_replica_is_not_started_and_the_others_refuse(tmp_path: Path) -> None:
    spec = a_short_spec(tmp_path)
    spec = spec.model_copy(update={"generation": spec.generation.model_copy(update={"replicas": 3})})
    run = Run(tmp_path, spec, make_engine=lambda name: make_engine(name, ("gen-0", "gen-1")))
    async with run:
        run.registry.set_not_started({"gen-2": NOT_STARTED})
        with pytest.raises(ReplicasRefused, match=f"gen-0: {REASON}; gen-1: {REASON}; gen-2: {NOT_STARTED}"):
            await run.finish()


def test_only_equal_refusals_in_a_row_count() -> None:
    counter = RefusalCounter()
    for _ in range(MAX_EQUAL_REFUSALS):
        for error in (RecordInvalid("one"), RecordInvalid("another")):
            assert not counter.count_refusal("a", error)
    for error in (PeerUnavailable("gone"), EngineFailed("died")):
        for _ in range(2 * MAX_EQUAL_REFUSALS):
            assert not counter.count_refusal("a", error)
    assert [counter.count_refusal("a", RecordInvalid("one")) for _ in range(4)] == [False, False, True, False]
    assert counter.given_up == {"a": "one"}
