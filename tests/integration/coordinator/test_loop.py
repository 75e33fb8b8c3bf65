"""The loop keeps its promises whatever dies: each prompt trained once, in order, within the lag bound, none aged out.

Real loop, scheduler, store, gRPC and weight broadcast; stand-in engine and trainer (both pass the contract suites).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tests.integration.coordinator.small_run import VOCAB, LengthGrader, Run, a_spec, same_batch
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.report import Phase
from specrl.records import Batch, Rollout, RolloutRequest, WeightChecksums, WeightGroup, WeightManifest


def distinct(trained: Sequence[Batch]) -> dict[int, Batch]:
    """Batches by step; a step that was trained again (a replay) must have been the same batch."""
    found: dict[int, Batch] = {}
    for batch in trained:
        assert same_batch(found.setdefault(batch.step, batch), batch), f"step {batch.step} was trained on two batches"
    return found


def check_promises(run: Run) -> None:
    """What every run must have done, however it went."""
    spec = run.spec
    batches = distinct(run.trained)
    assert sorted(batches) == list(range(1, spec.schedule.steps + 1))
    for step, batch in batches.items():
        positions = [int(item.rollout.group_id.split("-")[1]) for item in batch.rollouts]
        wanted = [i for i in range(spec.schedule.prompts_per_step) for _ in range(spec.schedule.group_size)]
        assert positions == wanted, "every prompt of the step, in order, with all of its samples"
        assert max(batch.policy_lags) <= spec.schedule.max_policy_lag, f"lag at step {step}"
        assert min(batch.policy_lags) >= 0
    reports = run.board.reports()
    assert [report.step for report in reports] == sorted(batches)
    status = run.board.status()
    assert status.phase is Phase.FINISHED
    assert status.counters["discardedForAge"] == 0
    assert status.summary is not None
    assert status.summary.prompts_trained == spec.schedule.steps * spec.schedule.prompts_per_step
    assert run.store.rollouts() == [], "nothing of a trained step is left"


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_a_run_trains_every_prompt_once_within_the_lag_bound(tmp_path: Path, lag: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=lag)) as run:
        await run.finish()
        check_promises(run)
        reports = run.board.reports()
        assert [v.policy_version for v in run.board.validations()] == [0, 3, 6]
        assert [r.step for r in reports if r.validation_accuracy is not None] == [3, 6]
        assert all(report.checksum for report in reports)
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 6
        for replica in run.registry.replicas.values():
            assert replica.policy_version == 6


async def test_generation_runs_ahead_with_lag_and_not_without(tmp_path: Path) -> None:
    lags: dict[int, int] = {}
    for lag in (0, 1):
        folder = tmp_path / str(lag)
        folder.mkdir()
        async with Run(folder, a_spec(folder, maxPolicyLag=lag)) as run:
            await run.finish()
            lags[lag] = max(max(batch.policy_lags) for batch in run.trained)
    assert lags == {0: 0, 1: 1}


async def test_two_synchronous_runs_train_on_identical_batches(tmp_path: Path) -> None:
    trained: list[list[Batch]] = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        async with Run(folder, a_spec(tmp_path, maxPolicyLag=0)) as run:
            await run.finish()
            trained.append(run.trained)
    strip = [[_without_clock(batch) for batch in batches] for batches in trained]
    assert all(same_batch(a, b) for a, b in zip(*strip, strict=True))


def _without_clock(batch: Batch) -> Batch:
    rollouts = tuple(replace(item, rollout=replace(item.rollout, seconds=0.0)) for item in batch.rollouts)
    return Batch(batch.step, rollouts)


@pytest.mark.parametrize("step", [1, 3])
async def test_a_killed_replica_costs_no_prompt(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.trained() >= step)
        await run.restart_replica("gen-0")
        await run.finish()
        check_promises(run)


async def test_training_goes_on_while_a_replica_stays_away(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.trained() >= 1)
        await run.replicas["gen-1"].kill()
        await run.finish()
        check_promises(run)


async def test_a_run_waits_when_all_replicas_die_and_goes_on_when_one_comes_back(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.trained() >= 2)
        for name in ("gen-0", "gen-1"):
            await run.replicas[name].kill()
        await asyncio.sleep(0.5)
        before = run.store.trained()
        await asyncio.sleep(0.5)
        assert run.store.trained() - before <= 1, "at most what was collected already"
        await run.start_replica("gen-0")
        await run.finish()
        check_promises(run)


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_killed_trainer_is_brought_up_to_date_from_the_store(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: len(run.trained) >= step)
        await run.restart_trainer()
        await run.finish()
        check_promises(run)
        assert run.trainer is not None
        assert run.trainer.backend.status().step == 6


@pytest.mark.parametrize("step", [0, 1, 2, 4])
async def test_a_killed_coordinator_goes_on_where_the_store_ends(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: len(run.trained) >= step)
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)


async def test_all_three_killed_in_one_run(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path, steps=8)) as run:
        await run.until(lambda: len(run.trained) >= 1)
        await run.restart_replica("gen-1")
        await run.until(lambda: len(run.trained) >= 3)
        await run.restart_trainer()
        await run.until(lambda: run.store.trained() >= 4)
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)


async def test_a_killed_trainer_ends_in_the_same_weights(tmp_path: Path) -> None:
    """Replay is exact: with synchronous batches a run with a crash ends bit for bit like one without."""
    tables: list[np.ndarray] = []
    for crash in (False, True):
        folder = tmp_path / str(crash)
        folder.mkdir()
        async with Run(folder, a_spec(tmp_path, maxPolicyLag=0)) as run:
            if crash:
                await run.until(lambda: len(run.trained) >= 3)
                await run.restart_trainer()
            await run.finish()
            assert run.trainer is not None
            tables.append(run.trainer.backend.policy_VV)
    assert np.array_equal(tables[0], tables[1])


class CorruptOnce(TableEngine):
    """Claims to have received other bytes than were sent, the first `times` times."""

    times = 2

    async def receive(self, group: WeightGroup, manifest: WeightManifest, policy_version: int) -> WeightChecksums:
        received = await super().receive(group, manifest, policy_version)
        if self.times > 0:
            self.times -= 1
            spoilt = WeightChecksums(received.policy_version, (received.checksums[0] ^ 1, *received.checksums[1:]))
            assert self._staged is not None
            self._staged = (spoilt, *self._staged[1:])
            return spoilt
        return received


async def test_a_corrupted_transfer_is_repeated_and_never_served(tmp_path: Path) -> None:
    spoilt: list[CorruptOnce] = []

    def make(name: str) -> TableEngine:
        shape = TableShape(VOCAB, 128, 0.001)
        if name == "gen-0":
            spoilt.append(CorruptOnce(name, seed=7, shape=shape))
            return spoilt[-1]
        return TableEngine(name, seed=7, shape=shape)

    async with Run(tmp_path, a_spec(tmp_path), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        assert spoilt[0].times == 0
        assert {replica.policy_version for replica in run.registry.replicas.values()} == {6}


class Poisonous(TableEngine):
    """Every fifth rollout has a log-probability that is not a number."""

    count = 0

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        async for rollout in super().generate(requests, admit_together):
            self.count += 1
            if self.count % 5 == 0:
                rollout.sampler_logprobs_T[0] = np.nan
            yield rollout


async def test_poisoned_rollouts_are_refused_counted_and_sampled_again(tmp_path: Path) -> None:
    def make(name: str) -> TableEngine:
        return Poisonous(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))

    async with Run(tmp_path, a_spec(tmp_path), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        assert run.board.status().counters["poisoned"] > 0
        for batch in run.trained:
            assert all(np.isfinite(item.rollout.sampler_logprobs_T).all() for item in batch.rollouts)


async def test_a_verifiers_failure_is_not_a_zero_reward(tmp_path: Path) -> None:
    grader = LengthGrader(fails=lambda call: call % 4 == 0)
    async with Run(tmp_path, a_spec(tmp_path), grader=grader) as run:
        await run.finish()
        check_promises(run)
        assert run.board.status().counters["ungraded"] > 0


async def test_a_verifier_that_always_fails_on_a_prompt_fails_the_prompt_and_not_the_run(tmp_path: Path) -> None:
    class OnePromptFails(LengthGrader):
        async def grade(self, prompt, text):  # type: ignore[no-untyped-def]
            if prompt.position == 4:
                from specrl.records import Reward

                return Reward(None, "the verifier crashed")
            return await super().grade(prompt, text)

    async with Run(tmp_path, a_spec(tmp_path), grader=OnePromptFails()) as run:
        await run.finish()
        assert run.store.fact("failedPrompts") == {"000002-00001": "the verifier crashed"}
        groups = {item.rollout.group_id for batch in run.trained for item in batch.rollouts}
        assert len(groups) == 17
        assert "000002-00001" not in groups


async def test_a_peer_with_another_run_file_is_refused(tmp_path: Path) -> None:
    from specrl.errors import RunInvalid
    from specrl.records import Peer, Role

    async with Run(tmp_path, a_spec(tmp_path)) as run:
        with pytest.raises(RunInvalid, match="run file"):
            await run.client.register(Peer("gen-9", Role.GENERATION, "127.0.0.1:1", "another digest"))
