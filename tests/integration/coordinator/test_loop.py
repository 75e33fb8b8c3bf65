"""The loop keeps its promises whichever process dies: every prompt is trained once, in order, within the lag bound.

Real loop, scheduler, store, gRPC and weight broadcast; stand-in engine and trainer (both pass the contract suites).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from prometheus_client import REGISTRY
from tests.integration.coordinator.small_run import VOCAB, LengthGrader, Run, a_spec, same_batch
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.ledger import SqliteStore
from specrl.coordinator.main import _run_until_stopped
from specrl.coordinator.observe.rljob_status import RLJobStatusWriter
from specrl.errors import NothingGraded, StoreFailed
from specrl.formats.counters import COUNTERS
from specrl.formats.reports import Phase
from specrl.generation.engine import LoadTiming
from specrl.generation.service import GenerationService
from specrl.launcher.run_directory import RunDirectory
from specrl.launcher.stored_reports import read_stored_rollouts
from specrl.records import (
    Batch,
    Prompt,
    Reward,
    Rollout,
    RolloutRequest,
    VersionSpan,
    WeightChecksums,
    WeightGroup,
    WeightManifest,
)
from specrl.spec import RunSpec
from specrl.spec.cluster import FailurePolicy
from specrl.spec.run import Transport
from specrl.spec.trainer import WithoutSignal
from specrl.trainer.checkpointing import checkpoints


def distinct(trained: Sequence[Batch]) -> dict[int, Batch]:
    """The trained batches by step. A step that was trained again (a replay) must have had the same batch."""
    found: dict[int, Batch] = {}
    for batch in trained:
        assert same_batch(found.setdefault(batch.step, batch), batch), f"step {batch.step} was trained on two batches"
    return found


def place_of(run: Run, rollout: Rollout) -> int:
    """The position of a rollout's prompt in the stream."""
    own_step, index = map(int, rollout.group_id.split("-"))
    return (own_step - 1) * run.spec.schedule.prompts_per_step + index


def check_promises(run: Run) -> None:
    """Check the promises that every finished run must have kept."""
    spec = run.spec
    batches = distinct(run.trained)
    assert sorted(batches) == list(range(1, spec.schedule.steps + 1))
    taken: list[int] = []
    for step, batch in sorted(batches.items()):
        assert len(batch.positions) == spec.schedule.prompts_per_step
        samples = [(place_of(run, item.rollout), item.rollout.sample_index) for item in batch.rollouts]
        wanted = [(position, sample) for position in batch.positions for sample in range(spec.schedule.group_size)]
        assert samples == wanted, "every prompt of the step, in order, with all of its samples"
        taken += batch.positions
        assert max(batch.policy_lags) <= spec.schedule.max_policy_lag, f"lag at step {step}"
        assert min(batch.policy_lags) >= 0
    assert sorted(taken) == list(range(spec.schedule.steps * spec.schedule.prompts_per_step)), "each prompt once"
    assert taken == sorted(taken), "in the order of the stream"
    reports = run.observer.read_reports()
    assert [report.step for report in reports] == sorted(batches)
    for report in reports:
        assert report.policy_lags == np.bincount(batches[report.step].policy_lags).tolist()
    status = run.observer.build_status()
    assert status.phase is Phase.FINISHED
    assert status.counters["unaccountedRollouts"] == 0
    assert set(status.counters) == set(COUNTERS), "each has its words"
    assert status.summary is not None
    assert status.summary.prompts_trained == spec.schedule.steps * spec.schedule.prompts_per_step
    assert run.store.read_rollouts() == [], "nothing of a trained step is left"


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_a_run_trains_every_prompt_once_within_the_lag_bound(tmp_path: Path, lag: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=lag)) as run:
        await run.finish()
        check_promises(run)
        reports = run.observer.read_reports()
        assert [v.policy_version for v in run.observer.read_validations()] == [0, 3, 6]
        assert [r.step for r in reports if r.validation_reward is not None] == [3, 6]
        for report, validation in zip((reports[2], reports[5]), run.observer.read_validations()[1:], strict=True):
            first = validation.pass_at[0]
            assert (first.k, first.problems) == (1, 4)
            assert report.validation_low == first.low <= first.rate <= first.high == report.validation_high
            assert report.validation_reward == validation.reward == first.rate
        assert all(report.checksum for report in reports)
        assert (tmp_path / "metrics.jsonl").read_text().count("\n") == 6
        assert (tmp_path / "validations.jsonl").read_text().count("\n") == 3
        samples = read_stored_rollouts(RunDirectory(tmp_path))
        assert [sample.step for sample in samples] == [step for step in range(1, 7) for _ in range(4)]
        assert all(report.reward_error is not None for report in run.observer.read_reports())
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


