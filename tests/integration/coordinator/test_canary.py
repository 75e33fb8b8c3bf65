"""The canary finds a replica that samples from another policy than the trainer's, at any lag.

Real loop, gRPC and weight broadcast; the stand-in engine serves the very table that the trainer trains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import structlog
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape, log_softmax

from specrl.errors import SamplerDisagrees
from specrl.generation.engine import LoadTiming
from specrl.records import Rollout, RolloutRequest, WeightChecksums
from specrl.spec import RunSpec

SHAPE = TableShape(VOCAB, 128, 0.001)
FOR_EVER = 10**9


def with_canary(spec: RunSpec, **changes: Any) -> RunSpec:
    return spec.model_copy(update={"canary": spec.canary.model_copy(update=changes)})


def only_gen_0(kind: Callable[[str], TableEngine]) -> Callable[[str], TableEngine]:
    """Engines; that of the first replica is of another kind."""
    return lambda name: kind(name) if name == "gen-0" else TableEngine(name, seed=7, shape=SHAPE)


def check_nothing_wrong_was_trained(run: Run) -> int:
    """Check that every trained token has the log-probability of its policy version. Returns the number of tokens."""
    assert run.trainer is not None
    tables = run.trainer.backend.tables
    tokens = 0
    for batch in run.trained:
        for item in batch.rollouts:
            assert not item.rollout.group_id.startswith("canary")
            before = [item.prompt_token_ids[-1], *item.rollout.token_ids_T.tolist()]
            for span in item.rollout.versions:
                for place in range(span.first, span.end):
                    expected = log_softmax(tables[span.policy_version][before[place]])[before[place + 1]]
                    assert abs(expected - item.rollout.sampler_logprobs_T[place]) < 1e-4
                    tokens += 1
    return tokens


@pytest.mark.parametrize("lag", [0, 1])
async def test_every_step_reports_that_all_replicas_agree(tmp_path: Path, lag: int) -> None:
    async with Run(tmp_path, a_spec(tmp_path, steps=4, maxPolicyLag=lag)) as run:
        await run.finish()
        check_nothing_wrong_was_trained(run)
        for report in run.observer.read_reports():
            assert 0 < report.canary_tokens <= 2 * 2 * 16
            assert report.canary_max_abs is not None
            assert report.canary_max_abs < 1e-4
            assert report.canary_mean_abs is not None
            assert 0 < report.canary_seconds < report.phases.prepare
            assert report.drafter_version == report.policy_version
        status = run.observer.build_status()
        assert status.counters["canariesDisagreed"] == status.counters["canariesSkipped"] == 0
        for replica in status.replicas:
            assert (replica.policy_version, replica.drafter_version) == (4, 4)
            assert replica.canary_max_abs is not None


async def test_a_stale_sampler_is_found_with_lag_and_repaired_by_sending_the_weights_again(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        run.replicas["gen-0"].engine.stale_loads = 1
        with structlog.testing.capture_logs() as lines:
            await run.finish()
        assert max(max(batch.policy_lags) for batch in run.trained) == 1
        assert check_nothing_wrong_was_trained(run) > 0
        found = [line for line in lines if line["event"] == "sampler_disagreed"]
        assert [(line["replica"], line["repeated"], line["log_level"]) for line in found] == [("gen-0", False, "error")]
        assert found[0]["max_abs"] > 1e-2 or found[0]["mean_abs"] > 1e-3
        status = run.observer.build_status()
        assert status.counters["canariesDisagreed"] == 1
        assert [report.step for report in run.observer.read_reports()] == list(range(1, 7))
        (bad,) = [report for report in run.observer.read_reports() if report.canary_max_abs == found[0]["max_abs"]]
        assert bad.step == found[0]["policy_version"]
        assert all(replica.policy_version == 6 for replica in run.registry.replicas.values())


async def test_a_sampler_that_stays_wrong_ends_the_run_and_none_of_its_rollouts_is_stored(tmp_path: Path) -> None:
    async with Run(tmp_path, a_spec(tmp_path)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        run.replicas["gen-0"].engine.stale_loads = FOR_EVER
        with structlog.testing.capture_logs() as lines, pytest.raises(SamplerDisagrees, match="of gen-0 at policy"):
            await run.finish()
        found = [line for line in lines if line["event"] == "sampler_disagreed"]
        assert [(line["replica"], line["repeated"]) for line in found] == [("gen-0", False), ("gen-0", True)]
        assert found[0]["policy_version"] == found[1]["policy_version"] == run.store.read_last_trained_step()
        agreed = [line["replica"] for line in lines if line["event"] == "canary_agreed"]
        assert set(agreed) == {"gen-1"}, "the other replica is not to blame"
        ended = run.store.read_last_trained_step()
        # With a correct engine the run resumes: the store has no rollout of the wrong sampler.
        await run.restart_coordinator()
        await run.restart_replica("gen-0")
        await run.finish()
        assert ended < 6
        assert check_nothing_wrong_was_trained(run) > 0


class AsksDuringCanary(TableEngine):
    """Calls `on_canary` when the canary of a version arrives."""

    on_canary: Callable[[str], Any] | None = None
    is_silent = False

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        if requests[0].rollout_id.startswith("canary"):
            if self.on_canary is not None:
                self.on_canary(requests[0].rollout_id)
            if self.is_silent:
                await asyncio.sleep(FOR_EVER)
        async for rollout in super().generate(requests, admit_together):
            yield rollout


async def test_a_replica_that_dies_during_its_canary_is_lost_and_does_not_disagree(tmp_path: Path) -> None:
    killing: list[asyncio.Task[None]] = []
    async with Run(tmp_path, a_spec(tmp_path), make_engine=lambda name: AsksDuringCanary(name, 7, SHAPE)) as run:

        def kill(name: str) -> None:
            if name.startswith("canary-3-"):
                killing.append(asyncio.create_task(run.replicas["gen-0"].kill()))

        engine = run.replicas["gen-0"].engine
        assert isinstance(engine, AsksDuringCanary)
        engine.on_canary = kill
        await run.finish()
        assert len(killing) == 1
        status = run.observer.build_status()
        assert status.counters["canariesDisagreed"] == 0
        serving = [replica.id for replica in status.replicas if replica.state == "serving"]
        assert serving == ["gen-1"], "the other is suspect, or gone"
        assert all(report.canary_tokens > 0 for report in run.observer.read_reports())


async def test_a_restarted_coordinator_resumes_no_rollout_of_a_version_that_no_canary_checked(
    tmp_path: Path,
) -> None:
    """Only this test fails if the coordinator resumes all that replicas hold (mutant resumed-from-a-bad-engine)."""
    slow = TableShape(VOCAB, 128, 0.02)
    async with Run(tmp_path, a_spec(tmp_path), make_engine=lambda name: AsksDuringCanary(name, 7, slow)) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 2)
        asked: list[str] = []
        for replica in run.replicas.values():
            assert isinstance(replica.engine, AsksDuringCanary)
            replica.engine.on_canary = asked.append
            replica.engine.is_silent = True
        await run.until(lambda: bool(asked) and any(replica.service.list_held() for replica in run.replicas.values()))
        await run.kill_coordinator()
        assert any(replica.service.list_held() for replica in run.replicas.values()), "there was something to take up"
        for replica in run.replicas.values():
            assert isinstance(replica.engine, AsksDuringCanary)
            replica.engine.is_silent = False
        await run.start_coordinator()
        await run.finish()
        assert run.observer.build_status().counters["resumed"] == 0
        assert check_nothing_wrong_was_trained(run) > 0


async def test_an_unanswered_canary_is_skipped_and_counted_with_a_warning_from_the_third_on(
    tmp_path: Path,
) -> None:
    class Silent(AsksDuringCanary):
        is_silent = True

    spec = with_canary(a_spec(tmp_path, steps=2), timeout_s=1)
    with structlog.testing.capture_logs() as lines:
        async with Run(tmp_path, spec, make_engine=only_gen_0(lambda name: Silent(name, 7, SHAPE))) as run:
            await run.finish()
            status = run.observer.build_status()
    of_all = [line for line in lines if line["event"] == "canary_skipped"]
    assert status.counters["canariesSkipped"] == len(of_all)
    skips = [
        line for line in of_all if line["replica"] == "gen-0"
    ]  # on a busy machine the other replica may be late, too
    assert len(skips) >= 3
    assert [line["in_a_row"] for line in skips] == list(range(1, len(skips) + 1))
    assert [line["log_level"] for line in skips] == ["info", "info"] + ["warning"] * (len(skips) - 2)
    assert status.counters["canariesDisagreed"] == 0


class Foreign(TableEngine):
    """Answers the first `canaries` canaries as another model would."""

    canaries = 0

    def spoil(self, rollout: Rollout) -> Rollout:
        """Return a token that the policy does not have."""
        rollout.token_ids_T[0] = VOCAB
        return rollout

    async def generate(self, requests: Sequence[RolloutRequest], admit_together: bool) -> AsyncIterator[Rollout]:
        is_canary = requests[0].rollout_id.startswith("canary")
        self.canaries -= is_canary
        async for rollout in super().generate(requests, admit_together):
            yield self.spoil(rollout) if is_canary and self.canaries >= 0 else rollout


class ForeignExperts(Foreign):
    def spoil(self, rollout: Rollout) -> Rollout:
        """Return experts, which a dense policy does not have."""
        return replace(rollout, experts_SLK=np.zeros((rollout.total_length + 1, 2, 1), dtype=np.uint8))


@pytest.mark.parametrize(("kind", "said"), [(Foreign, "token ids must be < 32, got 32"), (ForeignExperts, "experts")])
async def test_a_replica_that_serves_another_model_disagrees(tmp_path: Path, kind: type[Foreign], said: str) -> None:
    """Its rollouts were left out of its canary, which was skipped. So it was trusted, and each rollout refused."""

    def make(name: str) -> TableEngine:
        engine = kind(name, 7, SHAPE)
        engine.canaries = FOR_EVER
        return engine

    async with Run(tmp_path, a_spec(tmp_path, steps=2), make_engine=only_gen_0(make)) as run:
        with structlog.testing.capture_logs() as lines, pytest.raises(SamplerDisagrees, match=f"gen-0 .*: {said}"):
            await run.finish()
        assert run.observer.build_status().counters["canariesDisagreed"] == 2
        assert run.store.read_rollouts() == []
    found = [line for line in lines if line["event"] == "sampler_disagreed"]
    assert [(line["replica"], line["repeated"]) for line in found] == [("gen-0", False), ("gen-0", True)]


async def test_a_replica_that_answers_one_canary_with_an_unknown_token_gets_its_weights_again(tmp_path: Path) -> None:
    """The trainer refused to score the token, which ended the run."""

    def make(name: str) -> TableEngine:
        engine = Foreign(name, 7, SHAPE)
        engine.canaries = 1
        return engine

    async with Run(tmp_path, a_spec(tmp_path, steps=2), make_engine=only_gen_0(make)) as run:
        await run.finish()
        counters = run.observer.build_status().counters
    assert (counters["canariesDisagreed"], counters["canariesSkipped"], counters["poisoned"]) == (1, 0, 0)


async def test_without_a_canary_no_replica_is_checked_and_nothing_is_reported(tmp_path: Path) -> None:
    asked: list[str] = []

    def make(name: str) -> TableEngine:
        engine = AsksDuringCanary(name, 7, SHAPE)
        engine.on_canary = asked.append
        engine.stale_loads = FOR_EVER
        return engine

    async with Run(tmp_path, with_canary(a_spec(tmp_path, steps=2), every_steps=0), make_engine=make) as run:
        await run.finish()
        assert asked == []
        for report in run.observer.read_reports():
            assert (report.canary_tokens, report.canary_mean_abs, report.canary_max_abs) == (0, None, None)


async def test_between_due_versions_only_replicas_that_join_are_checked(tmp_path: Path) -> None:
    asked: list[str] = []

    def make(name: str) -> TableEngine:
        engine = AsksDuringCanary(name, 7, SHAPE)
        engine.on_canary = asked.append
        return engine

    async with Run(tmp_path, with_canary(a_spec(tmp_path), every_steps=4), make_engine=make) as run:
        await run.until(lambda: run.store.read_last_trained_step() >= 1)
        await run.restart_replica("gen-0")
        await run.finish()
        versions = {(name.split("-")[1], name.split("-")[3]) for name in asked}
        assert {("0", "0"), ("0", "1"), ("4", "0"), ("4", "1")} <= versions
        assert {version for version, replica in versions if replica == "1"} == {"0", "4"}
        assert len(versions) == 5, f"the replica that joined was asked at once: {versions}"


class OlderDrafter(TableEngine):
    """Reports an older drafter than it was sent, for a number of loads."""

    wrong = 1

    async def load_weights(self, sent: WeightChecksums) -> LoadTiming:
        self.wrong -= 1
        return await super().load_weights(replace(sent, drafter_version=sent.drafter_version - (self.wrong >= 0)))


async def test_a_replica_with_another_drafter_than_was_sent_is_refused_at_the_commit(tmp_path: Path) -> None:
    spec = a_spec(tmp_path, steps=2)
    with structlog.testing.capture_logs() as lines:
        async with Run(tmp_path, spec, make_engine=only_gen_0(lambda name: OlderDrafter(name, 7, SHAPE))) as run:
            await run.finish()
            assert [replica.drafter_version for replica in run.observer.build_status().replicas] == [2, 2]
    refused = [line for line in lines if line["event"] == "replica_update_failed"]
    assert len(refused) == 1
    assert "serves policy version 0 with drafter version -1, but was sent 0 with 0" in refused[0]["reason"]
