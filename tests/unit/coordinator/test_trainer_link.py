"""What users are told of the trainer: it is there as soon as it registers."""

from __future__ import annotations

from pathlib import Path

from specrl.coordinator.ledger import SqliteStore
from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.trainer_link import TrainerLink
from specrl.records import Peer, Role


async def test_trainer_that_has_registered_is_not_shown_as_absent(tmp_path: Path) -> None:
    """While a replica loaded for minutes, `specrl run` said "trainer absent", although it was not waited for."""
    registry = Registry("digest", 1.0, lambda: 0.0)
    store = StoreLink("run", SqliteStore(tmp_path / "store.db"))
    link = TrainerLink("run", registry, Ledger(store))
    seen = [link.state]
    for incarnation in ("first", "second"):
        registry.register_peer(Peer("trainer", Role.TRAINER, "127.0.0.1:2", "digest", incarnation))
        seen.append(link.state)
        registry.lose_trainer("it is gone")
        seen.append(link.state)
    await store.close()
    assert seen == ["absent", "registered", "absent", "registered", "absent"]
