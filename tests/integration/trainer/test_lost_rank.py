"""A rank other than 0 is killed during a step. The coordinator loses the trainer and continues with a new one."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

from tests.fork_server import ForkServer
from tests.integration.trainer.conftest import VOCAB
from tests.integration.trainer.runs import a_batch, a_spec
from tests.integration.trainer.test_trainer_process import START_S, Trainer

from specrl.coordinator.ledger import SqliteStore, StoredRollout
from specrl.coordinator.ledger.ledger import Ledger
from specrl.coordinator.ledger.store_link import StoreLink
from specrl.coordinator.members.registry import Registry
from specrl.coordinator.members.service import CoordinatorService
from specrl.coordinator.members.trainer_link import TrainerLink
from specrl.records import GradedRollout, Reward, wire
from specrl.rpc.server import start_server
from specrl.spec import digest_spec, dump_spec, load_spec


async def test_step_whose_rank_1_was_killed_is_trained_by_the_next_trainer(
    ranks: ForkServer, policy: Path, tmp_path: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(dump_spec(a_spec(policy, data=2)))
    spec = load_spec(file)
    registry = Registry(digest_spec(spec), spec.telemetry.heartbeat_s, time.monotonic)
    service = CoordinatorService(registry, spec.name, spec.telemetry.heartbeat_s)
    server, port = await start_server(service.add_to, "127.0.0.1", 0)
    store = StoreLink(spec.name, SqliteStore(tmp_path / "store.db"))
    link = TrainerLink(spec.name, registry, Ledger(store))
    first = await asyncio.to_thread(Trainer, ranks, tmp_path, "first", f"127.0.0.1:{port}")
    second: Trainer | None = None
    try:
        async with asyncio.timeout(START_S):
            assert (await link.train_batch(a_batch(1, VOCAB))).tokens > 0
        batch = a_batch(1, VOCAB)
        for sample, item in enumerate(batch.rollouts):
            graded = wire.graded_to_bytes(GradedRollout(item.rollout, Reward(1.0)))
            await store.put_rollout(StoredRollout(1, 0, sample, 0, graded))
        await store.put_batch(1, wire.batch_to_outline(batch), [0])
        await store.finish_step(1, {"step": 1})
        first.processes[1].send_signal(signal.SIGSTOP)  # so that it is killed during the step
        training = asyncio.create_task(link.train_batch(a_batch(2, VOCAB)))
        while link.state != "training":  # noqa: ASYNC110 - the link has no event for it
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.5)
        first.processes[1].kill()
        assert await asyncio.to_thread(first.codes) == [1, -signal.SIGKILL], first.log()
        assert not training.done(), "the coordinator must wait for a trainer, not end with the error of this one"
        second = await asyncio.to_thread(Trainer, ranks, tmp_path, "second", f"127.0.0.1:{port}")
        async with asyncio.timeout(START_S):
            assert (await training).tokens > 0
            assert (await link.fetch_status()).step == 2
        assert link.recoveries == 1
    finally:
        for trainer in (first, second):
            if trainer is not None:
                await asyncio.to_thread(trainer.kill)
        await server.stop(None)
        await store.close()
