"""A copy of a run's folder, and of its store, goes on elsewhere (docs/runbook.md)."""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.integration.coordinator.small_run import Run, a_spec
from tests.integration.coordinator.test_loop import check_promises
from tests.redis_servers import RedisProcess, needs_redis, redis_settings

from specrl.coordinator.ledger import Claim
from specrl.coordinator.ledger.redis_store import RedisStore
from specrl.records import Batch
from specrl.trainer.checkpointing.checkpoints import list_complete


async def test_a_copy_of_a_stopped_runs_folder_goes_on_elsewhere(tmp_path: Path) -> None:
    """The store is a file of the folder, so no step is trained twice and no prompt is lost."""
    first = tmp_path / "first"
    first.mkdir()
    spec = a_spec(first)
    async with Run(first, spec) as run:
        await run.until(lambda: run.link.last_trained_step() >= 3)
        trained = run.trained
    restored = tmp_path / "elsewhere" / "restored"
    shutil.copytree(first, restored)
    shutil.rmtree(first)
    async with Run(restored, spec, trained=trained) as run:
        await run.finish()
        check_promises(run)
    assert list_complete(restored)[-1][0] == spec.schedule.steps


@needs_redis
async def test_a_copy_of_folder_and_redis_files_goes_on_elsewhere(tmp_path: Path) -> None:
    """As the volumes of a job's claim and of its store's pod, copied while the job is suspended."""
    first = tmp_path / "first" / "run"
    first.mkdir(parents=True)
    spec = a_spec(first)

    def run_on(folder: Path, server: RedisProcess, trained: list[Batch]) -> Run:
        return Run(
            folder,
            spec,
            open_store=lambda _: RedisStore(redis_settings(server), "small", Claim(run_id="small")),
            trained=trained,
        )

    server = RedisProcess(tmp_path / "first" / "redis")
    try:
        async with run_on(first, server, trained := []) as run:
            await run.until(lambda: run.link.last_trained_step() >= 3)
    finally:
        server.kill()
    shutil.copytree(tmp_path / "first", tmp_path / "second")
    shutil.rmtree(tmp_path / "first")
    server = RedisProcess(tmp_path / "second" / "redis")
    try:
        async with run_on(tmp_path / "second" / "run", server, trained) as run:
            await run.finish()
            check_promises(run)
    finally:
        server.kill()


async def test_checkpoints_alone_go_on_after_the_newest_of_them(tmp_path: Path) -> None:
    """Only the claim of a job is left, without its store. Steps after the newest checkpoint are trained again."""
    first = tmp_path / "first"
    first.mkdir()
    spec = a_spec(first)
    async with Run(first, spec) as run:
        await run.until(lambda: 4 in run.context.ledger.facts.checkpoints)
    restored = tmp_path / "restored"
    shutil.copytree(first / "checkpoints", restored / "checkpoints")
    newest = list_complete(restored)[-1][0]
    async with Run(restored, spec) as run:
        await run.finish()
        steps = sorted({batch.step for batch in run.trained})
        taken = [position for batch in run.trained for position in batch.positions]
    assert steps == list(range(newest + 1, spec.schedule.steps + 1))
    first_prompt = newest * spec.schedule.prompts_per_step
    assert sorted(taken) == list(range(first_prompt, spec.schedule.steps * spec.schedule.prompts_per_step))
