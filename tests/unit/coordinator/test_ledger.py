"""The ledger's facts in memory equal the stored ones, also after concurrent changes and a crash."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.unit.report.runs import a_step

from specrl.coordinator.ledger import SqliteStore
from specrl.coordinator.ledger.ledger import DurableFacts, Ledger
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.errors import StoreInvalid


@pytest.fixture
def store(tmp_path: Path) -> Iterator[SqliteStore]:
    opened = SqliteStore(tmp_path / "store.db")
    yield opened
    opened.close()


async def test_facts_that_are_set_concurrently_are_all_kept(store: SqliteStore) -> None:
    """A checkpoint completes concurrently with steps. It once reset facts in memory that were set during its write."""
    ledger = Ledger(StoreLink("run", store))
    await asyncio.gather(
        ledger.fail_prompt("000002-00001", "the verifier crashed"),
        ledger.complete_checkpoint(2, keeps_older=True),
        ledger.set_paused(True),
        ledger.prove_version(3),
    )
    assert ledger.facts == DurableFacts(
        failed_prompts={"000002-00001": "the verifier crashed"}, checkpoints=(0, 2), is_paused=True, proved_version=3
    )
    assert ledger.facts == DurableFacts.from_stored(store.read_facts())


@pytest.mark.parametrize("wanted", [False, True])
async def test_the_last_of_concurrent_requests_to_pause_and_resume_holds(store: SqliteStore, wanted: bool) -> None:
    """A resume during the write of a pause was answered as done, and then the run paused."""
    ledger = Ledger(StoreLink("run", store))
    await ledger.set_paused(wanted)
    await asyncio.gather(ledger.set_paused(not wanted), ledger.set_paused(wanted))
    assert ledger.facts.is_paused is wanted
    assert store.read_facts().get("paused", False) is wanted


def test_prompts_that_a_report_names_as_failed_are_dropped_after_a_restart(store: SqliteStore) -> None:
    store.set_fact("failedPrompts", {"000001-00000": "crashed", "000002-00001": "hung"})
    store.finish_step(1, a_step(1, failed={"000001-00000": "crashed"}).model_dump(by_alias=True))
    assert Ledger(StoreLink("run", store)).facts.failed_prompts == {"000002-00001": "hung"}


def test_invalid_facts_are_refused_by_name(store: SqliteStore) -> None:
    store.set_fact("checkpoints", "yesterday")
    with pytest.raises(StoreInvalid, match=r"got 1 invalid values, the first in checkpoints; restore the store"):
        Ledger(StoreLink("run", store))