async def test_synchronous_runs_train_on_identical_batches(tmp_path: Path) -> None:
    """The second one loses a replica: which of them samples a rollout decides nothing."""
    trained: list[list[Batch]] = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        async with Run(folder, a_spec(tmp_path, maxPolicyLag=0)) as run:
            if name == "second":
                await run.until(lambda: run.store.read_last_trained_step() >= 1)
                await run.replicas["gen-1"].kill()
            await run.finish()
            trained.append(run.trained)
    strip = [[_without_origin(batch) for batch in batches] for batches in trained]
    assert all(same_batch(a, b) for a, b in zip(*strip, strict=True))


def _without_origin(batch: Batch) -> Batch:
    plain = [replace(item.rollout, seconds=0.0, replica_id="") for item in batch.rollouts]
    rollouts = tuple(replace(item, rollout=rollout) for item, rollout in zip(batch.rollouts, plain, strict=True))
    return replace(batch, rollouts=rollouts)


class Straggling(TableEngine):
    """Rollouts of the first prompt end once `is_over` is set; the others take their usual time."""

    is_over = asyncio.Event()

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        if request.group_id == "000001-00000":
            await self.is_over.wait()
        return await super()._sample_rollout(request)


def a_straggling_run(folder: Path) -> Run:
    """A run with maxPolicyLag 2 and seats for about one and a half steps."""
    Straggling.is_over = asyncio.Event()
    spec = a_spec(folder, maxPolicyLag=2)
    return Run(folder, spec, make_engine=lambda name: Straggling(name, seed=7, shape=TableShape(VOCAB, 128, 0.001)))


def count_finished(run: Run) -> int:
    """Count the stored rollouts of training steps, without those of the drafter's initialisation."""
    return sum(count for step, count in run.store.count_rollouts().items() if step > 0)


@pytest.mark.parametrize("is_killed", [False, True], ids=["undisturbed", "coordinator_killed"])
async def test_a_straggler_is_waited_for_while_later_steps_are_generated(tmp_path: Path, is_killed: bool) -> None:
    """All rollouts that the lag bound admits are finished, except those of the first prompt."""
    async with a_straggling_run(tmp_path) as run:
        per_step = run.spec.schedule.prompts_per_step * run.spec.schedule.group_size
        finished = 3 * per_step - run.spec.schedule.group_size
        await run.until(lambda: count_finished(run) == finished)
        assert run.store.read_last_trained_step() == 0
        if is_killed:
            await run.restart_coordinator()
            assert count_finished(run) == finished
        Straggling.is_over.set()
        await run.finish()
        check_promises(run)


@pytest.mark.parametrize("step", [1, 2, 4])
async def test_a_run_goes_on_after_kills_of_everything(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=2, steps=8)) as run:
        await run.until(lambda: len(run.trained) >= step)
        await run.restart_coordinator()
        await run.until(lambda: len(run.trained) >= step + 1)
        await run.restart_replica("gen-1")
        await run.until(lambda: len(run.trained) >= step + 2)
        await run.restart_trainer()
        await run.finish()
        check_promises(run)


class Backdating(TableEngine):
    """Claims for every fifth rollout a first token of a version older than the requested one."""

    count = 0

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        async for rollout in super().generate(requests, admit_together):
            self.count += 1
            if self.count % 5 == 0 and rollout.total_length > 1 and rollout.rollout_id[0] == "0":
                old = VersionSpan(rollout.oldest_version - 1, 0, 1)
                rest = (replace(rollout.versions[0], first=1), *rollout.versions[1:])
                versions = (old, *(span for span in rest if span.first < span.end))
                yield replace(rollout, versions=versions)
            else:
                yield rollout


