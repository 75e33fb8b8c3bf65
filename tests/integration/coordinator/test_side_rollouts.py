"""Rollouts of validations and of the drafter's initialisation are checked like those that are trained."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
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


def with_nan(rollout: Rollout) -> Rollout:
    logprobs_T = rollout.sampler_logprobs_T.copy()
    logprobs_T[0] = np.nan
    return replace(rollout, sampler_logprobs_T=logprobs_T)


def with_an_unknown_token(rollout: Rollout) -> Rollout:
    ids_T = rollout.token_ids_T.copy()
    ids_T[0] = VOCAB
    return replace(rollout, token_ids_T=ids_T)


@dataclass
class Attempts:
    """How often answers are spoiled, and what was asked for. counts: attempts by rollout id. seeds: with the id."""

    spoil: Callable[[Rollout], Rollout]
    times: int
    counts: Counter[str] = field(default_factory=Counter)
    seeds: set[tuple[str, int | None]] = field(default_factory=set)


class Poisonous(TableEngine):
    """Spoils the first `times` attempts at one answer of each kind."""

    def __init__(self, name: str, attempts: Attempts) -> None:
        super().__init__(name, seed=7, shape=TableShape(VOCAB, 128, 0.001))
        self.attempts = attempts

    async def _sample_rollout(self, request: RolloutRequest) -> Rollout:
        rollout = await super()._sample_rollout(request)
        if not request.rollout_id.startswith(KINDS) or not request.rollout_id.endswith("000001-0"):
            return rollout
        self.attempts.counts[request.rollout_id] += 1
        self.attempts.seeds.add((request.rollout_id, request.sampling.seed))
        is_spoiled = self.attempts.counts[request.rollout_id] <= self.attempts.times
        return self.attempts.spoil(rollout) if is_spoiled else rollout


@pytest.mark.parametrize(("spoil", "times"), [(with_nan, 1), (with_nan, 1000), (with_an_unknown_token, 1)])
async def test_malformed_side_rollouts_are_refused_counted_and_sampled_again(
    tmp_path: Path, spoil: Callable[[Rollout], Rollout], times: int
) -> None:
    """An answer for the drafter was stored as it came. The trainer refused it, at each restart again.

    An answer that is malformed in every attempt is left out, and counts as ungraded in a validation.
    """
    attempts = Attempts(spoil, times)
    spec = a_spec(tmp_path, steps=1)
    async with Run(tmp_path, spec, make_engine=lambda name: Poisonous(name, attempts)) as run:
        await run.finish()
        poisoned = sum(min(count, times) for count in attempts.counts.values())
        assert run.observer.build_status().counters["poisoned"] == poisoned
        is_given_up = times >= MAX_ATTEMPTS
        drafter = run.store.read_facts()["drafterStart"]
        assert drafter["rollouts"] == run.spec.trainer.drafter.initialisation.prompts - 1 - is_given_up
        assert [found.ungraded for found in run.observer.read_validations()] == [int(is_given_up)] * 2
    assert set(attempts.counts) == {"drafter-000001-0", "validation-0-000001-0", "validation-1-000001-0"}
    assert set(attempts.counts.values()) == {min(times + 1, MAX_ATTEMPTS)}
    assert len(attempts.seeds) == attempts.counts.total(), "each attempt has its own seed"


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
