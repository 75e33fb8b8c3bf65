"""Rollouts of validations and of the drafter's initialisation are checked like those that are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.integration.coordinator.small_run import VOCAB, Run, a_spec
from tests.stand_ins.engine import TableEngine, TableShape

from specrl.coordinator.ledger import SqliteStore, StoredRollout
from specrl.coordinator.schedule.scheduler import MAX_ATTEMPTS
from specrl.generation.service import GenerationService
from specrl.records import FinishReason, GradedRollout, Reward, Rollout, RolloutRequest, wire

KINDS = ("drafter", "validation")


class Poisonous(TableEngine):
    """Returns NaN as a log-probability in the first `times` attempts at one answer of each kind."""

    def __init__(self, name: str, times: int, attempts: Counter[str], seeds: set[tuple[str, int | None]]) -> None:
        super().__init__(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))
        self.times = times
        self.attempts = attempts
        self.seeds = seeds

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        rollout = await super()._sample_rollout(request)
        if not request.rollout_id.startswith(KINDS) or not request.rollout_id.endswith("000001-0"):
            return rollout
        self.attempts[request.rollout_id] += 1
        self.seeds.add((request.rollout_id, request.sampling.seed))
        if self.attempts[request.rollout_id] > self.times:
            return rollout
        logprobs_T = rollout.sampler_logprobs_T.copy()
        logprobs_T[0] = np.nan
        return replace(rollout, sampler_logprobs_T=logprobs_T)


@pytest.mark.parametrize("times", [1, 1000])
async def test_malformed_side_rollouts_are_refused_counted_and_sampled_again(tmp_path: Path, times: int) -> None:
    """An answer for the drafter was stored as it came. The trainer refused it, at each restart again.

    An answer that is malformed in every attempt is left out, and counts as ungraded in a validation.
    """
    attempts: Counter[str] = Counter()
    seeds: set[tuple[str, int | None]] = set()
    spec = a_spec(tmp_path, steps=1)
    async with Run(tmp_path, spec, make_engine=lambda name: Poisonous(name, times, attempts, seeds)) as run:
        await run.finish()
        assert run.observer.build_status().counters["poisoned"] == sum(min(n, times) for n in attempts.values())
        is_given_up = times >= MAX_ATTEMPTS
        drafter = run.store.read_facts()["drafterStart"]
        assert drafter["rollouts"] == run.spec.trainer.drafter.initialisation.prompts - 1 - is_given_up
        assert [found.ungraded for found in run.observer.read_validations()] == [int(is_given_up)] * 2
    assert set(attempts) == {"drafter-000001-0", "validation-0-000001-0", "validation-1-000001-0"}
    assert set(attempts.values()) == {min(times + 1, MAX_ATTEMPTS)}
    assert len(seeds) == sum(attempts.values()), "each attempt has its own seed"


async def test_a_malformed_stored_answer_is_sampled_again(tmp_path: Path) -> None:
    """Answers that an earlier version of the coordinator has stored ended the run at each restart."""
    no_tokens = np.zeros(0, dtype=np.int32)
    async with Run(tmp_path, a_spec(tmp_path, steps=1), started=()) as run:
        await run.kill_coordinator()
        name = "drafter-000001"
        logprobs_T = no_tokens.astype(np.float32)
        answer = Rollout(f"{name}-0", name, 0, no_tokens, logprobs_T, (), FinishReason.STOP, "gen-0", "", 0.0)
        store = SqliteStore(tmp_path / "store.db")
        data = wire.graded_to_bytes(GradedRollout(answer, Reward(None, "not graded")))
        store.put_rollouts([StoredRollout(0, 1, 0, 0, data)])
        store.close()
        await run.start_coordinator()
        await run.start_replica("gen-0")
        await run.start_replica("gen-1")
        await run.finish()
        assert run.store.read_facts()["drafterStart"]["rollouts"] == 3


class Misanswering(GenerationService):
    """Answers one side request of a kind in a way that no replica should."""

    kind = ""
    how = ""
    is_left = False

    async def Generate(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        async for message in super().Generate(request_iterator, context):
            if Misanswering.is_left and message.rollout_id.startswith(Misanswering.kind):
                Misanswering.is_left = False
                if Misanswering.how == "undecodable":
                    message.packed_sampler_logprobs = b"xyz"
                else:
                    yield message
            yield message


@pytest.mark.parametrize("how", ["twice", "undecodable"])
@pytest.mark.parametrize("kind", KINDS)
async def test_a_replica_that_misanswers_side_requests_registers_again(
    tmp_path: Path, kind: str, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error ended the run; in a training step it makes the replica stale."""
    monkeypatch.setattr(Misanswering, "kind", kind)
    monkeypatch.setattr(Misanswering, "how", how)
    monkeypatch.setattr(Misanswering, "is_left", True)
    async with Run(tmp_path, a_spec(tmp_path, steps=1), make_service=Misanswering) as run:
        await run.finish()
        assert [found.policy_version for found in run.observer.read_validations()] == [0, 1]
    assert not Misanswering.is_left