async def test_a_rollout_with_a_token_older_than_its_start_is_refused(tmp_path: Path) -> None:
    def make(name: str) -> TableEngine:
        return Backdating(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))

    async with Run(tmp_path, a_spec(tmp_path), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        assert run.observer.build_status().counters["poisoned"] > 0


async def test_a_prompt_reported_as_failed_stays_failed_when_the_coordinator_dies(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 1)
        await run.kill_coordinator()
        store = SqliteStore(tmp_path / "store.db")
        store.set_fact("failedPrompts", {"000006-00002": "the verifier hung, and the coordinator died"})
        store.close()
        await run.start_coordinator()
        await run.finish()
        groups = {item.rollout.group_id for batch in run.trained for item in batch.rollouts}
        assert len(groups) == 17
        assert "000006-00002" not in groups
        settled = [position for batch in distinct(run.trained).values() for position in batch.positions]
        assert sorted(settled) == list(range(18))


@pytest.mark.parametrize("step", [1, 3])
async def test_a_killed_replica_costs_no_prompt(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= step)
        await run.restart_replica("gen-0")
        await run.finish()
        check_promises(run)


async def test_training_goes_on_while_a_replica_stays_away(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 1)
        await run.replicas["gen-1"].kill()
        await run.finish()
        check_promises(run)


class StuckEngine(TableEngine):
    """Never finishes requests of one kind; fails them once it is dead."""

    def __init__(self, kind: str) -> None:
        super().__init__("gen-1", seed=7, shape=TableShape(VOCAB, 128, 0.001))
        self.kind = kind
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    def die(self) -> None:
        super().die()
        self.ended.set()

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        if request.rollout_id.startswith(self.kind):
            self.begun.set()
            await self.ended.wait()
        return await super()._sample_rollout(request)


@pytest.mark.parametrize("how", ["hangs", "fails"])
@pytest.mark.parametrize("kind", ["validation-0", "drafter"])
async def test_side_rollouts_are_finished_without_a_replica_that(tmp_path: Path, kind: str, how: str) -> None:
    spec = a_spec(tmp_path)
    spec = spec.model_copy(update={"canary": spec.canary.model_copy(update={"every_steps": 0})})
    stuck = StuckEngine(kind)
    healthy = TableEngine("gen-0", seed=7, shape=TableShape(VOCAB, 128, 0.001))
    async with Run(tmp_path, spec, make_engine=lambda name: stuck if name == "gen-1" else healthy) as run:
        await run.until(stuck.begun.is_set)
        if how == "hangs":  # its connections stay open, but its heartbeats stop
            run.replicas["gen-1"].membership.cancel()
        else:
            stuck.die()
        await run.finish()
        check_promises(run)
        assert [v.policy_version for v in run.observer.read_validations() if v is not None] == [0, 3, 6]


class Misanswering(GenerationService):
    """Answers the first training requests in a way that no replica should."""

    kind = ""
    left = 6

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        asked: list[str] = []

        async def noted() -> AsyncIterator[Any]:
            async for request in request_iterator:
                asked.extend(item.rollout_id for item in request.requests)
                yield request

        async for message in super().Generate(noted(), context):
            if not Misanswering.left or not message.rollout_id[0].isdigit():
                yield message
                continue
            Misanswering.left -= 1
            if self.kind == "ends early":
                return
            elif self.kind == "of nobody":
                stranger = type(message)()
                stranger.CopyFrom(message)
                stranger.rollout_id = "000099-0000-00-0"
                yield stranger
                yield message
            elif self.kind == "twice":
                yield message
                yield message
            elif self.kind == "as another's":
                message.rollout_id = next(name for name in reversed(asked) if name != message.rollout_id)
                yield message
            else:
                message.finish_reason = 0
                message.packed_sampler_logprobs = b"xyz"
                yield message


@pytest.mark.parametrize("kind", ["ends early", "of nobody", "twice", "as another's", "malformed"])
async def test_whatever_a_replica_answers_every_prompt_is_trained_once(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Misanswering, "kind", kind)
    monkeypatch.setattr(Misanswering, "left", 6)
    async with Run(tmp_path, a_spec(tmp_path), make_service=Misanswering) as run:
        await run.finish()
        check_promises(run)
    assert Misanswering.left == 0


class StuckInUpdate(TableEngine):
    """Never returns from one call of the update to version 2."""

    def __init__(self, call: str) -> None:
        super().__init__("gen-1", seed=7, shape=TableShape(VOCAB, 128, 0.001))
        self.call = call
        self.begun = asyncio.Event()

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        await self._stick("receive", policy_version)
        return await super().receive_weights(group, manifest, policy_version)

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        await self._stick("load", sent.policy_version)
        return await super().load_weights(sent)

    async def _stick(self, call: str, policy_version: int) -> None:
        if (call, policy_version) == (self.call, 2):
            self.begun.set()
            await asyncio.Event().wait()


@pytest.mark.parametrize(("call", "timeout_s"), [("receive", 5), ("load", 300)])
async def test_an_update_waits_for_a_hanging_replica_no_longer_than_for_its_heartbeats(
    tmp_path: Path, call: str, timeout_s: int
) -> None:
    """In a collective the others wait for the collective's time-out, and in every other call only for heartbeats."""
    spec = a_spec(tmp_path)
    spec = spec.model_copy(update={"weights": spec.weights.model_copy(update={"timeout_s": timeout_s})})
    stuck = StuckInUpdate(call)
    healthy = TableEngine("gen-0", seed=7, shape=TableShape(VOCAB, 128, 0.001))
    async with Run(tmp_path, spec, make_engine=lambda name: stuck if name == "gen-1" else healthy) as run:
        await run.until(stuck.begun.is_set)
        run.replicas["gen-1"].membership.cancel()  # as if it were frozen: its connections stay open
        await run.until(
            lambda: run.store.read_last_trained_step() >= 4, timeout_s=20
        )  # a call's own deadline is 30 s, or 300
        await run.finish()
        check_promises(run)


class Listing(TableEngine):
    """Keeps the manifest objects of all its receive calls."""

    def __init__(self, name: str, told: list[WeightManifest]) -> None:
        super().__init__(name, seed=7)
        self.told = told

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        self.told.append(manifest)
        return await super().receive_weights(group, manifest, policy_version)


async def test_a_replica_receives_the_manifest_once_and_again_after_its_restart(
    tmp_path: Path,
) -> None:
    told: list[WeightManifest] = []
    async with Run(tmp_path, a_spec(tmp_path), make_engine=lambda name: Listing(name, told)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        await run.restart_replica("gen-0")
        await run.finish()
        check_promises(run)
    assert len({id(manifest) for manifest in told}) == 3, "two replicas, and one of them anew"
    assert len(told) > 2 * run.spec.schedule.steps


async def test_a_start_names_who_is_waited_for(tmp_path: Path) -> None:
    """It said for minutes that it waits for the trainer and the replicas, whoever was there."""
    async with Run(tmp_path, a_spec(tmp_path, steps=1), started=("gen-0",)) as run:
        await run.until(lambda: run.observer.build_status().detail == "waiting for 1 of 2 replicas (gen-1)")
        await run.start_replica("gen-1")
        await run.finish()


async def test_a_start_waits_for_no_replica_that_the_rljob_no_longer_or_only_now_asks_for(tmp_path: Path) -> None:
    """The run file has those of the job's start. `kubectl scale` may have removed some since, or added some."""
    async with Run(tmp_path, a_spec(tmp_path, steps=1), started=("gen-0",)) as run:
        run.loop.context.controls.follow_rljob(3, FailurePolicy())
        await run.until(lambda: run.observer.build_status().detail == "waiting for 1 of 2 replicas (gen-1)")
        run.loop.context.controls.follow_rljob(1, FailurePolicy())
        await run.finish()


async def test_the_exported_minimum_is_the_rljobs_present_one(tmp_path: Path) -> None:
    """It was 1 in every run, since run files have no failurePolicy. SpecrlReplicasBelowMinimum watched nothing else."""

    def exported(run: Run) -> float | None:
        run.observer.build_status()
        return REGISTRY.get_sample_value("specrl_coordinator_replicas_minimum", {"rljob": run.spec.name})

    async with Run(tmp_path, a_spec(tmp_path, steps=1)) as run:
        assert exported(run) == 1
        run.loop.context.controls.follow_rljob(4, FailurePolicy(min_generation_replicas=3))
        assert exported(run) == 3
        run.loop.context.controls.follow_rljob(2, FailurePolicy(min_generation_replicas=3))
        assert exported(run) == 2
        await run.finish()


async def test_a_run_waits_when_all_replicas_die_and_goes_on_when_one_comes_back(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        for name in ("gen-0", "gen-1"):
            await run.replicas[name].kill()
        await asyncio.sleep(0.5)
        before = run.store.read_last_trained_step()
        await asyncio.sleep(0.5)
        assert run.store.read_last_trained_step() - before <= 1, "at most what was collected already"
        await run.start_replica("gen-0")
        await run.finish()
        check_promises(run)


@pytest.mark.parametrize("step", [1, 2, 3])
async def test_a_killed_trainer_is_recovered_from_the_store(tmp_path: Path, step: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: len(run.trained) >= step)
        await run.restart_trainer()
        await run.finish()
        check_promises(run)
        assert run.trainer is not None
        assert run.trainer.backend.get_status().step == 6


@pytest.mark.parametrize("step", [0, 1, 2, 4])
async def test_a_killed_coordinator_continues_from_the_store(tmp_path: Path, step: int) -> None:
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
        await run.until(lambda: run.store.read_last_trained_step() >= 4)
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)


async def test_a_killed_trainer_ends_in_the_same_weights(tmp_path: Path) -> None:
    """Replay is exact: with synchronous batches a run with a crash has the same final weights, bit by bit."""
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
    """Reports wrong checksums the first `times` times."""

    times = 2

    async def receive_weights(
        self, group: WeightGroup, manifest: WeightManifest, policy_version: int
    ) -> WeightChecksums:
        received = await super().receive_weights(group, manifest, policy_version)
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


def by_files(spec: RunSpec) -> RunSpec:
    return spec.model_copy(update={"weights": spec.weights.model_copy(update={"transport": Transport.CHECKPOINT})})


@pytest.mark.parametrize("lag", [0, 1])
async def test_a_run_whose_weights_travel_as_files_trains_the_same(tmp_path: Path, lag: int) -> None:
    async with Run(tmp_path, by_files(a_spec(tmp_path, maxPolicyLag=lag))) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        await run.restart_replica("gen-0")
        await run.until(lambda: run.store.read_last_trained_step() >= 3)
        await run.restart_trainer()
        await run.finish()
        check_promises(run)
        assert all(report.checksum for report in run.observer.read_reports())
        assert run.registry.replicas["gen-1"].policy_version == 6
    (kept,) = (tmp_path / "weights").iterdir()
    assert kept.name.startswith("version-000006-"), "one version is kept"


async def test_files_that_a_replica_cannot_read_are_written_again(tmp_path: Path) -> None:
    async with Run(tmp_path, by_files(a_spec(tmp_path))) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        (kept,) = (tmp_path / "weights").iterdir()
        for file in kept.iterdir():
            file.write_bytes(b"torn")
        await run.restart_replica("gen-0")  # it reads the same files as the others, if it registers in time
        await run.finish()
        check_promises(run)


async def test_weights_that_cannot_be_written_end_the_run_with_a_message(tmp_path: Path) -> None:
    (tmp_path / "weights").write_text("not a folder")
    async with Run(tmp_path, by_files(a_spec(tmp_path))) as run:
        with pytest.raises(StoreFailed, match="could not write weights to"):
            await run.finish()


class Spoiling(TableEngine):
    """Spoils the rollout of every fifth sample, the first time that it is drawn: five failures end a prompt."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.samples: list[tuple[str, int]] = []

    def spoil(self, rollout: Rollout) -> Rollout:
        raise NotImplementedError

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        async for rollout in super().generate(requests, admit_together):
            sample = (rollout.group_id, rollout.sample_index)
            is_new = sample not in self.samples
            if is_new:
                self.samples.append(sample)
            yield self.spoil(rollout) if is_new and len(self.samples) % 5 == 0 else rollout


class Poisonous(Spoiling):
    """Returns NaN as a log-probability."""

    def spoil(self, rollout: Rollout) -> Rollout:
        rollout.sampler_logprobs_T[0] = np.nan
        return rollout


async def test_poisoned_rollouts_are_refused_counted_and_sampled_again(tmp_path: Path) -> None:
    def make(name: str) -> TableEngine:
        return Poisonous(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))

    async with Run(tmp_path, a_spec(tmp_path), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        assert run.observer.build_status().counters["poisoned"] > 0
        for batch in run.trained:
            assert all(np.isfinite(item.rollout.sampler_logprobs_T).all() for item in batch.rollouts)


class Foreign(Spoiling):
    """Returns, in turn, a token and experts that the policy does not have, as a replica with another model would."""

    def spoil(self, rollout: Rollout) -> Rollout:
        if len(self.samples) % 2:
            rollout.token_ids_T[0] = VOCAB
            return rollout
        return replace(rollout, experts_SLK=np.zeros((rollout.total_length + 1, 2, 1), dtype=np.uint8))


async def test_rollouts_with_tokens_or_experts_of_another_model_are_sampled_again(tmp_path: Path) -> None:
    """The coordinator did not know the policy, so that they reached the trainer, whose refusal ended the run."""

    def make(name: str) -> TableEngine:
        return Foreign(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))

    async with Run(tmp_path, a_spec(tmp_path), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        assert run.observer.build_status().counters["poisoned"] > 0
        rollouts = [item.rollout for batch in run.trained for item in batch.rollouts]
        assert all(rollout.token_ids_T.max() < VOCAB and rollout.experts_SLK is None for rollout in rollouts)


class Forgetful(Spoiling):
    """Leaves out the sampling sets."""

    def spoil(self, rollout: Rollout) -> Rollout:
        return replace(rollout, sets=None)


async def test_rollouts_with_top_p_bring_their_sampling_sets_to_the_trainer(tmp_path: Path) -> None:
    """Canaries and validations work; rollouts without sets are refused and sampled again."""

    def make(name: str) -> TableEngine:
        return Forgetful(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))

    spec = a_spec(tmp_path)
    sampling = spec.generation.sampling.model_copy(update={"top_p": Decimal("0.9"), "top_k": 20})
    generation = spec.generation.model_copy(update={"sampling": sampling})
    async with Run(tmp_path, spec.model_copy(update={"generation": generation}), make_engine=make) as run:
        await run.finish()
        check_promises(run)
        counters = run.observer.build_status().counters
        assert counters["poisoned"] > 0
        rollouts = [item.rollout for batch in run.trained for item in batch.rollouts]
        assert all(rollout.sets is not None for rollout in rollouts)
        sizes = np.concatenate([rollout.sets.sizes_N for rollout in rollouts if rollout.sets is not None])
        assert 1 <= sizes.min() < sizes.max() <= 20


class OneFailurePerPrompt(LengthGrader):
    """Fails to grade the first completion of each prompt; five failures would end the prompt."""

    def __init__(self) -> None:
        super().__init__()
        self.failed: set[int] = set()

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        if prompt.position not in self.failed:
            self.failed.add(prompt.position)
            return Reward(None, "the verifier hung")
        return await super().grade(prompt, text)


async def test_a_verifiers_failure_is_not_a_zero_reward(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path), grader=OneFailurePerPrompt()) as run:
        await run.finish()
        check_promises(run)
        status = run.observer.build_status()
        assert 0 < status.counters["ungraded"] <= status.verdict_failures["the verifier hung"]


async def test_a_verifier_that_always_fails_on_a_prompt_fails_the_prompt_and_not_the_run(tmp_path: Path) -> None:
    class OnePromptFails(LengthGrader):
        async def grade(self, prompt, text):  # type: ignore[no-untyped-def]
            if prompt.position == 4:
                return Reward(None, "the verifier crashed")
            return await super().grade(prompt, text)

    async with Run(tmp_path, a_spec(tmp_path), grader=OnePromptFails()) as run:
        await run.finish()
        assert {report.step: report.failed for report in run.observer.read_reports() if report.failed} == {
            2: {"000002-00001": "the verifier crashed"}
        }
        assert run.observer.build_status().given_up == {"the verifier crashed": 1}
        assert run.store.read_facts().get("failedPrompts") == {}, "one that they all stayed in would grow with the run"
        assert run.observer.build_status().counters["failedPrompts"] == 1
        groups = {item.rollout.group_id for batch in run.trained for item in batch.rollouts}
        assert len(groups) == 17
        assert "000002-00001" not in groups


async def test_another_seed_has_other_rollouts_trained(tmp_path: Path) -> None:
    """tests/integration/test_determinism.py shows with real engines that the same seed gives the same rollouts."""

    async def rollouts(name: str, seed: int) -> list[list[int]]:
        (tmp_path / name).mkdir()
        async with Run(tmp_path / name, a_spec(tmp_path / name, steps=1, maxPolicyLag=0, seed=seed)) as run:
            await run.finish()
            return [item.rollout.token_ids_T.tolist() for item in run.trained[0].rollouts]

    first = await rollouts("first", 1)
    assert first == await rollouts("again", 1)
    assert first != await rollouts("other", 2)


class StepFails(LengthGrader):
    """Returns no valid reward for any prompt of step 3 until it is repaired."""

    def __init__(self, how: Reward) -> None:
        super().__init__()
        self.how = how
        self.is_repaired = False

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        if prompt.position in range(6, 9) and not self.is_repaired:
            return self.how
        return await super().grade(prompt, text)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (Reward(None, "KeyError at my_rewards.py:12"), "3 prompts given up: KeyError at my_rewards.py:12"),
        (Reward(0.0, error="KeyError at my_rewards.py:12"), "the verifier failed: KeyError at my_rewards.py:12"),
    ],
    ids=["ungraded", "zero"],
)
async def test_a_step_without_a_valid_reward_ends_the_run_which_resumes_once_repaired(
    tmp_path: Path, how: Reward, said: str
) -> None:
    """A run whose reward function always raised trained on nothing to its end, and exited with code 0.

    The last checkpoint is kept, no prompt of the step is settled, and its rollouts are graded again after the repair.
    """
    grader = StepFails(how)
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=0), grader=grader) as run:
        with pytest.raises(NothingGraded, match="step 3 must have a graded rollout to learn from") as ended:
            await run.finish()
        assert said in str(ended.value)
        assert ended.value.exit_code == 2
        assert [report.step for report in run.observer.read_reports()] == [1, 2]
        status = run.observer.build_status()
        assert list(status.verdict_failures) == ["KeyError at my_rewards.py:12"]
        assert (status.counters["failedPrompts"], status.checkpoint_step) == (0, 2)
        grader.is_repaired = True
        await run.restart_coordinator()
        await run.finish()
        check_promises(run)
        assert not any(report.failed for report in run.observer.read_reports())


async def test_the_step_before_one_that_ends_the_run_is_checkpointed(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=0), grader=FailsFrom(3)) as run:
        with pytest.raises(NothingGraded):
            await run.finish()
        assert run.observer.build_status().checkpoint_step == 3, "everySteps is 2"
        assert checkpoints.check_complete(tmp_path / "checkpoints" / "step-000003") == 3


@pytest.mark.parametrize("lag", [0, 1, 2])
async def test_a_run_in_which_nothing_is_graded_ends_at_its_first_step(tmp_path: Path, lag: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path, maxPolicyLag=lag), grader=FailsFrom(0)) as run:
        with pytest.raises(NothingGraded, match="step 1 must have a graded rollout"):
            await run.finish()
        assert run.observer.read_reports() == []
        assert [report.failures for report in run.observer.read_validations()] == [{"TypeError at my_rewards.py:3": 4}]
        assert run.trained == []


class DrivenRun(Run):
    """A run whose loop is driven as in a pod."""

    async def start_coordinator(self) -> None:
        await super().start_coordinator()
        self.running.cancel()  # before its first step
        self.running = asyncio.create_task(
            _run_until_stopped(self.loop, asyncio.Event(), cast(RLJobStatusWriter, object()))
        )


async def test_in_a_pod_a_run_that_cannot_learn_ends_its_process_with_the_reason(tmp_path: Path) -> None:
    """The exit code is 2, which the operator turns into Failed (tests/unit/operator/test_reconcile.py)."""
    async with DrivenRun(tmp_path, a_spec(tmp_path), grader=FailsFrom(0)) as run:
        with pytest.raises(NothingGraded) as ended:
            await run.finish()
        status = run.observer.build_status()
        assert (status.phase, status.error, status.needs_user) == (Phase.FAILED, str(ended.value), True)


class Constant(LengthGrader):
    """Gives every completion the same reward."""

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        return Reward(0.5)


async def test_constant_rewards_are_counted_as_groups_that_teach_nothing(tmp_path: Path) -> None:
    """With `return 0.5`, neither the terminal nor the summary nor the report showed that the run learned nothing."""
    async with Run(tmp_path, a_spec(tmp_path), grader=Constant()) as run:
        await run.finish()
        assert [(report.groups, report.groups_without_signal) for report in run.observer.read_reports()] == [(3, 3)] * 6
        summary = run.observer.build_status().summary
        assert summary is not None
        assert (summary.groups, summary.groups_without_signal) == (18, 18)
        for validation in run.observer.read_validations():
            assert (validation.reward, validation.reward_low, validation.pass_at) == (0.5, None, [])


async def test_the_summary_compares_first_and_last_steps_that_do_not_overlap(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path, steps=3)) as run:
        await run.finish()
        summary = run.observer.build_status().summary
        rewards = [report.reward for report in run.observer.read_reports()]
        assert summary is not None
        assert (summary.first_reward, summary.last_reward, summary.reward_steps) == (rewards[0], rewards[2], 1)


class FailsFrom(LengthGrader):
    """Fails on prompts of steps after `step`."""

    def __init__(self, step: int) -> None:
        super().__init__()
        self.step = step

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        if prompt.position >= 3 * self.step:
            return Reward(None, "TypeError at my_rewards.py:3")
        return await super().grade(prompt, text)


class TooEasy(LengthGrader):
    """Gives equal rewards within some groups: all right, or, for one of step 4, all wrong. Others differ."""

    rights = (1, 6, 7, 8)

    async def grade(self, prompt: Prompt, text: str) -> Reward:
        await asyncio.sleep(0)
        if prompt.position in (*self.rights, 9):
            return Reward(float(prompt.position in self.rights))
        self.calls += 1
        return Reward(float(self.calls % 2))


@pytest.mark.parametrize("lag", [0, 1])
async def test_groups_without_signal_are_left_out_named_and_settled_once(tmp_path: Path, lag: int) -> None:
    spec = a_spec(tmp_path, maxPolicyLag=lag)
    loss = spec.trainer.loss.model_copy(update={"without_signal": WithoutSignal.LEAVE_OUT})
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"loss": loss})})
    async with Run(tmp_path, spec, grader=TooEasy()) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 3)
        await run.restart_trainer()
        await run.restart_coordinator()
        await run.finish()
        batches = distinct(run.trained)
        assert sorted(p for batch in batches.values() for p in batch.positions) == list(range(18)), "each prompt once"
        left_out: dict[str, set[int]] = {}
        for report in run.observer.read_reports():
            trained = {place_of(run, item.rollout) for item in batches[report.step].rollouts}
            named = {place for places in report.left_out.values() for place in places}
            assert trained | named == set(batches[report.step].positions)
            assert not trained & named
            assert report.groups_without_signal >= len(named)
            assert report.reward is not None, "of all groups, trained on or not"
            assert (report.tokens == 0) == (not trained)
            for reward, places in report.left_out.items():
                left_out.setdefault(reward, set()).update(places)
        assert left_out["1"] >= {1, 6, 7, 8}
        assert left_out["0"] >= {9}
        assert run.observer.read_reports()[2].updates == 0, "a step without any signal trains nothing"
        status = run.observer.build_status()
        assert status.counters["groupsLeftOut"] == sum(map(len, left_out.values())), "by a second coordinator, too"
        assert (status.counters["unaccountedRollouts"], status.counters["failedPrompts"]) == (0, 0)
        assert run.store.read_rollouts() == [], "nothing of a settled step is left"


async def test_a_disk_that_is_full_at_a_checkpoint_does_not_end_the_run(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        assert run.trainer is not None
        write = run.trainer.backend.write_checkpoint

        def refuse_once(directory: Path, taken: Any, state: Any) -> None:
            if directory.name == "step-000002":
                raise StoreFailed(
                    f"a checkpoint must be written to {directory}, got a full disk; make room on the disk"
                )
            write(directory, taken, state)

        run.trainer.backend.write_checkpoint = refuse_once  # type: ignore[method-assign]
        await run.until(
            lambda: (
                run.store.read_last_trained_step() >= 3
                and run.observer.build_status().counters["checkpointsFailed"] == 1
            )
        )
        assert "make room on the disk" in run.observer.build_status().checkpoint_error
        assert run.store.list_batch_steps()[0] == 1, "what no checkpoint holds can be replayed"
        await run.restart_trainer()
        await run.finish()
        assert run.observer.build_status().checkpoint_error == "", "a later one is complete"
        check_promises(run)


async def test_training_continues_while_a_checkpoint_is_written_and_relies_on_the_previous_one(tmp_path: Path) -> None:
    """The checkpoint of step 4 never completes, so no batch may be deleted that only this checkpoint would cover."""
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        assert run.trainer is not None
        write = run.trainer.backend.write_checkpoint
        may_end = threading.Event()

        def never_of_step_4(directory: Path, taken: Any, state: Any) -> None:
            if directory.name == "step-000004":
                may_end.wait()
                raise StoreFailed("a checkpoint must be written, got a dead trainer")
            write(directory, taken, state)

        run.trainer.backend.write_checkpoint = never_of_step_4  # type: ignore[method-assign]
        await run.until(lambda: run.store.read_last_trained_step() >= 5)
        assert run.observer.build_status().checkpoint_step == 2
        assert run.store.list_batch_steps()[0] <= 3
        assert not (tmp_path / "checkpoints" / "step-000004").exists()
        killed = asyncio.ensure_future(run.trainer.kill())
        may_end.set()
        await killed
        await run.start_trainer()
        assert run.trainer.backend.get_status().step == 2
        await run.finish()
        check_promises(run)


async def test_a_request_for_a_checkpoint_is_answered_by_one_that_began_after_it(tmp_path: Path) -> None:
    """The end of the first requested checkpoint ended the second request, too, whose checkpoint had not begun."""
    spec = a_spec(tmp_path, steps=12)
    rare = spec.model_copy(update={"checkpoint": spec.checkpoint.model_copy(update={"every_steps": 100})})
    async with Run(tmp_path, rare) as run:
        assert run.trainer is not None
        controls = run.context.controls
        write = run.trainer.backend.write_checkpoint
        may_end = [threading.Event(), threading.Event(), threading.Event()]
        begun: list[str] = []

        def held(directory: Path, taken: Any, state: Any) -> None:
            begun.append(directory.name)
            may_end[len(begun) - 1].wait(60)
            write(directory, taken, state)

        await run.until(lambda: run.store.read_last_trained_step() >= 1)
        run.trainer.backend.write_checkpoint = held  # type: ignore[method-assign]
        controls.request_checkpoint()
        await run.until(lambda: len(begun) == 1)
        first = run.store.read_last_trained_step()
        await run.until(lambda: run.store.read_last_trained_step() > first)
        controls.request_checkpoint()
        await run.until(lambda: not controls.asked.is_set())
        may_end[0].set()
        await run.until(lambda: len(begun) == 2)
        assert controls.is_checkpoint_requested, "the second has begun, and is not complete"
        may_end[1].set()
        await run.until(lambda: not controls.is_checkpoint_requested)
        assert run.observer.build_status().checkpoint_step > first
        may_end[2].set()
        await run.finish()
        check_promises(run)


async def test_a_run_from_a_checkpoint_alone_trains_exactly_the_prompts_that_follow(tmp_path: Path) -> None:
    """In another folder with an empty store. The coordinator is killed before and after its first own step."""
    before = tmp_path / "before"
    after = tmp_path / "after"
    before.mkdir()
    async with Run(before, a_spec(before, maxPolicyLag=2)) as run:
        await run.finish()
        settled = {position for batch in run.trained if batch.step <= 4 for position in batch.positions}
        policy = run.trainer.backend.tables[4]
    checkpoints.copy_into(after, before / "checkpoints" / "step-000004")
    async with Run(after, a_spec(after, steps=8, maxPolicyLag=2)) as run:
        await run.until(lambda: run.link.last_trained_step() == 4)
        await run.restart_coordinator()
        await run.until(lambda: run.link.last_trained_step() == 6)
        await run.restart_coordinator()
        await run.finish()
        assert np.array_equal(run.trainer.backend.tables[4], policy)
        batches = distinct(run.trained)
        assert sorted(batches) == [5, 6, 7, 8]
        taken = [position for step in sorted(batches) for position in batches[step].positions]
        assert len(taken) == len(set(taken)) == 12
        assert settled.isdisjoint(taken)
        assert settled.union(taken) == set(range(24))
        assert run.observer.build_status().counters["unaccountedRollouts"] == 0
        assert [report.step for report in run.observer.read_reports()] == [5, 6, 7, 8]


async def test_a_checkpoint_that_cannot_be_read_costs_the_steps_since_the_one_before(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        assert run.trainer is not None
        await run.until((tmp_path / "checkpoints" / "step-000004" / "state.json").exists)
        await run.until(lambda: run.store.read_last_trained_step() >= 5)
        await run.trainer.kill()
        (tmp_path / "checkpoints" / "step-000004" / "policy.npy").write_bytes(b"no array")
        await run.start_trainer()
        assert run.trainer.backend.get_status().step == 2
        await run.finish()
        check_promises(run)
        replayed = [batch.step for batch in run.trained]
        assert replayed.count(3) == replayed.count(4) == 2


async def test_a_peer_with_another_run_file_is_refused(tmp_path: Path) -> None:
    from specrl.errors import RunInvalid
    from specrl.records import Peer, Role

    async with Run(tmp_path, a_spec(tmp_path)) as run:
        with pytest.raises(RunInvalid, match="run file"):
            await run.client.register_peer(Peer("gen-9", Role.GENERATION, "127.0.0.1:1", "another digest"))
